"""What the laws read: the artifacts of a run by node, and their tables."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from stages.common.tables import read_table
from stages.store.artifacts import Artifact, Store
from tuning.rows import CompletionRow, FateRow, PromptRow, RefusedRow, ScoreRow, VerdictRow

ROUND = re.compile(r"round-(\d+)\.(.+)")


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Completions and their scores: a round's own, or those of one refill."""

    name: str
    """Of the node that sampled."""
    rollouts: Artifact
    scores: Artifact | None

    @functools.cached_property
    def rows(self) -> list[CompletionRow]:
        """The rollout table."""
        return read_table(self.rollouts, "rollouts/", CompletionRow)

    @functools.cached_property
    def score_rows(self) -> list[ScoreRow]:
        """The score table."""
        return [] if self.scores is None else read_table(self.scores, "scores/", ScoreRow)

    @functools.cached_property
    def refused(self) -> list[RefusedRow]:
        """Prompts of the round from which nothing was sampled."""
        return read_table(self.rollouts, "refused/", RefusedRow) if self.rollouts.has("refused/") else []


@dataclasses.dataclass(frozen=True)
class Round:
    """What a run has of one round."""

    number: int
    sampled: list[Sampled]
    """The round's own completions, then those of its refills."""
    update: Artifact | None

    @property
    def name(self) -> str:
        return f"round-{self.number:03d}"

    @functools.cached_property
    def fates(self) -> list[FateRow]:
        """What the update did with each completion."""
        has = self.update is not None and self.update.has("fates/")
        return read_table(self.update, "fates/", FateRow) if has and self.update is not None else []


class AuditedRun:
    """A run's record with the artifacts that are still in the store."""

    def __init__(self, store: Store, record: Mapping[str, Any]):
        self.store, self.record = store, record
        self.entries: dict[str, dict[str, Any]] = {n: e for n, e in record["nodes"].items() if "digest" in e}
        """Finished nodes of the record by name."""

    @functools.cached_property
    def artifacts(self) -> dict[str, Artifact]:
        """The artifact of each finished node that is still there."""
        found = {}
        for name, entry in self.entries.items():
            # By digest: another run may have made the key anew since.
            found[name] = self.store.with_digest(entry["stage"], entry["key"], entry["digest"], repair=False)
        return {name: artifact for name, artifact in found.items() if artifact is not None}

    @property
    def rounds(self) -> Iterator[Round]:
        """The rounds whose rollouts are there, in order. A law's loop holds the tables of one round at a time."""
        parts: dict[int, dict[str, Artifact]] = {}
        for name, artifact in self.artifacts.items():
            if match := ROUND.fullmatch(name):
                parts.setdefault(int(match[1]), {})[match[2]] = artifact
        for number in sorted(parts):
            if "rollout" in parts[number]:
                yield self._round(number, parts[number])

    def _round(self, number: int, parts: Mapping[str, Artifact]) -> Round:
        refills = sorted((n for n in parts if re.fullmatch(r"refill-\d+", n)), key=lambda n: int(n.split("-")[1]))
        sampled = [Sampled(f"round-{number:03d}.rollout", parts["rollout"], parts.get("score"))]
        sampled += [Sampled(f"round-{number:03d}.{n}", parts[n], parts.get(f"{n}-score")) for n in refills]
        return Round(number, sampled, parts.get("update"))

    @functools.cached_property
    def evaluations(self) -> dict[str, Artifact]:
        """The evaluations by node."""
        return {name: artifact for name, artifact in self.artifacts.items() if artifact.stage == "evaluate"}

    @property
    def sampled(self) -> Iterator[Sampled]:
        """The scored tables of all rounds."""
        for round_ in self.rounds:
            while round_.sampled:
                # Taken out of the round, so that its rows leave the memory with it.
                sampled = round_.sampled.pop(0)
                if sampled.scores is not None:
                    yield sampled

    def verdicts(self, artifact: Artifact) -> list[VerdictRow]:
        """The verdicts of an evaluation."""
        return read_table(artifact, "verdicts/", VerdictRow)

    def prompts(self, split: str) -> list[PromptRow]:
        """The prompts of a split of the prepared data, `prompts` or `heldout`."""
        data = self.artifacts.get("prepare")
        if data is None or not data.has(f"{split}/"):
            return []
        return read_table(data, f"{split}/", PromptRow)
