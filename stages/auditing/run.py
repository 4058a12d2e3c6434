"""What the laws read: the artifacts of a run by node, and their tables."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stages.common.tables import read_table
from stages.store.artifacts import Artifact, Store
from tuning.columns import list_rows
from tuning.rows import CompletionRow, FateRow, RefusedRow, ScoreRow, VerdictRow

ROUND = re.compile(r"round-(\d+)\.(.+)")


class Tables:
    """Tables that are read when they are first asked for, and kept until they are forgotten."""

    def forget(self) -> None:
        """Leaves the tables to the memory's other uses; who asks again reads them again."""
        for name, member in vars(type(self)).items():
            if isinstance(member, functools.cached_property):
                vars(self).pop(name, None)


@dataclasses.dataclass(frozen=True)
class Sampled(Tables):
    """Completions and their scores: a round's own, those of one refill, or greedy ones."""

    name: str
    """Of the node that sampled."""
    rollouts: Artifact
    scores: Artifact | None

    @functools.cached_property
    def rows(self) -> list[CompletionRow]:
        """The rollout table."""
        return read_table(self.rollouts, "rollouts/", CompletionRow)

    @functools.cached_property
    def ends(self) -> list[CompletionRow]:
        """One row a completion: of a trajectory in several parts the last, which says how it ended."""
        last: dict[tuple[int, int], int] = {}
        for row in self.rows:
            name = row.place, row.sample
            last[name] = max(row.part or 0, last.get(name, 0))
        # Two completions of one name stay two: laws tell them.
        return [row for row in self.rows if (row.part or 0) == last[row.place, row.sample]]

    @functools.cached_property
    def score_rows(self) -> list[ScoreRow]:
        """The score table."""
        return [] if self.scores is None else read_table(self.scores, "scores/", ScoreRow)

    @functools.cached_property
    def refused(self) -> list[RefusedRow]:
        """Prompts of the round from which nothing was sampled."""
        return read_table(self.rollouts, "refused/", RefusedRow) if self.rollouts.has("refused/") else []


@dataclasses.dataclass(frozen=True)
class Round(Tables):
    """What a run has of one round."""

    number: int
    sampled: list[Sampled]
    """The round's own completions, then those of its refills."""
    greedy: Sampled | None
    """ReMax's baselines."""
    update: Artifact | None

    @property
    def name(self) -> str:
        return f"round-{self.number:03d}"

    @property
    def tables(self) -> list[Sampled]:
        """All completions of the round, baselines last."""
        return self.sampled if self.greedy is None else [*self.sampled, self.greedy]

    @property
    def scored(self) -> list[Sampled]:
        """Those of its tables that have scores."""
        return [table for table in self.tables if table.scores is not None]

    def forget(self) -> None:
        super().forget()
        for table in self.tables:
            table.forget()

    @functools.cached_property
    def fates(self) -> list[FateRow]:
        """What the update did with each completion."""
        has = self.update is not None and self.update.has("fates/")
        return read_table(self.update, "fates/", FateRow) if has and self.update is not None else []


@dataclasses.dataclass(frozen=True)
class Evaluated(Tables):
    """An evaluation of a run."""

    name: str
    """Of its node."""
    artifact: Artifact

    @functools.cached_property
    def rows(self) -> list[CompletionRow]:
        """The completions."""
        return read_table(self.artifact, "rollouts/", CompletionRow)

    @functools.cached_property
    def verdicts(self) -> list[VerdictRow]:
        """The verdicts of all judges."""
        return read_table(self.artifact, "verdicts/", VerdictRow)


def is_played(artifact: Artifact) -> bool:
    """Whether an artifact's completions are episodes."""
    return bool(artifact.manifest["config"].get("environment")) and artifact.has("trajectories/")


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
            found[name] = self.store.with_digest(entry["stage"], entry["key"], entry["digest"])
        return {name: artifact for name, artifact in found.items() if artifact is not None}

    @property
    def rounds(self) -> Iterator[Round]:
        """The rounds whose rollouts are there, in order."""
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
        greedy = None
        if "greedy" in parts:
            greedy = Sampled(f"round-{number:03d}.greedy", parts["greedy"], parts.get("greedy-score"))
        return Round(number, sampled, greedy, parts.get("update"))

    @property
    def evaluated(self) -> Iterator[Evaluated]:
        """The evaluations, in the order of the record."""
        for name, artifact in self.artifacts.items():
            if artifact.stage == "evaluate":
                yield Evaluated(name, artifact)

    @functools.cached_property
    def prompts(self) -> dict[str, bytes]:
        """A digest of the tokens of each prompt of the prepared data that rounds draw from, by its id."""
        # What is new in the data, where the run trains on that alone.
        data = self.artifacts.get("fresh", self.artifacts.get("prepare"))
        if data is None or not data.has("prompts/"):
            return {}
        found: dict[str, bytes] = {}
        for path in sorted(data.local("prompts/").glob("*.parquet")):
            # A dataset of many gigabytes: batches of two columns, not rows of all.
            for batch in pq.ParquetFile(path).iter_batches(columns=["id", "prompt_ids"]):
                tokens = list_rows(pa.chunked_array([batch.column("prompt_ids")]))
                ids = batch.column("id").to_pylist()
                found |= {name: tokens_digest(of or ()) for name, of in zip(ids, tokens, strict=True)}
        return found


def tokens_digest(ids: Sequence[int]) -> bytes:
    """A digest of token ids, for comparison without holding them."""
    return hashlib.blake2b(np.asarray(ids, np.int64).tobytes(), digest_size=16).digest()
