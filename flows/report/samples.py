"""Samples of a run: held-out problems under several policies, and completions of a round with their rewards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from rlhf.flows.report.run_view import RunView

SAMPLES, UNCHANGED = 12, 3
"""Problems shown, and how many of them have an unchanged score, if enough others changed."""
SAME_MEAN = 1e-6
"""Tolerance for the means of equal scores."""
ROUND_PROMPTS, ROUND_SAMPLES = 4, 2
"""Prompts shown of a round, and completions of each."""
TEXTS = ("place", "sample", "prompt", "answer", "text", "stop")

T = TypeVar("T")
Places = tuple[int, int]
"""Places of one problem in two evaluations."""


class Policy:
    """Completions and scores of an evaluated policy."""

    def __init__(self, run: RunView, label: str):
        self.label = label
        self.rows = {(row["place"], row["sample"]): row for row in run.rows(f"evaluate.{label}", "rollouts/", TEXTS)}
        self.scores: dict[int, dict[int, float]] = {}
        """By place and sample, without samples to which the judge does not apply."""
        for (place, sample), score in run.verdicts(label).items():
            if score is not None:
                self.scores.setdefault(place, {})[sample] = score

    def mean(self, place: int) -> float:
        scores = self.scores[place].values()
        return sum(scores) / len(scores)


def changes(old: Policy, new: Policy, places: Iterable[Places]) -> tuple[list[Places], list[Places], list[Places]]:
    """Split problems into gained, lost and unchanged ones, the largest change first; skip those without a score."""
    by = {(a, b): new.mean(b) - old.mean(a) for a, b in places if a in old.scores and b in new.scores}
    order = sorted(by, key=lambda pair: -abs(by[pair]))
    gained = [pair for pair in order if by[pair] > SAME_MEAN]
    lost = [pair for pair in order if by[pair] < -SAME_MEAN]
    return gained, lost, [pair for pair in by if abs(by[pair]) <= SAME_MEAN]


def card(sides: Sequence[tuple[Policy, int]]) -> dict[str, Any]:
    """Return one problem under several policies, each with its place.

    Shows the first sample whose score changed, which is the same draw under every policy; else one with a score.
    """
    before, after = (policy.scores[place] for policy, place in (sides[0], sides[-1]))
    both = sorted(before.keys() & after.keys())
    sample = next((s for s in both if before[s] != after[s]), both[0] if both else min(after))
    policies = []
    for policy, place in sides:
        row, scores = policy.rows[place, sample], policy.scores[place]
        more = {"score": scores.get(sample), "mean": policy.mean(place), "count": len(scores)}
        policies.append({"label": policy.label, "text": row["text"], "stop": row["stop"]} | more)
    return {"prompt": row["prompt"], "answer": row["answer"], "policies": policies}


def samples(run: RunView, labels: Sequence[str]) -> dict[str, Any] | None:
    """Return held-out problems under each policy, mostly changed ones; None without policies.

    Raises ArtifactError if an evaluation is not in the store.
    """
    if not labels:
        return None
    policies = [Policy(run, label) for label in labels]
    first, last = policies[0], policies[-1]
    shared = [(place, place) for place in first.scores if all(place in p.scores for p in policies)]
    gained, lost, same = changes(first, last, shared)
    cards = [card([(p, place) for p in policies]) for place, _ in choose(gained, lost, same)]
    counts = {"gained": len(gained), "lost": len(lost), "same": len(same)}
    return {"cards": cards, "ends": (first.label, last.label)} | counts


def choose(gained: Sequence[T], lost: Sequence[T], same: Sequence[T], count: int = SAMPLES) -> list[T]:
    """Choose gained and lost problems in proportion, and some unchanged ones, so that samples are not wins only."""
    room = max(count - UNCHANGED, count - len(same)) if gained or lost else 0
    losses = min(len(lost), max(1, round(room * len(lost) / max(1, len(gained) + len(lost)))))
    gains = min(len(gained), room - losses)
    return [*gained[:gains], *lost[: max(losses, room - gains)], *same[: count - room]][:count]


def round_samples(run: RunView, rounds: Sequence[int]) -> list[dict[str, Any]]:
    """Return completions with their rewards of the first and the last round whose scores are in the store.

    Raises ArtifactError if a round's rollouts are not.
    """
    found = []
    for number in run.first_and_last(rounds):
        name = f"round-{number:03d}"
        if run.artifact(f"{name}.score") is None:
            continue
        scores = run.rows(f"{name}.score", "scores/", ("place", "sample", "rewards", "total", "failure"))
        scored = {(row["place"], row["sample"]): row for row in scores}
        places = [row["place"] for row in run.rows(f"{name}.rollout", "rollouts/", ("place",))]
        # The texts of a round may be gigabytes.
        shown = list(dict.fromkeys(places))[:ROUND_PROMPTS]
        rows = run.rows(f"{name}.rollout", "rollouts/", TEXTS, shown)
        first = [row for place in shown for row in [r for r in rows if r["place"] == place][:ROUND_SAMPLES]]
        joined = [row | scored[key] for row in first if (key := (row["place"], row["sample"])) in scored]
        names = sorted(scores[0]["rewards"]) if scores else []
        found.append({"round": number, "names": names, "rows": joined, "count": len(places)})
    return found
