"""Groups of scored completions: which carry a signal, and which of those a round trains on.

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
"""Columns of a rollout table that say what a completion is and how it ended: all that groups are told by."""
TRAINED = (*NAMED, "prompt_ids", "token_ids", "logprobs")
"""Those that an update reads."""
OF_TURNS = ("place", "sample", "turn", "part", "start", "token_ids", "state", "reward", "terminated")
"""Columns of a table of turns that an update reads."""
LEAST_SHARE = 0.25
"""A refill expects at least this share of its prompts to be informative: it stays small."""


class TooFewGroups(RuntimeError):
    """All refills together left fewer informative groups than the round wants."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """Completions and their scores, one of each in the same order."""

    rollouts: list[CompletionRow]
    """One row a completion; of a trajectory in several parts the last, which says how it ended."""
    scores: list[ScoreRow]
    prompts: int
    """Places in the round's own rollouts, refills not counted."""
    earlier: Mapping[tuple[int, int], list[CompletionRow]] = dataclasses.field(default_factory=dict)
    """The parts before the last one of each trajectory that has several, by (place, sample)."""

    @property
    def rows(self) -> list[CompletionRow]:
        """The rows of the rollout tables, every part of a trajectory."""
        return [part for row in self.rollouts for part in (*self.earlier.get((row.place, row.sample), ()), row)]

    def only(self, places: Iterable[int]) -> Scored:
        """The completions of these places."""
        wanted = set(places)
        kept = [i for i, row in enumerate(self.rollouts) if row.place in wanted]
        rollouts, scores = [self.rollouts[i] for i in kept], [self.scores[i] for i in kept]
        return dataclasses.replace(self, rollouts=rollouts, scores=scores)

    def totals(self, truncated: str) -> dict[int, list[float]]:
        """The totals that count in each place's group; none where no completion of the place can be trained on.

        truncated: the update's setting of that name. With `mask` completions cut off do not count; with `mask-loss`
        they do, beside one that has a total and is whole. Failed episodes never count.
        """
        ended = [score for score, row in zip(self.scores, self.rollouts, strict=True) if row.stop != FAILED]
        whole = [truncated == "keep" or row.stop != "length" for row in self.rollouts if row.stop != FAILED]
        trainable = totals_by_place(score for score, kept in zip(ended, whole, strict=True) if kept)
        counted = trainable if truncated == "mask" else totals_by_place(ended)
        # Each place has an entry, in the order of sampling.
        return {row.place: counted[row.place] if trainable.get(row.place) else [] for row in self.rollouts}


def refills(inputs: Mapping[str, Artifact]) -> int:
    """How many refills are among the inputs of a stage."""
    return sum(f"refill_{number}" in inputs for number in range(1, 100))


def read_scored(inputs: Mapping[str, Artifact], columns: Collection[str] = ()) -> Scored:
    """A round's rollouts with their scores, then those of its refills, from the inputs of a stage.

    columns: those that are read of the rollout tables, `NAMED` among them; none: all of them.
    Raises RuntimeError where a score table does not list the completions of its rollout table in their order, and where
    two tables have a place in common.
    """
    names = [("rollouts", "scores")]
    names += [(f"refill_{i}", f"refill_{i}_scores") for i in range(1, refills(inputs) + 1)]
    all_rollouts: list[CompletionRow] = []
    all_scores: list[ScoreRow] = []
    earlier: dict[tuple[int, int], list[CompletionRow]] = {}
    prompts = 0
    for of_rollouts, of_scores in names:
        trajectories = by_trajectory(read_table(inputs[of_rollouts], "rollouts/", CompletionRow, columns))
        rollouts = [parts[-1] for parts in trajectories]
        earlier |= {(parts[0].place, parts[0].sample): parts[:-1] for parts in trajectories if len(parts) > 1}
        scores = read_table(inputs[of_scores], "scores/", ScoreRow)
        # Otherwise a completion would be trained on the reward of another.
        if names_of(rollouts) != names_of(scores):
            raise RuntimeError(f"{of_rollouts} and {of_scores} do not list the same completions in the same order")
        # Of the first table, which is the round's own.
        prompts = prompts or len({row.place for row in rollouts})
        all_rollouts += rollouts
        all_scores += scores
    if len(set(names_of(all_rollouts))) != len(all_rollouts):
        raise RuntimeError("two completions of the round have one place and sample: they cannot be told apart (R21)")
    return Scored(all_rollouts, all_scores, prompts, earlier)


def read_turns(inputs: Mapping[str, Artifact], columns: Collection[str] = ()) -> list[TurnRow] | None:
    """The turns of a round's trajectories and those of its refills; None where they were not sampled in turns.

    columns: those that are read; none: all of them.
    """
    names = ["rollouts", *(f"refill_{number}" for number in range(1, refills(inputs) + 1))]
    if not inputs["rollouts"].has("turns/"):
        return None
    return [row for name in names for row in read_table(inputs[name], "turns/", TurnRow, columns)]


def totals_by_place(scores: Iterable[ScoreRow]) -> dict[int, list[float]]:
    """The totals of each place's completions, those of failed rewards left out."""
    groups: dict[int, list[float]] = {}
    for score in scores:
        totals = groups.setdefault(score.place, [])
        if score.total is not None:
            totals.append(score.total)
    return groups


def informative_places(groups: Mapping[int, Sequence[float]]) -> list[int]:
    """The places whose completions carry a signal (R9), in their order, by their totals.

    A KL in the reward is not known before the update: a place that ties on the task has no signal here.
    """
    from rlhf.tuning.losses.groups import is_informative

    return [place for place, totals in groups.items() if is_informative(totals)]


def chosen_groups(scored: Scored, when_short: str, truncated: str = "keep") -> tuple[Scored, dict[str, int]]:
    """The first informative groups, as many as the round has prompts, and counts of all prompts by fate.

    truncated: the update's setting of that name: which completions cut off count (R24).
    Raises TooFewGroups with the histogram of pass rates where there are fewer and `when_short` is `stop`.
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
    """Prompts by the share of their completions that are right, as the update counts them."""
    import numpy as np

    from rlhf.tuning.algorithms.diagnostics import pass_histogram

    places = [place for place, totals in groups.items() for _ in totals]
    totals_N = np.asarray([total for totals in groups.values() for total in totals])
    return pass_histogram(totals_N, np.asarray(places), np.ones(len(places), bool))


def missing_prompts(groups: Mapping[int, Sequence[float]], wanted: int) -> int:
    """How many new prompts are worth sampling, from the share that was informative so far; at most `wanted`."""
    good = len(informative_places(groups))
    # The next prompts are expected to be informative as often as those so far.
    share = max(good / max(len(groups), 1), LEAST_SHARE)
    return min(wanted, math.ceil(max(wanted - good, 0) / share))
