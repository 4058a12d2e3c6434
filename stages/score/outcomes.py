"""What each reward gave for each completion of a round: calls, and what a kill or an outage leaves of them.

    journal   of a reward function, in the work folder: one line a finished call
    shards    outcomes of some groups by all rewards, in the work folder and mirrored to a remote store

Both are trusted for values alone. A failure that an earlier try has met is tried again: it may have been the cause that
the try ended, and is content only once the stage has succeeded (R25).
"""

from __future__ import annotations

import dataclasses
import functools
import os.path
from collections.abc import Mapping, Sequence
from typing import Annotated

import pyarrow as pa

from rlhf.stages.common.journal import Journal, journaled
from rlhf.stages.common.models import load_scorer, load_tokenizer, token_ids
from rlhf.stages.common.tables import Shards, by_shard
from rlhf.stages.contract.definition import Context
from rlhf.stages.sampling.episode_tables import FAILED, Name, conversation_of, episodes_of, reward_of, sample_of
from rlhf.stages.score.grouped import hint
from rlhf.stages.score.settings import COMPUTED, ENVIRONMENT, Config, Reward
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning import multihost
from rlhf.tuning.agents.rows import TrajectoryRow
from rlhf.tuning.columns import Numbers
from rlhf.tuning.rewards.failures import TooManyFailures, check_failures
from rlhf.tuning.rewards.samples import Outcome, outcome_of
from rlhf.tuning.rows import CompletionRow, Index, Number, Row, Text, columns_of

Columns = dict[str, list[Outcome]]
"""The outcomes of each reward by its name, one for each completion."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutcomeRow(Row):
    """The outcome of every reward for a completion: a row of a shard in the work folder."""

    place: Number
    sample: Index
    prompt_id: Text
    values: Annotated[Mapping[str, float | None], pa.struct([])]
    failures: Annotated[Mapping[str, str | None], pa.struct([])]

    @classmethod
    def schema(cls, names: Sequence[str] = ()) -> pa.Schema:
        """Columns of a table with these rewards."""
        # As the functions gave them, in 64 bits: totals must not depend on which shards an earlier try has left.
        values = pa.struct([(name, pa.float64()) for name in names])
        failures = pa.struct([(name, pa.string()) for name in names])
        # The structs have a field a reward, which the class cannot know.
        columns = columns_of(cls) | {"values": values, "failures": failures}
        return pa.schema(list(columns.items()))

    def outcome(self, name: str) -> Outcome:
        """What the reward `name` gave."""
        return Outcome(self.values[name], self.failures[name])

    @property
    def failed(self) -> bool:
        """Whether any reward failed."""
        return any(failure is not None for failure in self.failures.values())


def outcomes_of(ctx: Context, names: Sequence[str], rollouts: Sequence[CompletionRow]) -> Columns:
    """The outcomes of the rewards `names`, in the order of the rollouts; of a process group on process 0 alone.

    Raises Outage and TooManyFailures (`rlhf.tuning.rewards.failures`), and RewardFailed for a reward whose `on_failure`
    is `stop`. What was scored until then is kept in the work folder.
    """
    config: Config = ctx.config
    groups = _groups(rollouts)
    scoring = _Scoring(ctx, names, rollouts)
    largest = max(map(len, groups), default=1)
    size = max(1, config.shard_completions // largest)
    rows, _ = by_shard(
        ctx, Shards("scores", OutcomeRow, OutcomeRow.schema(names), size, "groups"), groups, scoring.make
    )
    found: dict[int, OutcomeRow] = {}
    again: list[list[int]] = []
    if ctx.is_primary:
        # A shard has its groups one after the other, which the table of rollouts need not.
        found = dict(zip([i for group in groups for i in group], rows, strict=True))
        again = [group for group in groups if any(found[i].failed and i not in scoring.made for i in group)]
    again = multihost.from_primary(lambda: again)
    if again:
        ctx.log(f"{len(again)} groups with rewards that failed in an earlier try are scored again")
        found |= dict(zip([i for group in again for i in group], scoring.make(again), strict=True))
    if not ctx.is_primary:
        return {}
    columns = {name: [found[i].outcome(name) for i in range(len(rollouts))] for name in names}
    # What the environment failed has been judged where episodes were played.
    played = {name: [o for o, row in zip(columns[name], rollouts, strict=True) if row.stop != FAILED] for name in names}
    limit, setting = config.max_failed_fraction, "rl.score.max_failed_fraction"
    try:
        named = {name: config.rewards[name].function for name in names}
        check_failures(played, limit, setting=setting, functions=named)
    except TooManyFailures as error:
        by_number = {name: dict(enumerate(column)) for name, column in columns.items()}
        raise TooManyFailures(f"{error}{hint(ctx, by_number, rollouts)}") from None
    return columns


def _groups(rollouts: Sequence[CompletionRow]) -> list[list[int]]:
    """Numbers of the rows of each prompt's completions."""
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rollouts):
        groups.setdefault(row.place, []).append(number)
    return list(groups.values())


