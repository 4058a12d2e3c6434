"""Scores of one round's rollouts: each reward by name, and their weighted sum. Samples nothing.

Finished calls are in journals in the work folder, one line each: a kill or an outage costs only the calls under way. A
call of a reward model has the groups of a shard, so that it packs the same rows after a kill. Journals hold values
alone; a failure of an earlier try is tried again, because it may have been the cause that the try ended (R25).
"""

from __future__ import annotations

import functools
import json
import math
import os.path
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.stages.common.journal import Journal, journaled
from rlhf.stages.common.models import load_scorer, load_tokenizer, token_ids
from rlhf.stages.common.sandboxed_code import RUNS_CODE, code_can_reach, suspect_code
from rlhf.stages.contract.definition import Context, Reads, Stage
from rlhf.stages.sampling.episode_tables import FAILED, Name, conversation_of, episodes_of, reward_of, sample_of
from rlhf.stages.sampling.groups import informative_places, read_trajectories, totals_by_place
from rlhf.stages.score.settings import ENVIRONMENT, MODEL, Config, source_digests
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning import multihost
from rlhf.tuning.agents.rows import TrajectoryRow
from rlhf.tuning.columns import Numbers
from rlhf.tuning.rewards.failures import MOST, check_failures, tallied
from rlhf.tuning.rewards.samples import Outcome, outcome_of
from rlhf.tuning.rows import CompletionRow, ScoreRow, numbers_of_groups, write_table

Columns = dict[str, list[Outcome]]
"""The outcomes of each reward by its name, one for each completion."""


