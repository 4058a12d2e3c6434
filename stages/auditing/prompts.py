"""Laws of prompts: a pass draws each prompt once, every draw is accounted for, and no held-out prompt is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import AuditedRun, Round, tokens_digest
from rlhf.stages.common.tables import read_table, table_paths
from rlhf.stages.common.trained_prompts import read_names, rows_of, was_seen
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.columns import list_rows
from rlhf.tuning.rows import PROMPT_GROUP, CompletionRow
from rlhf.tuning.texts import normal

HELD_OUT = ("heldout", "heldout_preference", "heldout_sft", "heldout_labelled")


def check_coverage(run: AuditedRun, finding: Finding) -> None:
    """Rounds draw every prompt once before any prompt again (R22): counts differ by at most one after each round."""
    known = run.prompts
    counts: Counter[str] = Counter(dict.fromkeys(known, 0))
    for expected, round_ in enumerate(run.rounds):
        if not known or round_.number != expected:
            finding.left_out.append(f"{round_.name} and later: earlier rounds or prompts are not in this run")
            return
        own = round_.sampled[0]
        # Only the two columns that this law needs; laws over rounds read the whole table.
        asked = read_table(own.artifact, "rollouts/", CompletionRow, ("place", "prompt_id"))
        places = {row.place: row.prompt_id for row in own.refused} | {row.place: row.prompt_id for row in asked}
        counts.update(places.values())
        finding.checked += len(places)
        drawn = counts.most_common()
        (often, many), (rare, few) = drawn[0], drawn[-1]
        if many - few > 1 or len(counts) != len(known):
            finding.broken.append(
                f"{round_.name}: prompt {often} was drawn {many} times and {rare} {few} times "
                f"(after {counts.total()} draws of {len(known)} prompts)"
            )
            return


def check_places(round_: Round, finding: Finding) -> None:
    """A place has one prompt and G samples, each number once; refused and sampled places add up."""
    for sampled in round_.sampled:
        groups: dict[int, list[tuple[str, int]]] = {}
        for row in sampled.ends:
            groups.setdefault(row.place, []).append((row.prompt_id, row.sample))
        numbers = list(range(sampled.config["completions"]))
        for place, members in groups.items():
            holds = len({prompt for prompt, _ in members}) == 1 and sorted(n for _, n in members) == numbers
            finding.check(holds, f"{sampled.name}, place {place}: prompts and samples {members[:4]}")
        if sampled.artifact.stage == "rollout":
            refused, prompts = {row.place for row in sampled.refused}, sampled.config["prompts"]
            finding.checked += len(refused)
            if refused & groups.keys() or len(refused) + len(groups) != prompts:
                counts = f"{len(groups)} sampled and {len(refused)} refused of {prompts} places"
                finding.broken.append(f"{sampled.name}: {counts}")


def check_record(round_: Round, finding: Finding) -> None:
    """A completion has a log-probability for each token, names the policy of its rollout, and ended or was cut off."""
    for sampled in round_.sampled:
        limit = sampled.config["max_tokens"]
        for row in sampled.rows:
            tokens, logps = len(row.token_ids), np.asarray(row.logprobs)
            holds = tokens == len(logps) and row.policy == sampled.policy
            holds = holds and bool(((logps <= 1e-6) | np.isnan(logps)).all())
            if not sampled.is_played:
                holds = holds and 0 < tokens <= limit and (row.stop != "length" or tokens == limit)
            finding.check(holds, sampled.case(row))


def check_leakage(run: AuditedRun, finding: Finding) -> None:
    """No held-out prompt is in the training data of this run or of the policy that the run starts from.

    Prompts are compared by the group that they name, text, tokens and turns. A gate leaves out the prompts that the
    earlier policy was trained on.
    """
    data = run.artifacts.get("prepare")
    if data is None:
        finding.left_out.append("prepare is not in this run")
        return
    splits = sorted({f["path"].split("/")[0] for f in data.manifest["files"] if f["path"].endswith(".parquet")})
    trained: dict[str, str] = {}
    for split in splits:
        if split not in HELD_OUT and split != "dead":
            trained |= {name: split for _, names in _names(data, split) for name in names}
    # A prompt may be in several held-out splits and rows: it is one case.
    faults: dict[str, str] = {}
    for split in HELD_OUT:
        for prompt, names in _names(data, split) if split in splits else ():
            shared = next((name for name in names if name in trained), None)
            fault = "" if shared is None else f"{split}: {shared!r} is in {trained[shared]} too"
            faults[prompt] = faults.get(prompt) or fault
    seen = _seen_before(run, data, splits)
    if seen and "gate" in run.entries:
        finding.left_out.append(f"{len(seen)} that the earlier policy was trained on: the gate judges without them")
    elif seen:
        faults |= {prompt: faults.get(prompt) or fault for prompt, fault in seen.items()}
    for fault in faults.values():
        finding.check(not fault, fault)


def _seen_before(run: AuditedRun, data: Artifact, splits: Collection[str]) -> dict[str, str]:
    """Return the held-out prompts that the policy `start` was trained on, each with its case."""
    start = run.artifacts.get("start")
    before = set(read_names(start)) if start is not None else set()
    rows = ((split, row) for split in HELD_OUT if before and split in splits for row in rows_of(data, split))
    return {
        normal(row["prompt"]): f"{split}: {row['prompt']!r} was trained on before, by the policy of start"
        for split, row in rows
        if was_seen(row, before)
    }


def _names(data: Artifact, split: str) -> Iterable[tuple[str, list[str]]]:
    """Yield the prompt of each row of a split with the names that identify it: named group, text, tokens and turns.

    In SFT texts and tokens end before the first trained one, turns before each.
    """
    for path in table_paths(data, split):
        # Data may be many gigabytes: batches of a few columns.
        file = pq.ParquetFile(path)
        columns = [c for c in ("group", "prompt", "prompt_ids", "turns") if c in file.schema_arrow.names]
        for batch in file.iter_batches(columns=columns):
            for values in zip(*(_values(name, batch[name]) for name in columns), strict=True):
                row = dict(zip(columns, values, strict=True))
                # The default group is of the first question: such conversations may be on both sides of named splits.
                if str(row.get("group")).startswith(PROMPT_GROUP):
                    del row["group"]
                pairs = ((c, v) for c, value in row.items() for v in ((value or []) if c == "turns" else [value]))
                yield row["prompt"], [f"{column} {value}" for column, value in pairs if value not in (None, "")]


def _values(name: str, column: pa.Array) -> list[Any]:
    """Return the values of a column; of token ids their digests, None without any."""
    if name == "prompt":
        return [normal(text) for text in column.to_pylist()]
    if name != "prompt_ids":
        return column.to_pylist()
    return [tokens_digest(ids).hex() if ids else None for ids in list_rows(pa.chunked_array([column]))]


def check_prompts(round_: Round, finding: Finding) -> None:
    """Prompts of the rounds are rows of the data's `prompts`, with the same tokens.

    An environment writes the first context of a task: only its id is compared.
    """
    known = round_.run.prompts
    for sampled in round_.sampled if known else ():
        for row in sampled.rows:
            if row.sample == 0 and not row.part:
                holds = row.prompt_id in known and (
                    sampled.is_played or known[row.prompt_id] == tokens_digest(row.prompt_ids)
                )
                case = f"{sampled.name}: prompt {row.prompt_id} is not in the data, or has other tokens"
                finding.check(holds, case)


LAWS = [
    Law("leakage", "no held-out prompt is trained on", "held-out prompts", check_leakage),
    Law("coverage", "each prompt is drawn once before any is drawn again", "draws", check_coverage),
    Law("prompts", "prompts of rollouts are the prepared data, token by token", "prompts", check_prompts, "rounds"),
    Law("places", "each place has one prompt and all its samples, or a reason", "places", check_places, "rounds"),
    Law("record", "each completion has log-probabilities, policy and end", "completions", check_record, "rounds"),
]
