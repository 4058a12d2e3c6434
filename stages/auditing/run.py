"""What the laws read: the artifacts of a run by node, and their tables."""

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
from rlhf.tuning.columns import list_rows
from rlhf.tuning.rows import CompletionRow, FateRow, RefusedRow, ScoreRow, VerdictRow

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

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of its scores."""
        return {} if self.scores is None else self.scores.manifest["config"]

    @functools.cached_property
    def refused(self) -> list[RefusedRow]:
        """Prompts of the round from which nothing was sampled."""
        return read_table(self.rollouts, "refused/", RefusedRow) if self.rollouts.has("refused/") else []


@dataclasses.dataclass(frozen=True)
class Round(Tables):
    """What a run has of one round."""

    run: AuditedRun
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
    def settings(self) -> Mapping[str, Any]:
        """The settings of its update."""
        return {} if self.update is None else self.update.manifest["config"]

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The metrics of its update."""
        return {} if self.update is None else self.update.metrics

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
        found = self.update
        return read_table(found, "fates/", FateRow) if found is not None and found.has("fates/") else []


@dataclasses.dataclass(frozen=True)
class Evaluated(Tables):
    """An evaluation of a run."""

    run: AuditedRun
    name: str
    """Of its node."""
    artifact: Artifact

    @functools.cached_property
    def rows(self) -> list[CompletionRow]:
        """The completions."""
        return read_table(self.artifact, "rollouts/", CompletionRow)

    @functools.cached_property
    def asked(self) -> set[tuple[int, str, bytes]]:
        """What the policy was asked, token by token; an episode that its environment failed may have no context."""
        ids = ((row, () if row.stop == "failed" else row.prompt_ids) for row in self.rows)
        return {(row.place, row.prompt_id, tokens_digest(of)) for row, of in ids}

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
        greedy = (
            Sampled(f"round-{number:03d}.greedy", parts["greedy"], parts.get("greedy-score"))
            if "greedy" in parts
            else None
        )
        return Round(self, number, sampled, greedy, parts.get("update"))

    @functools.cached_property
    def starts(self) -> dict[int, str]:
        """The digest of the policy that the update of each round starts from."""
        updates = {round_.number: round_.update for round_ in self.rounds}
        return {n: update.manifest["inputs"]["policy"]["digest"] for n, update in updates.items() if update is not None}

    @property
    def evaluated(self) -> Iterator[Evaluated]:
        """The evaluations, in the order of the record."""
        for name, artifact in self.artifacts.items():
            if artifact.stage == "evaluate":
                yield Evaluated(self, name, artifact)

    @functools.cached_property
    def first_asked(self) -> tuple[str, set[tuple[int, str, bytes]]]:
        """The first evaluation, and what it asked."""
        first = next(self.evaluated)
        return first.name, first.asked

    @functools.cached_property
    def seeds(self) -> dict[str, int]:
        """The seed of each task of the prepared data by its id: of its metadata, else from the sha256 of its id."""
        data = self.artifacts.get("prepare")
        seeds: dict[str, int] = {}
        for split in ("prompts/", "heldout/"):
            found = batches(data, split, ("id", "metadata")) if data is not None and data.has(split) else ()
            for row in (row for batch in found for row in batch.to_pylist()):
                said = json.loads(row["metadata"] or "{}").get("seed")
                derived = int(hashlib.sha256(row["id"].encode()).hexdigest()[:8], 16) % 2**31
                seeds[row["id"]] = said if type(said) is int else derived
        return seeds

    @functools.cached_property
    def prompts(self) -> dict[str, bytes]:
        """A digest of the tokens of each prompt of the prepared data that rounds draw from, by its id."""
        # What is new in the data, where the run trains on that alone.
        data = self.artifacts.get("fresh", self.artifacts.get("prepare"))
        if data is None or not data.has("prompts/"):
            return {}
        found: dict[str, bytes] = {}
        # A dataset of many gigabytes: batches of two columns, not rows of all.
        for batch in batches(data, "prompts/", ("id", "prompt_ids")):
            tokens = list_rows(pa.chunked_array([batch.column("prompt_ids")]))
            ids = batch.column("id").to_pylist()
            found |= {name: tokens_digest(of or ()) for name, of in zip(ids, tokens, strict=True)}
        return found


def tokens_digest(ids: Sequence[int]) -> bytes:
    """A digest of token ids, for comparison without holding them."""
    return hashlib.blake2b(np.asarray(ids, np.int64).tobytes(), digest_size=16).digest()
