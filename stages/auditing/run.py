"""The artifacts of a run by node, and their tables, as the laws read them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf.stages.common.tables import batches, read_table
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.columns import list_rows
from rlhf.tuning.rows import CompletionRow, FateRow, RefusedRow, ScoreRow, VerdictRow, grouped

ROUND = re.compile(r"round-(\d+)\.(.+)")

Name = tuple[int, int]
"""Place and sample of a completion."""


def name_of(row: Any) -> Name:
    """Return the place and the sample of a row."""
    return row.place, row.sample


@dataclasses.dataclass(frozen=True)
class Completions:
    """Completions of rollouts, a refill, greedy baselines or an evaluation. Tables are read on first use."""

    run: AuditedRun
    name: str
    """Node that sampled."""
    artifact: Artifact
    scores: Artifact | None = None
    update: Artifact | None = None
    """Update that trains on them."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings of the stage that sampled."""
        config: Mapping[str, Any] = self.artifact.manifest["config"]
        return config

    @property
    def scoring(self) -> Mapping[str, Any]:
        """Settings of the scores."""
        return {} if self.scores is None else self.scores.manifest["config"]

    @property
    def policy(self) -> str:
        """Digest of the policy that sampled."""
        return str(self.artifact.manifest["inputs"]["policy"]["digest"])

    @property
    def is_played(self) -> bool:
        """Whether the completions are episodes."""
        return bool(self.config.get("environment")) and self.artifact.has("trajectories/")

    @functools.cached_property
    def rows(self) -> list[CompletionRow]:
        return read_table(self.artifact, "rollouts/", CompletionRow)

    @functools.cached_property
    def parts(self) -> dict[Name, list[CompletionRow]]:
        """Rows of each completion; an episode may have several."""
        return grouped(self.rows)

    @functools.cached_property
    def ends(self) -> list[CompletionRow]:
        """One row per completion: the last part of an episode. Duplicates of a name stay, because laws report them."""
        last = {name: max(row.part or 0 for row in rows) for name, rows in self.parts.items()}
        return [row for row in self.rows if (row.part or 0) == last[name_of(row)]]

    @functools.cached_property
    def score_rows(self) -> list[ScoreRow]:
        return [] if self.scores is None else read_table(self.scores, "scores/", ScoreRow)

    @functools.cached_property
    def score_of(self) -> dict[Name, ScoreRow]:
        return {name_of(row): row for row in self.score_rows}

    @functools.cached_property
    def refused(self) -> list[RefusedRow]:
        """Prompts without completions."""
        return read_table(self.artifact, "refused/", RefusedRow) if self.artifact.has("refused/") else []

    @functools.cached_property
    def verdicts(self) -> list[VerdictRow]:
        """Verdicts of all judges of an evaluation."""
        return read_table(self.artifact, "verdicts/", VerdictRow)

    @functools.cached_property
    def trajectories(self) -> list[TrajectoryRow]:
        return read_table(self.artifact, "trajectories/", TrajectoryRow)

    @functools.cached_property
    def episodes(self) -> dict[Name, TrajectoryRow]:
        return {name_of(row): row for row in self.trajectories}

    @functools.cached_property
    def turns(self) -> dict[Name, list[TurnRow]]:
        return grouped(read_table(self.artifact, "turns/", TurnRow))

    @functools.cached_property
    def fates(self) -> list[FateRow]:
        """Fates of the round's completions in the update."""
        update = self.update
        return read_table(update, "fates/", FateRow) if update is not None and update.has("fates/") else []

    @property
    def asked(self) -> set[tuple[int, str, bytes]]:
        """Prompts with their tokens; an episode that its environment failed may have none."""
        ids = ((row, () if row.stop == "failed" else row.prompt_ids) for row in self.rows)
        return {(row.place, row.prompt_id, tokens_digest(of)) for row, of in ids}

    def case(self, of: Any) -> str:
        """Name a completion, by its row or its name, in a broken case."""
        place, sample = of if isinstance(of, tuple) else name_of(of)
        return f"{self.name}, place {place}, sample {sample}"


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of a run."""

    run: AuditedRun
    number: int
    parts: Mapping[str, Artifact]
    """Its artifacts by the part of the node's name after the round."""

    @property
    def name(self) -> str:
        return f"round-{self.number:03d}"

    def _completions(self, part: str) -> Completions:
        scores = self.parts.get("score" if part == "rollout" else f"{part}-score")
        return Completions(self.run, f"{self.name}.{part}", self.parts[part], scores, self.update)

    @functools.cached_property
    def sampled(self) -> list[Completions]:
        """The round's completions, then those of its refills."""
        refills = sorted((n for n in self.parts if re.fullmatch(r"refill-\d+", n)), key=lambda n: int(n.split("-")[1]))
        return [self._completions(part) for part in ("rollout", *refills)]

    @functools.cached_property
    def greedy(self) -> Completions | None:
        """ReMax's baselines."""
        return self._completions("greedy") if "greedy" in self.parts else None

    @property
    def scored(self) -> list[Completions]:
        """Completions that have scores, baselines last."""
        tables = [*self.sampled, *([self.greedy] if self.greedy else [])]
        return [table for table in tables if table.scores is not None]

    @property
    def update(self) -> Artifact | None:
        return self.parts.get("update")

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the update."""
        return {} if self.update is None else self.update.manifest["config"]

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Metrics of the update."""
        return {} if self.update is None else self.update.metrics

    @property
    def fates(self) -> list[FateRow]:
        """Fates of the completions in the update."""
        return self.sampled[0].fates