class _Scoring:
    """The rewards of one round at work."""

    def __init__(self, ctx: Context, names: Sequence[str], rollouts: Sequence[CompletionRow]):
        self._ctx, self._names, self._rollouts = ctx, names, rollouts
        self._rewards: dict[str, Reward] = ctx.config.rewards
        # A function may be slow or cost money, so each of its calls is kept. A reward model is cheap to run again.
        self._episodes = episodes_of(ctx.inputs["rollouts"])
        seen = functools.partial(sample_of, episodes=self._episodes)
        self._journals = {
            name: Journal(ctx, f"reward {name}", f"journal-{name}", seen)
            for name in names
            if self._rewards[name].function not in COMPUTED
        }
        self._whole: dict[str, Mapping[int, Outcome]] = {}
        self.made: set[int] = set()
        """Rows that this try has scored."""

    def make(self, groups: Sequence[Sequence[int]]) -> list[OutcomeRow]:
        """The outcomes of some groups by all rewards, one group after the other."""
        numbers = [i for group in groups for i in group]
        # No failure of the rewards: `on_failure` and `normalise` must not make a number of it.
        failed = {i: Outcome(None) for i in numbers if self._rollouts[i].stop == FAILED}
        asked = [rest for group in groups if (rest := [i for i in group if i not in failed])]
        order = [i for group in asked for i in group]
        columns = {}
        for name in self._names:
            found = failed | dict(zip(order, self._column(name, asked, order), strict=True))
            columns[name] = [found[i] for i in numbers]
        # Before the shard is written: an outage is not content. What the sample did counts over the whole round.
        check_failures(columns, 1.0)
        for name, column in columns.items():
            self._stop(name, numbers, column)
        self.made.update(numbers)
        rows = []
        for k, number in enumerate(numbers):
            rows.append(_outcome_row(self._rollouts[number], {name: columns[name][k] for name in self._names}))
        return rows

    def _column(self, name: str, groups: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[Outcome]:
        if self._rewards[name].function == ENVIRONMENT:
            return [reward_of(self._rollouts[i], self._episodes) for i in numbers]
        if name not in self._journals:
            rows = [self._rollouts[i] for i in numbers]
            return _learned(self._ctx, name, rows, self._episodes) if rows else []
        if not self._ctx.is_primary:
            # The devices of all processes score for the reward model; process 0 calls the functions.
            return [Outcome(None) for _ in numbers]
        match self._rewards[name].batch:
            case "round":
                whole = self._of_round(name)
                return [whole[i] for i in numbers]
            case "group":
                found = self._called(name, groups)
            case "sample":
                found = self._called(name, [[i] for i in numbers])
        return [found[i] for i in numbers]

    def _of_round(self, name: str) -> Mapping[int, Outcome]:
        """Outcomes of a function that sees the whole round; called once, by the first shard that is missing."""
        if name not in self._whole:
            with_end = [i for i, row in enumerate(self._rollouts) if row.stop != FAILED]
            self._whole[name] = self._called(name, [with_end])
        return self._whole[name]

    def _called(self, name: str, calls: Sequence[Sequence[int]]) -> dict[int, Outcome]:
        """Outcomes of a reward function by row; the journal has those of calls that an earlier try has finished."""
        reward = self._rewards[name]
        return journaled(
            self._journals[name],
            self._rollouts,
            calls,
            reward.function,
            reward.arguments,
            seconds=reward.seconds,
            megabytes=reward.megabytes,
            workers=self._ctx.config.workers,
            max_concurrency=self._ctx.config.max_concurrency,
        )

    def _stop(self, name: str, numbers: Sequence[int], column: Sequence[Outcome]) -> None:
        """Raises RewardFailed at the first failure of a reward whose `on_failure` is `stop`."""
        from rlhf.tuning.rewards.totals import RewardFailed

        if self._rewards[name].on_failure != "stop":
            return
        for number, outcome in zip(numbers, column, strict=True):
            if outcome.failure is not None:
                more = hint(self._ctx, {name: dict(zip(numbers, column, strict=True))}, self._rollouts)
                raise RewardFailed(f"reward {name} failed on completion {number} of the round: {outcome.failure}{more}")


def _outcome_row(row: CompletionRow, outcomes: Mapping[str, Outcome]) -> OutcomeRow:
    values = {name: outcome.value for name, outcome in outcomes.items()}
    failures = {name: outcome.failure for name, outcome in outcomes.items()}
    return OutcomeRow(place=row.place, sample=row.sample, prompt_id=row.prompt_id, values=values, failures=failures)


Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a prompt, and those after it up to the one at which a reward model is read."""


def _learned(
    ctx: Context, name: str, rows: Sequence[CompletionRow], episodes: Mapping[Name, TrajectoryRow]
) -> list[Outcome]:
    """Outcomes of a reward model; a score that is not finite is a failure, as of any reward."""
    import numpy as np

    from rlhf.tuning.rewards.learned import score_groups
    from rlhf.tuning.training.batch import Group

    ready = name in ctx.config.ready
    scorer = ctx.inputs[f"scorer_{name}" if ready else "reward"]
    config, params = load_scorer(ctx, scorer, frozen=True)
    pairs = _rendered(ctx, scorer, config.max_positions, rows, episodes) if ready else _as_sampled(ctx, rows)
    # Completions of one prompt share its tokens in a packed row, and equal completions are computed once.
    groups: dict[bytes, Group] = {}
    # Bytes of the tokens of a prompt and of one of its completions -> the number of its score.
    numbers: dict[tuple[bytes, bytes], int] = {}
    places: list[int | Outcome] = []
    for pair in pairs:
        if isinstance(pair, Outcome):
            places.append(pair)
            continue
        prompt, tokens = (np.asarray(part, np.int32) for part in pair)
        key = prompt.tobytes(), tokens.tobytes()
        if key not in numbers:
            numbers[key] = len(numbers)
            group = groups.get(key[0]) or Group(Numbers(prompt), [], [])
            completions = [*group.completions, Numbers(tokens)]
            groups[key[0]] = dataclasses.replace(group, completions=completions, ids=[*group.ids, numbers[key]])
        places.append(numbers[key])
    compute, scores = ctx.config.compute, np.zeros(0)
    if groups:
        scores = score_groups(
            config, params, list(groups.values()), dtype=compute.dtype, budget=compute.tokens_per_micro_batch
        )
    return [place if isinstance(place, Outcome) else outcome_of(float(scores[place])) for place in places]


def _as_sampled(ctx: Context, rows: Sequence[CompletionRow]) -> list[Pair | Outcome]:
    """The policy's own tokens, by which the run's reward model was trained."""
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
    """The conversations as a ready reward model's own template and tokenizer write them; a failure in place of one
    that the template refuses, or of more tokens than the model has positions."""
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
