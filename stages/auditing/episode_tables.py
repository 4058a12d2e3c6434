"""What the laws of trajectories read: the tables of episodes of a run, of rounds and of evaluations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.stages.auditing.run import AuditedRun, Round, Tables, is_played
from rlhf.stages.common.tables import read_table
from rlhf.stages.store.artifacts import Artifact
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.rows import CompletionRow, ScoreRow

Name = tuple[int, int]
"""Place and sample of an episode."""


@dataclasses.dataclass(frozen=True)
class Played(Tables):
    """The episodes of one artifact."""

    run: AuditedRun
    name: str
    """Of the node that played."""
    artifact: Artifact
    scores: Artifact | None = None
    """Of a round's rollouts or refill."""
    round: Round | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings of the stage."""
        config: Mapping[str, Any] = self.artifact.manifest["config"]
        return config

    @property
    def environment(self) -> Mapping[str, Any]:
        """The section `environment` as the stage had it."""
        environment: Mapping[str, Any] = self.config["environment"]
        return environment

    @property
    def samples(self) -> int:
        """Episodes of a task."""
        return int(self.config["completions" if "completions" in self.config else "samples"])

    @functools.cached_property
    def episodes(self) -> dict[Name, TrajectoryRow]:
        """By place and sample; of two with one name the last."""
        return {(row.place, row.sample): row for row in self.trajectories}

    @functools.cached_property
    def trajectories(self) -> list[TrajectoryRow]:
        """The table of episodes."""
        return read_table(self.artifact, "trajectories/", TrajectoryRow)

    @functools.cached_property
    def turns(self) -> dict[Name, list[TurnRow]]:
        """The turns of each episode, in the order of the table."""
        found: dict[Name, list[TurnRow]] = {}
        for row in read_table(self.artifact, "turns/", TurnRow):
            found.setdefault((row.place, row.sample), []).append(row)
        return found

    @functools.cached_property
    def rows(self) -> dict[Name, list[CompletionRow]]:
        """The rows of the rollout table of each episode, in the order of the table."""
        found: dict[Name, list[CompletionRow]] = {}
        for row in read_table(self.artifact, "rollouts/", CompletionRow):
            found.setdefault((row.place, row.sample), []).append(row)
        return found

    @functools.cached_property
    def score_rows(self) -> dict[Name, ScoreRow]:
        """Scores by place and sample; empty for an evaluation."""
        table = [] if self.scores is None else read_table(self.scores, "scores/", ScoreRow)
        return {(row.place, row.sample): row for row in table}

    def case(self, name: Name) -> str:
        """How a broken case names an episode."""
        return f"{self.name}, place {name[0]}, sample {name[1]}"


def played(run: AuditedRun) -> Iterator[Played]:
    """The artifacts of a run that hold episodes, in the order of rounds, then of evaluations."""
    for round_ in run.rounds:
        for sampled in round_.sampled:
            if is_played(sampled.rollouts):
                yield Played(run, sampled.name, sampled.rollouts, sampled.scores, round_)
    for evaluated in run.evaluated:
        if is_played(evaluated.artifact):
            yield Played(run, evaluated.name, evaluated.artifact)


def says_nothing(episode: TrajectoryRow) -> bool:
    """Whether an episode's end says nothing of the policy."""
    return episode.status == "failed"
