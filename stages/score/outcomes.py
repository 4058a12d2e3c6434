"""Outcomes of each reward for each completion of a round.

Finished calls are in journals in the work folder, one line each: a kill or an outage costs only the calls under way. A
call of a reward model has the groups of a shard, so that it packs the same rows after a kill. Journals hold values
alone; a failure of an earlier try is tried again, because it may have been the cause that the try ended (R25).
"""

from __future__ import annotations

import functools
import os.path
from collections.abc import Mapping, Sequence

from rlhf.stages.common.journal import Journal, journaled
from rlhf.stages.common.models import load_scorer, load_tokenizer, token_ids
from rlhf.stages.contract.definition import Context
from rlhf.stages.sampling.episode_tables import FAILED, Name, conversation_of, episodes_of, reward_of, sample_of
from rlhf.stages.score.settings import ENVIRONMENT, MODEL, Config
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning import multihost
from rlhf.tuning.agents.rows import TrajectoryRow
from rlhf.tuning.columns import Numbers
from rlhf.tuning.rewards.failures import check_failures
from rlhf.tuning.rewards.samples import Outcome, outcome_of
from rlhf.tuning.rows import CompletionRow

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
