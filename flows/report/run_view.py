"""A run's record together with its artifacts that are still in the store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.flows.report.formats import LABELS, seconds_at
from rlhf.stages.store.artifacts import Artifact, ArtifactError, Store
from rlhf.stages.store.keys import SHOWN

if TYPE_CHECKING:
    from rlhf.stages.common.verdicts import Difference

STATES = {"hit": "cached", "made": "made", "failed": "failed", "running": "unfinished",
          "interrupted": "unfinished", "refused": "refused"}  # fmt: skip
NOT_REACHED = "not reached"


class Section(NamedTuple):
    """The content of a section, or why it is missing."""

    content: Any
    missing: str = ""


def section(make: Callable[[], Any]) -> Section:
    """Call `make`; a missing or damaged artifact costs its section, not the report."""
    try:
        return Section(make())
    except (ArtifactError, OSError, KeyError, ValueError) as e:
        return Section(None, f"{type(e).__name__}: {e}")


@dataclasses.dataclass
class StageRow:
    """A node in the table and the timeline of stages; or all nodes of the RL rounds in one row."""

    name: str
    state: str = NOT_REACHED
    seconds: float | None = None
    made_seconds: float | None = None
    key: str = ""
    digest: str = ""
    start: float = 0.0
    """Seconds since the run began; also `end`."""
    end: float = 0.0
    rounds: list[StageRow] = dataclasses.field(default_factory=list)
    """The nodes in this row."""

    @property
    def planned(self) -> int:
        """Rounds of the recipe."""
        return len({r.name.split(".")[0] for r in self.rounds})

    @property
    def done(self) -> int:
        """Rounds with an update."""
        return sum(r.name.endswith(".update") and bool(r.digest) for r in self.rounds)


class RunView:
    """A run's record with its artifacts."""

    def __init__(self, store: Store, record: Mapping[str, Any]):
        self.store = store
        self.record = record
        self.nodes: dict[str, dict[str, Any]] = record.get("nodes", {})
        self._artifacts: dict[str, Artifact | None] = {}

    def artifact(self, name: str) -> Artifact | None:
        """Return the artifact that the run used for a node; None if the store lost it.

        A damaged artifact stays in its place: a report only reads.
        """
        if name not in self._artifacts:
            entry = self.nodes.get(name)
            found = None
            if entry and entry["state"] in ("hit", "made"):
                with contextlib.suppress(ArtifactError, OSError):
                    # By digest: another run may have recomputed the key.
                    found = self.store.with_digest(entry["stage"], entry["key"], entry["digest"])
            self._artifacts[name] = found
        return self._artifacts[name]

    def stored(self, name: str) -> Artifact:
        """As `artifact`, but raise ArtifactError if the store lost it."""
        artifact = self.artifact(name)
        if artifact is None:
            raise ArtifactError(f"the artifact of {name} is not in the store")
        return artifact

    def rows(
        self, name: str, part: str, columns: Sequence[str] | None, places: Collection[int] | None = None
    ) -> list[dict[str, Any]]:
        """Return rows of a table of a node's artifact; some columns or places, because token ids take most time."""
        import pyarrow.parquet as pq

        if places is not None and not places:
            return []
        filters = None if places is None else [("place", "in", set(places))]
        files = sorted(self.stored(name).local(part).glob("*.parquet"))
        tables = (pq.read_table(path, columns=columns and list(columns), filters=filters) for path in files)
        return [row for table in tables for row in table.to_pylist()]

    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Return the metrics of the evaluated policies by name, in the order of `LABELS`."""
        metrics = {
            name.removeprefix("evaluate."): entry["metrics"]
            for name, entry in self.nodes.items()
            if name.startswith("evaluate.") and "score" in entry.get("metrics", {})
        }
        order = {label: place for place, label in enumerate(LABELS)}
        return {label: metrics[label] for label in sorted(metrics, key=lambda label: order.get(label, len(order)))}

    def verdicts(self, label: str) -> dict[tuple[int, int], float | None]:
        """Return the deciding judge's scores of an evaluation by place and sample.

        None if the judge does not apply, 0 if it failed. Raises ArtifactError if the evaluation is not in the store.
        """
        name = f"evaluate.{label}"
        judge = self.stored(name).manifest["config"]["judge"]
        rows = self.rows(name, "verdicts/", ("place", "sample", "judge", "score", "failure"))
        return {
            (row["place"], row["sample"]): 0.0 if row["failure"] is not None else row["score"]
            for row in rows
            if row["judge"] == judge
        }

    def first_and_last(self, rounds: Sequence[int]) -> list[int]:
        """Return the first and the last of these rounds that have scores; one may be running."""
        scored = [n for n in rounds if f"round-{n:03d}.score" in self.nodes]
        return list(dict.fromkeys([*scored[:1], *scored[-1:]]))

    def differences(self, labels: Sequence[str]) -> dict[str, dict[str, Difference]]:
        """Compare these policies in pairs. Raises ArtifactError if an evaluation is not in the store."""
        from rlhf.stages.common.verdicts import differences

        return differences({label: self.stored(f"evaluate.{label}") for label in labels})

    def stages(self) -> list[StageRow]:
        """Return a row for each node of the run and of its recipe; the nodes of all rounds are one row."""
        rows: dict[str, list[StageRow]] = {}
        for name in dict.fromkeys([*self._planned(), *self.nodes]):
            rows.setdefault("rounds" if name.startswith("round-") else name, []).append(self._row(name))
        return [_fold(group) if key == "rounds" else group[0] for key, group in rows.items()]

    def _row(self, name: str) -> StageRow:
        entry = self.nodes.get(name)
        if entry is None:
            return StageRow(name)
        state = STATES.get(entry["state"], NOT_REACHED)
        start = seconds_at(entry["started"]) - seconds_at(self.record["started"])
        seconds, made_seconds = entry.get("seconds"), entry.get("made_seconds")
        end = start + (seconds or 0.0)
        return StageRow(name, state, seconds, made_seconds, entry["key"], entry.get("digest", ""), start, end)

    def took(self) -> float | None:
        """Return the seconds from start to end of the run; None without an end."""
        ended = self.record.get("ended")
        return seconds_at(ended) - seconds_at(self.record["started"]) if ended else None

    def _planned(self) -> list[str]:
        """Return the nodes of the recipe; none are known of a recipe of another version."""
        from rlhf.flows.graph.build import build
        from rlhf.flows.graph.policy_refs import recorded
        from rlhf.flows.recipe.model import Recipe

        try:
            recipe = Recipe.model_validate_json(json.dumps(self.record["recipe"]), context=SHOWN)
            return [node.name for node in build(recipe, recorded(self.record))]
        except ValueError:
            return []

    def summary(self, stages: Sequence[StageRow]) -> dict[str, Any]:
        """Return counts and seconds of the whole run."""
        states = Counter(entry["state"] for entry in self.nodes.values())
        hits = [entry for entry in self.nodes.values() if entry["state"] == "hit"]
        # The time to compute the artifact, less the time to find it.
        saved = [(entry.get("made_seconds") or 0.0) - (entry.get("seconds") or 0.0) for entry in hits]
        return {
            "seconds": self.took(),
            "made": states["made"],
            "cached": states["hit"],
            "failed": states["failed"],
            "saved": sum(max(0.0, seconds) for seconds in saved),
            "missing": [row.name for row in stages if row.state == NOT_REACHED],
            "unfinished": [row.name for row in stages if row.state == "unfinished"],
            "all_cached": 0 < len(hits) == len(self.nodes) and not self.record.get("error"),
        }


def _fold(rounds: list[StageRow]) -> StageRow:
    """Join all nodes of the RL rounds into one row."""
    reached = [r for r in rounds if r.state != NOT_REACHED]
    row = StageRow("rounds", rounds=rounds)
    if reached:
        # The state that needs attention first stands for all.
        row.state = next(s for s in ("failed", "unfinished", "made", "cached") if any(r.state == s for r in reached))
        row.seconds = sum(r.seconds or 0.0 for r in reached)
        row.made_seconds = sum(r.made_seconds or 0.0 for r in reached)
        row.start, row.end = min(r.start for r in reached), max(r.end for r in reached)
    return row