def outcomes_of(ctx: Context, names: Sequence[str], rollouts: Sequence[CompletionRow]) -> Columns:
    """Compute the outcomes of the rewards `names`, in the order of the rollouts; empty but on process 0 of a group.

    Raises Outage and TooManyFailures (`rlhf.tuning.rewards.failures`). The work folder keeps the finished scores.
    """
    config: Config = ctx.config
    by_place: dict[int, list[int]] = {}
    for number, row in enumerate(rollouts):
        if row.stop != FAILED:
            by_place.setdefault(row.place, []).append(number)
    groups = list(by_place.values())
    size = max(1, config.shard_completions // max(map(len, groups), default=1))
    scoring = _Scoring(ctx, names, rollouts)
    found: dict[str, dict[int, Outcome]] = {name: {} for name in names}
    for start in range(0, len(groups), size):
        shard = groups[start : start + size]
        numbers = [i for group in shard for i in group]
        for name in names:
            # A function of the whole round has been called for the first shard.
            if not found[name].keys() >= set(numbers):
                found[name] |= scoring.outcomes(name, shard)
        # An outage ends the stage at once; failures count over the whole round.
        check_failures({name: [found[name][i] for i in numbers] for name in names}, 1.0)
        ctx.saved()
        ctx.progress(start + len(shard), len(groups), "groups")
    if not ctx.is_primary:
        return {}
    from rlhf.tuning.rewards.totals import Part, bounded

    for name, reward in config.rewards.items():
        part = Part(name, **reward.part)
        found[name] = {i: bounded(outcome, part) for i, outcome in found[name].items()}
    # The first failure of the others ends the run (`rlhf.tuning.rewards.totals`).
    may_fail = {name: reward.function for name, reward in config.rewards.items() if reward.on_failure != "stop"}
    outcomes = {name: [found[name][i] for i in sorted(found[name])] for name in names if name in may_fail}
    check_failures(outcomes, config.max_failed_fraction, setting="rl.score.max_failed_fraction", functions=may_fail)
    # A failed episode has no outcome and no failure: `on_failure` and `normalise` must not make a number of it.
    return {name: [column.get(i, Outcome(None)) for i in range(len(rollouts))] for name, column in found.items()}


class _Scoring:
    """The rewards of one round with their journals."""

    def __init__(self, ctx: Context, names: Sequence[str], rollouts: Sequence[CompletionRow]):
        self._ctx, self._rollouts = ctx, rollouts
        self._episodes = episodes_of(ctx.inputs["rollouts"])
        seen = functools.partial(sample_of, episodes=self._episodes)
        self._journals = {name: Journal(ctx, f"reward {name}", f"journal-{name}", seen) for name in names}

    def outcomes(self, name: str, groups: Sequence[Sequence[int]]) -> dict[int, Outcome]:
        """The outcomes of a reward for some groups, by number of the completion."""
        config: Config = self._ctx.config
        reward = config.rewards[name]
        numbers = [i for group in groups for i in group]
        if reward.function == ENVIRONMENT:
            return {i: reward_of(self._rollouts[i], self._episodes) for i in numbers}
        if reward.function == MODEL:
            return dict(zip(numbers, self._learned(name, [self._rollouts[i] for i in numbers]), strict=True))
        if not self._ctx.is_primary:
            # All processes score for the reward model; process 0 calls the functions.
            return dict.fromkeys(numbers, Outcome(None))
        calls: Sequence[Sequence[int]] = groups
        if reward.batch == "round":
            calls = [[i for i, row in enumerate(self._rollouts) if row.stop != FAILED]]
        elif reward.batch == "sample":
            calls = [[i] for i in numbers]
        return journaled(
            self._journals[name],
            self._rollouts,
            calls,
            reward.function,
            reward.arguments,
            seconds=reward.seconds,
            megabytes=reward.megabytes,
            workers=config.workers,
            max_concurrency=config.max_concurrency,
        )

    def _learned(self, name: str, rows: Sequence[CompletionRow]) -> Sequence[Outcome]:
        journal = self._journals[name]

        def values() -> list[float | None] | None:
            known = journal.get(rows)
            return None if known is None else [outcome.value for outcome in known]

        if (kept := multihost.from_primary(values)) is not None:
            return [Outcome(value) for value in kept]
        found = _learned(self._ctx, name, rows, self._episodes)
        if self._ctx.is_primary and all(outcome.failure is None for outcome in found):
            journal.add(rows, found)
        return found


Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a prompt, and those after it up to the one at which a reward model is read."""


def _learned(
    ctx: Context, name: str, rows: Sequence[CompletionRow], episodes: Mapping[Name, TrajectoryRow]
) -> list[Outcome]:
    """Compute the outcomes of a reward model; a score that is not finite is a failure, as of any reward."""
    import numpy as np

    from rlhf.tuning.rewards.learned import score_groups
    from rlhf.tuning.training.batch import Group

    ready = name in ctx.config.ready
    scorer = ctx.inputs[f"scorer_{name}" if ready else "reward"]
    config, params = load_scorer(ctx, scorer, frozen=True)
    pairs = _rendered(ctx, scorer, config.max_positions, rows, episodes) if ready else _as_sampled(ctx, rows)
    keys = [p if isinstance(p, Outcome) else tuple(np.asarray(part, np.int32).tobytes() for part in p) for p in pairs]
    # Equal completions are computed once, and completions of one prompt share its tokens in a packed row.
    numbers = {key: i for i, key in enumerate(dict.fromkeys(key for key in keys if not isinstance(key, Outcome)))}
    by_prompt: dict[bytes, list[bytes]] = {}
    for prompt, tokens in numbers:
        by_prompt.setdefault(prompt, []).append(tokens)

    def ids(data: bytes) -> Numbers:
        return Numbers(np.frombuffer(data, np.int32))

    groups = [Group(ids(p), [ids(t) for t in texts], [numbers[p, t] for t in texts]) for p, texts in by_prompt.items()]
    compute, scores = ctx.config.compute, np.zeros(0)
    if groups:
        scores = score_groups(config, params, groups, dtype=compute.dtype, budget=compute.tokens_per_micro_batch)
    return [key if isinstance(key, Outcome) else outcome_of(float(scores[numbers[key]])) for key in keys]


def _as_sampled(ctx: Context, rows: Sequence[CompletionRow]) -> list[Pair | Outcome]:
    """Return the policy's own tokens, on which the run's reward model was trained."""
    from rlhf.tuning.models.tokenizer import turn_end
    from rlhf.tuning.rewards.learned import ended_by

    end = turn_end(load_tokenizer(ctx, ctx.inputs["tokenizer"]))
    found: list[Pair | Outcome] = []
    for row in rows:
        # A text of `stop` takes the place of the end of the turn, which `ended_by` writes over the last token.
        tokens = [*row.token_ids, 0] if row.stop == "string" else row.token_ids
        found.append((row.prompt_ids, Numbers(ended_by(None if row.stop == "length" else end, tokens))))
    return found


def _rendered(
    ctx: Context,
    scorer: Artifact,
    positions: int,
    rows: Sequence[CompletionRow],
    episodes: Mapping[Name, TrajectoryRow],
) -> list[Pair | Outcome]:
    """Render the conversations by a ready reward model's own template and tokenizer.

    A conversation that the template refuses, or that exceeds the model's positions, is a failure.
    """
    from rlhf.tuning.chat.template import Template
    from rlhf.tuning.rewards.learned import rendered

    template, pad = Template(load_tokenizer(ctx, scorer)), token_ids(scorer).get("pad_token_id")
    found: list[list[int] | Outcome] = []
    shared: dict[int, list[int]] = {}
    for row in rows:
        try:
            ids = rendered(template, conversation_of(row, episodes), pad)
            if len(ids) > positions:
                raise ValueError(f"{len(ids)} tokens, it has {positions} positions")
        except ValueError as e:
            found.append(Outcome(None, f"the reward model cannot read the conversation: {e}"))
            continue
        found.append(ids)
        # Completions of one place begin alike; the last token is the completion's.
        shared[row.place] = list(os.path.commonprefix([shared.get(row.place, ids), ids[:-1]]))
    cuts = [len(shared.get(row.place, ())) for row in rows]
    return [ids if isinstance(ids, Outcome) else (ids[:cut], ids[cut:]) for ids, cut in zip(found, cuts, strict=True)]


# Columns of a rollout that rewards see.
SEEN = (
    "place", "sample", "part", "prompt_id", "prompt", "answer", "metadata", "prompt_ids", "token_ids", "text", "stop",
)  # fmt: skip
SCALE = "scale.json"
"""The file of the artifact with the scales of rewards that are normalised over the round."""
NO_END = "the episode has no end"
"""The failure of a completion whose environment failed; `trajectories/` has the reason."""
REASON_WIDTH = 60
"""Characters of a reason on the console."""


def run(ctx: Context) -> dict[str, Any]:
    """Write the score table; return means by reward and shares of failures."""
    config: Config = ctx.config
    # A trajectory in several parts has one reward; its last part says how it ended.
    rollouts = [parts[-1] for parts in read_trajectories(ctx.inputs["rollouts"], SEEN)]
    names = sorted(config.rewards)
    functions = [config.rewards[name].function for name in names]
    about_code = code_can_reach(ctx, functions)
    columns = outcomes_of(ctx, names, rollouts)
    if not ctx.is_primary:
        return {}
    rows = with_totals(ctx, rollouts, columns)
    write_table(ctx.out / "scores" / "part-00000.parquet", rows, ScoreRow.schema(names))
    if RUNS_CODE in functions:
        values = [[outcome.value for outcome in columns[name]] for name in names]
        about_code["suspect_code"] = suspect_code(functions, values, [row.text for row in rollouts])
    return summarise(rows, columns) | about_code


def with_totals(ctx: Context, rollouts: Sequence[CompletionRow], columns: Columns) -> list[ScoreRow]:
    """Return the score table, in the order of the rollouts: shaped rewards, their weighted sum and the failures.

    `scale.json` receives the mean and deviation of rewards that are normalised over the round, for the scores of its
    refills and greedy completions.
    """
    from rlhf.tuning.rewards.totals import Part, scales_of, shaped, totals

    config: Config = ctx.config
    parts = [Part(name, **reward.part) for name, reward in sorted(config.rewards.items())]
    values = [
        [o if o.value is None else Outcome(shaped(o.value, part), o.failure) for o in columns[part.name]]
        for part in parts
    ]
    if config.round_scale:
        scales = json.loads(ctx.inputs["scale"].local(SCALE).read_bytes())
    elif scales := scales_of(values, parts, config.unscored):
        (ctx.out / SCALE).write_text(json.dumps(scales, sort_keys=True) + "\n")
    sums, failures = totals(values, parts, numbers_of_groups(rollouts), config.unscored, scales)
    rows = []
    for i, (row, total) in enumerate(zip(rollouts, sums.tolist(), strict=True)):
        # The total is NaN if a reward failed and its `on_failure` is `drop`, or if none applies.
        kept = None
        if math.isfinite(total) and row.stop != FAILED:
            kept = 0.0 if config.truncated == "zero" and row.stop == "length" else total
        rows.append(
            ScoreRow(
                place=row.place,
                sample=row.sample,
                prompt_id=row.prompt_id,
                rewards={part.name: column[i].value for part, column in zip(parts, values, strict=True)},
                total=kept,
                failure=NO_END if row.stop == FAILED else failures[i],
            )
        )
    return rows


def summarise(rows: Sequence[ScoreRow], columns: Columns) -> dict[str, Any]:
    """Return means by reward, and shares of failed and unscored completions and of groups that tie.

    `failures` counts the commonest reasons, each after the name of its reward. Without a scored group their share is
    None.
    """
    import numpy as np

    if not rows:
        return {"completions": 0}
    totals = [row.total for row in rows if row.total is not None]
    groups = {place: mine for place, mine in totals_by_place(rows).items() if mine}
    reasons = {f"{name}: {reason}": n for name in columns for reason, n in tallied(columns[name]).reasons.items()}
    metrics: dict[str, Any] = {
        "completions": len(rows),
        "failed": sum(row.failure is not None for row in rows) / len(rows),
        "failures": dict(sorted(reasons.items(), key=lambda item: -item[1])[:MOST]),
        "unscored": sum(not any(o.applies for o in row) for row in zip(*columns.values(), strict=True)) / len(rows),
        "reward": float(np.mean(totals)) if totals else None,
        "spread": float(np.std(totals)) if totals else None,
        "zero_variance": (len(groups) - len(informative_places(groups))) / len(groups) if groups else None,
    }
    for name in columns:
        values = [value for row in rows if (value := row.rewards[name]) is not None]
        metrics[f"reward_{name}"] = float(np.mean(values)) if values else None
    return metrics


def _means(metrics: Mapping[str, Any]) -> str:
    """Format the mean total, and the mean of each reward if there are several."""
    prefix = "reward_"
    means = {k.removeprefix(prefix): v for k, v in sorted(metrics.items()) if k.startswith(prefix)}
    shown = {"reward": metrics.get("reward")} | (means if len(means) > 1 else {})
    # A line without the mean would hide that there is none.
    return "  ".join(f"{name} {'none' if value is None else f'{value:.3f}'}" for name, value in shown.items())


def _failed(metrics: Mapping[str, Any]) -> str:
    """Format the shares without a reward that are above 0, and the commonest reason."""
    shown = []
    if failed := metrics.get("failed"):
        reason = textwrap.shorten(next(iter(metrics.get("failures") or {}), ""), REASON_WIDTH, placeholder=" …")
        shown.append(f"failed {failed:.2f}" + (f" ({reason})" if reason else ""))
    if unscored := metrics.get("unscored"):
        shown.append(f"no reward applies {unscored:.2f}")
    return "  ".join(shown)


STAGE = Stage(
    "score",
    1,
    Config,
    run,
    sources=source_digests,
    computes=lambda config: config.learned,
    draws=lambda config: False,
    processes=lambda config: "all" if config.learned else "primary",
    work="score",
    section="rl.score",
    title="scores",
    makes="scores",
    reads={
        "rollouts": Reads("rollouts"),
        "reward": Reads("reward", when=lambda c, _: bool(c.of_run)),
        "tokenizer": Reads("tokenizer", ("tokenizer/",), when=lambda c, _: bool(c.of_run)),
        "scorers": Reads("scorer_*", when=lambda c, _: bool(c.ready)),
        "scale": Reads("scale", (SCALE,), when=lambda c, _: c.round_scale),
    },
    headline=(_means, _failed, "zero-var {zero_variance:.2f}"),
)
