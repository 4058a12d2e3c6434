"""Laws of prompts: a pass sees each once, what was drawn is accounted for, and nothing held out is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import AuditedRun, Round, is_played, tokens_digest
from rlhf.stages.common.tables import read_table, table_paths
from rlhf.stages.common.trained_prompts import read_names, rows_of, was_seen
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.columns import list_rows
from rlhf.tuning.rows import PROMPT_GROUP, CompletionRow
from rlhf.tuning.texts import normal

HELD_OUT = ("heldout", "heldout_preference", "heldout_sft", "heldout_labelled")


def pass_by_pass(run: AuditedRun, finding: Finding) -> None:
    """Rounds draw every prompt once before any comes again (R22): counts differ by at most one after each round."""
    known = run.prompts
    counts: Counter[str] = Counter(dict.fromkeys(known, 0))
    for expected, round_ in enumerate(run.rounds):
        if not known or round_.number != expected:
            finding.left_out.append(f"{round_.name} and later: rounds or prompts before it are not in this run")
            return
        own = round_.sampled[0]
        # The two columns of a round's table that this law needs, which the laws of rounds read as a whole.
        asked = read_table(own.rollouts, "rollouts/", CompletionRow, ("place", "prompt_id"))
        places = {row.place: row.prompt_id for row in own.refused} | {row.place: row.prompt_id for row in asked}
        counts.update(places.values())
        few, many = min(counts.values()), max(counts.values())
        finding.checked += len(places)
        if many - few > 1 or len(counts) != len(known):
            often = counts.most_common(1)[0][0]
            never = next((i for i in known if counts[i] == few), "?")
            finding.broken.append(
                f"{round_.name}: prompt {often} was drawn {many} times while {never} was drawn {few} times "
                f"(after {counts.total()} draws of {len(known)} prompts)"
            )
            return


def one_group_a_place(round_: Round, finding: Finding) -> None:
    """(place, sample) names one completion; a place has one prompt and G samples; refused and sampled add up."""
    for sampled in round_.sampled:
        config = sampled.rollouts.manifest["config"]
        groups: dict[int, list[tuple[str, int]]] = {}
        for row in sampled.ends:
            groups.setdefault(row.place, []).append((row.prompt_id, row.sample))
        for place, members in groups.items():
            # One prompt, and each number once.
            prompts = {prompt for prompt, _ in members}
            right = len(prompts) == 1 and sorted(n for _, n in members) == list(range(config["completions"]))
            finding.check(right, f"{sampled.name}, place {place}: prompts and samples {members[:4]}")
        if sampled.rollouts.stage == "rollout":
            refused = {row.place for row in sampled.refused}
            finding.checked += len(refused)
            if refused & groups.keys() or len(refused) + len(groups) != config["prompts"]:
                of = f"of {config['prompts']} places"
                finding.broken.append(f"{sampled.name}: {len(groups)} sampled and {len(refused)} refused {of}")


def recorded(round_: Round, finding: Finding) -> None:
    """A completion has a log-probability for each token, names the policy of its rollout, and ended or was cut off."""
    for sampled in round_.sampled:
        policy = sampled.rollouts.manifest["inputs"]["policy"]["digest"]
        limit = sampled.rollouts.manifest["config"]["max_tokens"]
        for row in sampled.rows:
            tokens = len(row.token_ids)
            right = tokens == len(row.logprobs) and row.policy == policy
            if not is_played(sampled.rollouts):
                right = right and 0 < tokens <= limit and (row.stop != "length" or tokens == limit)
            logps = np.asarray(row.logprobs)
            right = right and bool(((logps <= 1e-6) | np.isnan(logps)).all())
            finding.check(right, f"{sampled.name}, place {row.place}, sample {row.sample}")


def nothing_held_out(run: AuditedRun, finding: Finding) -> None:
    """No held-out prompt, by the group that it names, its text, tokens and turns, is in what is trained on, here or by
    the policy that the run starts from. A gate leaves out what that one has seen."""
    data = run.artifacts.get("prepare")
    if data is None:
        finding.left_out.append("prepare is not in this run")
        return
    splits = sorted({f["path"].split("/")[0] for f in data.manifest["files"] if f["path"].endswith(".parquet")})
    trained: dict[str, str] = {}
    for split in splits:
        if split not in HELD_OUT and split != "dead":
            trained |= {name: split for _, names in _names(data, split) for name in names}
    # A prompt may be in several held-out splits, and in several rows of one: it is one case.
    faults: dict[str, str] = {}
    for split in HELD_OUT:
        for prompt, names in _names(data, split) if split in splits else ():
            shared = next((name for name in names if name in trained), None)
            fault = "" if shared is None else f"{split}: {shared!r} is in {trained[shared]} too"
            faults[prompt] = faults.get(prompt) or fault
    seen = _seen_before(run, data, splits)
    if seen and "gate" in run.entries:
        finding.left_out.append(f"{len(seen)} that the policy before was trained on: the gate judges without them")
    elif seen:
        faults |= {prompt: faults.get(prompt) or fault for prompt, fault in seen.items()}
    for fault in faults.values():
        finding.check(not fault, fault)


def _seen_before(run: AuditedRun, data: Artifact, splits: Collection[str]) -> dict[str, str]:
    """The held-out prompts that the policy which the run starts from was trained on, and the fault of each."""
    start = run.artifacts.get("start")
    before = set(read_names(start)) if start is not None else set()
    rows = ((split, row) for split in HELD_OUT if before and split in splits for row in rows_of(data, split))
    return {
        normal(row["prompt"]): f"{split}: {row['prompt']!r} was trained on before, by the policy of start"
        for split, row in rows
        if was_seen(row, before)
    }


def _names(data: Artifact, split: str) -> Iterable[tuple[str, list[str]]]:
    """The prompt of each row of a split, and what it may not share with a held-out one: its named group, text, tokens
    and turns.

    In SFT texts and tokens end before the first trained one, turns before each.
    """
    for path in table_paths(data, split):
        # A dataset of many gigabytes: batches of a few columns, not rows of all.
        file = pq.ParquetFile(path)
        columns = [c for c in ("group", "prompt", "prompt_ids", "turns") if c in file.schema_arrow.names]
        for batch in file.iter_batches(columns=columns):
            values = [_values(name, batch[name]) for name in columns]
            for of_row in zip(*values, strict=True):
                row = dict(zip(columns, of_row, strict=True))
                # Records that begin alike have one default group, and may be on either side where they name a split.
                if str(row.get("group")).startswith(PROMPT_GROUP):
                    del row["group"]
                said = ((c, v) for c, value in row.items() for v in ((value or []) if c == "turns" else [value]))
                yield row["prompt"], [f"{column} {value}" for column, value in said if value not in (None, "")]


def _values(name: str, column: pa.Array) -> list[Any]:
    """The values of a column; of token ids digests, and None without any."""
    if name == "prompt":
        return [normal(text) for text in column.to_pylist()]
    if name != "prompt_ids":
        return column.to_pylist()
    return [tokens_digest(ids).hex() if ids else None for ids in list_rows(pa.chunked_array([column]))]


def trained_on_own(round_: Round, finding: Finding) -> None:
    """Prompts of the rounds are rows of the data's `prompts`, with the tokens that they have there.

    The first context of a task is what its environment says: it is known by its id alone.
    """
    known = round_.run.prompts
    for sampled in round_.sampled if known else ():
        for row in sampled.rows:
            if row.sample == 0 and not row.part:
                same = is_played(sampled.rollouts) or known.get(row.prompt_id) == tokens_digest(row.prompt_ids)
                case = f"{sampled.name}: prompt {row.prompt_id} is not in the data, or has other tokens"
                finding.check(same and row.prompt_id in known, case)


LAWS = [
    Law("leakage", "no held-out prompt is trained on", "held-out prompts", nothing_held_out),
    Law("coverage", "each prompt is drawn once before any is drawn again", "draws", pass_by_pass),
    Law("prompts", "what is sampled from is the prepared data, token by token", "prompts", trained_on_own, "rounds"),
    Law(
        "places",
        "each place of a round has one prompt and all its samples, or a reason",
        "places",
        one_group_a_place,
        "rounds",
    ),
    Law(
        "record",
        "each completion has its tokens' log-probabilities, its policy and its end",
        "completions",
        recorded,
        "rounds",
    ),
]
