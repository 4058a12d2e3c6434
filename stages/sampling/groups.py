"""Groups of scored completions: those that carry a signal, and those that a round trains on.

A group is the completions of one place: a prompt that a round draws twice is two groups (R21).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from rlhf.stages.common.tables import read_table
from rlhf.stages.sampling.episode_tables import FAILED
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.agents.rows import TurnRow
from rlhf.tuning.rows import CompletionRow, ScoreRow, by_trajectory, names_of

NAMED = ("place", "sample", "part", "prompt_id", "stop", "policy")
"""Columns of a rollout table that name a completion and say how it ended."""
TRAINED = (*NAMED, "prompt_ids", "token_ids", "logprobs")
"""Columns of a rollout table that an update reads."""
OF_TURNS = ("place", "sample", "turn", "part", "start", "token_ids", "state", "reward", "terminated")
"""Columns of a table of turns that an update reads."""
LEAST_SHARE = 0.25
"""A refill expects at least this share of its prompts to be informative: it stays small."""


class TooFewGroups(RuntimeError):
    """All refills together left fewer informative groups than the round wants."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """Completions and their scores, in the same order."""

    trajectories: list[list[CompletionRow]]
    """The rows of each completion: one, or the parts of a trajectory in order."""
    scores: list[ScoreRow]
    prompts: int
    """Places in the round's own rollouts, without refills."""

    @property
    def rollouts(self) -> list[CompletionRow]:
        """The last row of each completion, which says how it ended."""
        return [parts[-1] for parts in self.trajectories]

    @property
    def rows(self) -> list[CompletionRow]:
        """The rows of the rollout tables."""
        return [part for parts in self.trajectories for part in parts]

    def only(self, places: Collection[int]) -> Scored:
        """Return the completions of these places."""
        kept = [i for i, score in enumerate(self.scores) if score.place in places]
        return Scored([self.trajectories[i] for i in kept], [self.scores[i] for i in kept], self.prompts)

    def totals(self, truncated: str) -> dict[int, list[float]]:
        """Return the totals that count in each place's group; none if no completion of the place can be trained on.

        truncated: the update's setting of that name. With `mask` truncated completions do not count; with `mask-loss`
        they do if the group has a total of a whole one. Failed episodes never count.
        """
        rollouts = self.rollouts
        ended = [(score, row.stop) for score, row in zip(self.scores, rollouts, strict=True) if row.stop != FAILED]
        trainable = totals_by_place(score for score, stop in ended if truncated == "keep" or stop != "length")
        counted = trainable if truncated == "mask" else totals_by_place(score for score, _ in ended)
        # Each place has an entry, in the order of sampling.
        return {row.place: counted[row.place] if trainable.get(row.place) else [] for row in rollouts}


def read_trajectories(rollouts: Artifact, columns: Collection[str]) -> list[list[CompletionRow]]:
    """Read the rows of each completion of a rollout table (`rlhf.tuning.rows.by_trajectory`).

    columns: names of those to read; none: all.
    """
    return by_trajectory(read_table(rollouts, "rollouts/", CompletionRow, columns))


def rollouts_of(inputs: Mapping[str, Artifact]) -> list[str]:
    """Return the names of the rollouts among the inputs of a stage: the round's own, then its refills in order."""
    return ["rollouts", *(name for i in range(1, 100) if (name := f"refill_{i}") in inputs)]


def read_scored(inputs: Mapping[str, Artifact], columns: Collection[str] = ()) -> Scored:
    """Read a round's rollouts and scores, then those of its refills, from the inputs of a stage.

    columns: those of the rollout tables to read, `NAMED` among them; none: all.
    Raises RuntimeError if a score table does not list the completions of its rollout table in their order, or if two
    tables have a place in common.
    """
    every = Scored([], [], 0)
    for name in rollouts_of(inputs):
        trajectories = read_trajectories(inputs[name], columns)
        scores = read_table(inputs["scores" if name == "rollouts" else f"{name}_scores"], "scores/", ScoreRow)
        own = Scored(trajectories, scores, len({parts[0].place for parts in trajectories}))
        # Otherwise a completion would be trained on the reward of another.
        if names_of(own.rollouts) != names_of(scores):
            raise RuntimeError(f"{name} and its scores do not list the same completions in the same order")
        every = Scored(every.trajectories + trajectories, every.scores + scores, every.prompts or own.prompts)
    if len(set(names_of(every.scores))) != len(every.scores):
        raise RuntimeError("two completions of the round have the same place and sample (R21)")
    return every


def read_turns(inputs: Mapping[str, Artifact], columns: Collection[str] = ()) -> list[TurnRow] | None:
    """Read the turns of a round's trajectories and those of its refills; None for completions of one turn.

    columns: names of those to read; none: all.
    """
    if not inputs["rollouts"].has("turns/"):
        return None
    return [row for name in rollouts_of(inputs) for row in read_table(inputs[name], "turns/", TurnRow, columns)]


def totals_by_place(scores: Iterable[ScoreRow]) -> dict[int, list[float]]:
    """Return the totals of each place's completions, without those of failed rewards."""
    groups: dict[int, list[float]] = {}
    for score in scores:
        totals = groups.setdefault(score.place, [])
        if score.total is not None:
            totals.append(score.total)
    return groups


def informative_places(groups: Mapping[int, Sequence[float]]) -> list[int]:
    """Return the places whose totals carry a signal (R9), in their order.

    A KL in the reward is not known before the update: a place that ties on the task has no signal here.
    """
    from rlhf.tuning.losses.groups import is_informative

    return [place for place, totals in groups.items() if is_informative(totals)]


def chosen_groups(scored: Scored, when_short: str, truncated: str = "keep") -> tuple[Scored, dict[str, int]]:
    """Choose the first informative groups, as many as the round has prompts; count all prompts by fate.

    truncated: the update's setting of that name, which decides whether truncated completions count (R24).
    Raises TooFewGroups with the histogram of pass rates if there are fewer and `when_short` is `stop`.
    """
    groups = scored.totals(truncated)
    good = informative_places(groups)
    if len(good) < scored.prompts and when_short == "stop":
        raise TooFewGroups(
            f"{len(good)} of the {scored.prompts} groups that the round wants are informative, after {len(groups)} "
            f"prompts; prompts by share of right completions, 0 to 1: {_histogram(groups)}. Use prompts that are "
            "neither too hard nor too easy, raise rl.refills or rl.rollout.completions, or set "
            "rl.update.short_of_groups: train"
        )
    # In order of sampling: refills replace only what the round itself lacks.
    taken = good[: scored.prompts]
    metrics = {
        "prompts_sampled": len(groups),
        "prompts_without_signal": len(groups) - len(good),
        "prompts_to_spare": len(good) - len(taken),
    }
    return scored.only(taken), metrics


def _histogram(groups: Mapping[int, Sequence[float]]) -> list[int]:
    """Count prompts by the share of their completions that are right, as the update does."""
    import numpy as np

    from rlhf.tuning.algorithms.diagnostics import pass_histogram

    places = [place for place, totals in groups.items() for _ in totals]
    totals_N = np.asarray([total for totals in groups.values() for total in totals])
    return pass_histogram(totals_N, np.asarray(places), np.ones(len(places), bool))


def missing_prompts(groups: Mapping[int, Sequence[float]], wanted: int) -> int:
    """Return the number of new prompts to sample, at most `wanted`.

    The next prompts are expected to be informative as often as those so far.
    """
    good = len(informative_places(groups))
    share = max(good / max(len(groups), 1), LEAST_SHARE)
    return min(wanted, math.ceil(max(wanted - good, 0) / share))