class AuditedRun:
    """A run's record with its artifacts that are still in the store."""

    def __init__(self, store: Store, record: Mapping[str, Any]):
        self.store, self.record = store, record
        self.entries: dict[str, dict[str, Any]] = {n: e for n, e in record["nodes"].items() if "digest" in e}
        """Finished nodes of the record by name."""

    def stored(self, source: Mapping[str, Any]) -> Artifact | None:
        """Return an artifact by its digest (another run may have recomputed its key), None if it is gone."""
        return self.store.with_digest(source["stage"], source["key"], source["digest"])

    @functools.cached_property
    def artifacts(self) -> dict[str, Artifact]:
        """Artifacts by node."""
        pairs = ((name, self.stored(entry)) for name, entry in self.entries.items())
        return {name: artifact for name, artifact in pairs if artifact is not None}

    @property
    def rounds(self) -> Iterator[Round]:
        """Yield the rounds that have rollouts, in order."""
        parts: dict[int, dict[str, Artifact]] = {}
        for name, artifact in self.artifacts.items():
            if match := ROUND.fullmatch(name):
                parts.setdefault(int(match[1]), {})[match[2]] = artifact
        return (Round(self, number, parts[number]) for number in sorted(parts) if "rollout" in parts[number])

    @functools.cached_property
    def starts(self) -> dict[int, str]:
        """Digest of the policy that each round's update starts from."""
        updates = {round_.number: round_.update for round_ in self.rounds}
        return {n: update.manifest["inputs"]["policy"]["digest"] for n, update in updates.items() if update is not None}

    @property
    def evaluated(self) -> Iterator[Completions]:
        """Yield the evaluations, in the order of the record."""
        return (Completions(self, name, a) for name, a in self.artifacts.items() if a.stage == "evaluate")

    @property
    def played(self) -> Iterator[Completions]:
        """Yield the tables that hold episodes, of rounds and then of evaluations."""
        for round_ in self.rounds:
            yield from (table for table in round_.sampled if table.is_played)
        yield from (table for table in self.evaluated if table.is_played)

    @functools.cached_property
    def first_asked(self) -> tuple[str, set[tuple[int, str, bytes]]]:
        """Name and prompts of the first evaluation."""
        first = next(self.evaluated)
        return first.name, first.asked

    @functools.cached_property
    def seeds(self) -> dict[str, int]:
        """Seed of each task of the prepared data by id: from its metadata, else from the sha256 of the id."""
        data = self.artifacts.get("prepare")
        seeds: dict[str, int] = {}
        for split in ("prompts/", "heldout/"):
            tables = batches(data, split, ("id", "metadata")) if data is not None and data.has(split) else ()
            for row in (row for batch in tables for row in batch.to_pylist()):
                given = json.loads(row["metadata"] or "{}").get("seed")
                derived = int(hashlib.sha256(row["id"].encode()).hexdigest()[:8], 16) % 2**31
                seeds[row["id"]] = given if type(given) is int else derived
        return seeds

    @functools.cached_property
    def prompts(self) -> dict[str, bytes]:
        """Digest of the tokens of each prompt that rounds draw from, by id."""
        # A run on new data alone draws from `fresh`.
        data = self.artifacts.get("fresh", self.artifacts.get("prepare"))
        if data is None or not data.has("prompts/"):
            return {}
        digests: dict[str, bytes] = {}
        # Data may be many gigabytes: batches of two columns, not rows of all.
        for batch in batches(data, "prompts/", ("id", "prompt_ids")):
            tokens = list_rows(pa.chunked_array([batch.column("prompt_ids")]))
            ids = batch.column("id").to_pylist()
            digests |= {name: tokens_digest(of or ()) for name, of in zip(ids, tokens, strict=True)}
        return digests


def tokens_digest(ids: Sequence[int]) -> bytes:
    """Return a digest of token ids, to compare them without keeping them."""
    return hashlib.blake2b(np.asarray(ids, np.int64).tobytes(), digest_size=16).digest()
