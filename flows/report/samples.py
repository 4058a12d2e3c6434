"""Samples of a run: the same held-out problems under each policy, and completions of a round with their rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlhf.flows.report.run_view import RunView

SAMPLES = 12
"""Problems shown."""
SAME = 3
"""How many of them are problems whose score did not change, where there are enough others."""
SAME_MEAN = 1e-6
"""Means of equal scores may differ by so much, by rounding."""
ROUND_PROMPTS, ROUND_SAMPLES = 4, 2
"""Prompts shown of a round, and completions of each."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A policy's completion of a problem; `mean` is over the `count` completions that the judge applies to."""

    label: str
    text: str
    stop: str
    score: float | None
    """None where the judge does not apply."""
    mean: float
    count: int


@dataclasses.dataclass(frozen=True)
class Card:
    """A problem with the answer of each policy."""

    prompt: str
    answer: str | None
    policies: list[Answer]


@dataclasses.dataclass(frozen=True)
class Samples:
    """Problems under each policy, and how many changed between the first and the last policy."""

    cards: list[Card]
    ends: tuple[str, str]
    gained: int
    lost: int
    same: int


class Policy:
    """Completions and scores of an evaluated policy."""

    def __init__(self, run: RunView, label: str):
        name = f"evaluate.{label}"
        rows = run.rows(name, "rollouts/", ("place", "sample", "prompt", "answer", "text", "stop"))
        self.label = label
        self.rows = {(row["place"], row["sample"]): row for row in rows}
        self.scores: dict[int, dict[int, float]] = {}
        """By place and sample, of what the judge applies to."""
        for (place, sample), score in run.verdicts(label).items():
            if score is not None:
                self.scores.setdefault(place, {})[sample] = score

    def mean(self, place: int) -> float:
        scores = self.scores[place].values()
        return sum(scores) / len(scores)

    def answer(self, place: int, sample: int) -> Answer:
        row, scores = self.rows[place, sample], self.scores[place]
        return Answer(self.label, row["text"], row["stop"], scores.get(sample), self.mean(place), len(scores))


def samples(run: RunView, labels: Sequence[str]) -> Samples | None:
    """The same held-out problems under each policy, mostly those whose score changed; None without policies.

    Raises ArtifactError where an evaluation is not in the store.
    """
    if not labels:
        return None
    policies = [Policy(run, label) for label in labels]
    first, last = policies[0], policies[-1]
    shared = [place for place in first.scores if all(place in p.scores for p in policies)]
    change = {place: last.mean(place) - first.mean(place) for place in shared}
    gained = sorted((p for p in shared if change[p] > SAME_MEAN), key=lambda p: -change[p])
    lost = sorted((p for p in shared if change[p] < -SAME_MEAN), key=lambda p: change[p])
    same = [p for p in shared if abs(change[p]) <= SAME_MEAN]
    cards = []
    for place in chosen_samples(gained, lost, same):
        before, after = first.scores[place], last.scores[place]
        # The first sample whose score changed, which is the same draw under every policy; else one that has a score.
        both = sorted(before.keys() & after.keys())
        shown = next((s for s in both if before[s] != after[s]), both[0] if both else min(after))
        row = last.rows[place, shown]
        cards.append(Card(row["prompt"], row["answer"], [p.answer(place, shown) for p in policies]))
    return Samples(cards, (first.label, last.label), len(gained), len(lost), len(same))


def chosen_samples(gained: Sequence[int], lost: Sequence[int], same: Sequence[int], count: int = SAMPLES) -> list[int]:
    """Mostly changed problems, gains and losses in proportion, and some unchanged: a fair picture, not the wins."""
    # Places for problems that changed; those that did not may leave some free.
    room = max(count - SAME, count - len(same)) if gained or lost else 0
    losses = min(len(lost), max(1, round(room * len(lost) / max(1, len(gained) + len(lost)))))
    gains = min(len(gained), room - losses)
    return [*gained[:gains], *lost[: max(losses, room - gains)], *same[: count - room]][:count]


@dataclasses.dataclass(frozen=True)
class RoundSamples:
    """Some of a round's `count` completions, joined with their rewards."""

    round: int
    names: list[str]
    """Rewards."""
    rows: list[dict[str, Any]]
    count: int


def round_samples(run: RunView, rounds: Sequence[int]) -> list[RoundSamples]:
    """Scored completions of the first and the last round whose scores are in the store.

    Raises ArtifactError where a round's rollouts are not.
    """
    return [_of_round(run, n) for n in run.first_and_last(rounds) if run.artifact(f"round-{n:03d}.score") is not None]


def _of_round(run: RunView, number: int) -> RoundSamples:
    name = f"round-{number:03d}"
    scores = run.rows(f"{name}.score", "scores/", ("place", "sample", "rewards", "total", "failure"))
    every = [row["place"] for row in run.rows(f"{name}.rollout", "rollouts/", ("place",))]
    scored = {(row["place"], row["sample"]): row for row in scores}
    # The texts of a round may be gigabytes.
    first = list(dict.fromkeys(every))[:ROUND_PROMPTS]
    columns = ("place", "sample", "prompt", "answer", "text", "stop")
    rows = run.rows(f"{name}.rollout", "rollouts/", columns, first)
    shown = [row for place in first for row in [r for r in rows if r["place"] == place][:ROUND_SAMPLES]]
    joined = [row | scored[key] for row in shown if (key := (row["place"], row["sample"])) in scored]
    names = sorted(scores[0]["rewards"]) if scores else []
    return RoundSamples(number, names, joined, len(every))
