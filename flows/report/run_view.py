"""A run's record together with what the store still holds of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlhf.flows.report.formats import LABELS, seconds_at
from rlhf.stages.store.artifacts import Artifact, ArtifactError, Store
from rlhf.stages.store.keys import SHOWN

if TYPE_CHECKING:
    from rlhf.stages.common.verdicts import Difference

STATES = {"hit": "cached", "made": "made", "failed": "failed", "running": "unfinished",
          "interrupted": "unfinished", "refused": "refused"}  # fmt: skip
NOT_REACHED = "not reached"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Section(Generic[T]):
    """The content of a section, or the reason why it is left out."""

    content: T | None
    missing: str = ""


def section(make: Callable[[], T]) -> Section[T]:
    """Calls `make`; a missing or damaged artifact costs its section, not the report."""
    try:
        return Section(make())
    except (ArtifactError, OSError, KeyError, ValueError) as e:
        return Section(None, f"{type(e).__name__}: {e}")


@dataclasses.dataclass
class StageRow:
    """A node in the table, the timeline and the graph of stages; or all nodes of the RL rounds folded into one row."""

    name: str
    state: str = NOT_REACHED
    seconds: float | None = None
    made_seconds: float | None = None
    key: str = ""
    digest: str = ""
    start: float = 0.0
    """Seconds since the run began; the same of `end`."""
    end: float = 0.0
    sources: list[str] = dataclasses.field(default_factory=list)
    """Rows that this one has inputs from."""
    rounds: list[StageRow] = dataclasses.field(default_factory=list)
    """The nodes folded into this row."""

    @property
    def planned(self) -> int:
        """Rounds of the recipe."""
        return len({r.name.split(".")[0] for r in self.rounds})

    @property
    def done(self) -> int:
        """Rounds whose update is there."""
        return sum(r.name.endswith(".update") and bool(r.digest) for r in self.rounds)

    @property
    def counts(self) -> str:
        """Numbers of the folded nodes by state, as text."""
        counts = Counter(r.state for r in self.rounds if r.state != NOT_REACHED)
        return ", ".join(f"{n} {state}" for state, n in counts.items())


class RunView:
    """A run's record with its artifacts, as far as the store has them."""

    def __init__(self, store: Store, record: Mapping[str, Any]):
        self.store = store
        self.record = record
        self.nodes: dict[str, dict[str, Any]] = record.get("nodes", {})
        self._artifacts: dict[str, Artifact | None] = {}

    def artifact(self, name: str) -> Artifact | None:
        """The artifact of a finished node as the run used it, or None where the store has lost it.

        A damaged one is not moved aside, which reading a report must not do.
        """
        if name not in self._artifacts:
            entry = self.nodes.get(name)
            found = None
            if entry and entry["state"] in ("hit", "made"):
                with contextlib.suppress(ArtifactError, OSError):
                    # By digest: another run may have made the key anew since.
                    found = self.store.with_digest(entry["stage"], entry["key"], entry["digest"])
            self._artifacts[name] = found
        return self._artifacts[name]

    def stored(self, name: str) -> Artifact:
        """As `artifact`. Raises ArtifactError where it is not in the store."""
        artifact = self.artifact(name)
        if artifact is None:
            raise ArtifactError(f"the artifact of {name} is not in the store")
        return artifact

    def rows(
        self, name: str, part: str, columns: Sequence[str] | None, places: Collection[int] | None = None
    ) -> list[dict[str, Any]]:
        """Some columns of a table of a node's artifact: token ids and logprobs take most of the time.

        columns, places: those that are read; None: all.
        """
        import pyarrow.parquet as pq

        files = sorted(self.stored(name).local(part).glob("*.parquet"))
        if places is not None and not places:
            return []
        some = None if places is None else [("place", "in", set(places))]
        tables = (pq.read_table(path, columns=columns and list(columns), filters=some) for path in files)
        return [row for table in tables for row in table.to_pylist()]

    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Metrics of the evaluated policies by name, in the order of `LABELS`."""
        metrics = {}
        for name, entry in self.nodes.items():
            if name.startswith("evaluate.") and "score" in entry.get("metrics", {}):
                metrics[name.removeprefix("evaluate.")] = entry["metrics"]
        order = list(LABELS)
        return dict(sorted(metrics.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))

    def verdicts(self, label: str) -> dict[tuple[int, int], float | None]:
        """What the judge that decides gives each completion of an evaluation, by place and sample: None where it does
        not apply, 0 where it failed, as in the evaluation. Raises ArtifactError where it is not in the store."""
        name = f"evaluate.{label}"
        decides = self.stored(name).manifest["config"]["judge"]
        rows = self.rows(name, "verdicts/", ("place", "sample", "judge", "score", "failure"))
        scores = [(row, 0.0 if row["failure"] is not None else row["score"]) for row in rows]
        return {(row["place"], row["sample"]): score for row, score in scores if row["judge"] == decides}

    def first_and_last(self, rounds: Sequence[int]) -> list[int]:
        """The first and the last of these rounds that have scores: one may be under way."""
        scored = [n for n in rounds if f"round-{n:03d}.score" in self.nodes]
        return list(dict.fromkeys([*scored[:1], *scored[-1:]]))

    def differences(self, labels: Sequence[str]) -> dict[str, dict[str, Difference]]:
        """Paired differences of these policies. Raises ArtifactError where an evaluation is not in the store."""
        from rlhf.stages.common.verdicts import differences

        return differences({label: self.stored(f"evaluate.{label}") for label in labels})

    def stages(self) -> list[StageRow]:
        """A row for each node of the run and of its recipe; the nodes of all rounds are one row."""
        inputs = self._inputs()
        rows: dict[str, StageRow] = {}
        for name in dict.fromkeys([*inputs, *self.nodes]):
            row = self._row(name)
            row.sources = inputs.get(name, [])
            if name.startswith("round-"):
                rows.setdefault("rounds", StageRow("rounds")).rounds.append(row)
            else:
                rows[name] = row
        if "rounds" in rows:
            _fold(rows["rounds"])
        for row in rows.values():
            # The rounds are one row: inputs from any of them are inputs from it, and inputs among them are inside.
            sources = {"rounds" if name.startswith("round-") else name for name in row.sources}
            row.sources = sorted(sources - {row.name})
        return list(rows.values())

    def _row(self, name: str) -> StageRow:
        entry = self.nodes.get(name)
        if entry is None:
            return StageRow(name)
        state = STATES.get(entry["state"], NOT_REACHED)
        start = seconds_at(entry["started"]) - seconds_at(self.record["started"])
        end = start + (entry.get("seconds") or 0.0)
        seconds, made_seconds = entry.get("seconds"), entry.get("made_seconds")
        return StageRow(name, state, seconds, made_seconds, entry["key"], entry.get("digest", ""), start, end)

    def took(self) -> float | None:
        """Seconds from start to end of the run; None where it has not ended."""
        ended = self.record.get("ended")
        return seconds_at(ended) - seconds_at(self.record["started"]) if ended else None

    def _inputs(self) -> dict[str, list[str]]:
        """Inputs of each node, from the recipe; none are known where the recipe is of another version."""
        from rlhf.flows.graph.build import build
        from rlhf.flows.graph.policy_refs import recorded
        from rlhf.flows.recipe.model import Recipe

        try:
            values = json.dumps(self.record["recipe"])
            planned = build(Recipe.model_validate_json(values, context=SHOWN), recorded(self.record))
        except ValueError:
            return {name: [] for name in self.nodes}
        return {n.name: sorted({i.node for i in n.inputs.values()}) for n in planned}

    def summary(self, stages: Sequence[StageRow]) -> dict[str, Any]:
        """Counts and seconds of the run as a whole."""
        states = Counter(entry["state"] for entry in self.nodes.values())
        hits = [entry for entry in self.nodes.values() if entry["state"] == "hit"]
        # What the artifact took to make, less what it took to find.
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


def _fold(row: StageRow) -> None:
    """Fills in the row of all nodes of the RL rounds."""
    reached = [r for r in row.rounds if r.state != NOT_REACHED]
    row.sources = sorted({name for r in row.rounds for name in r.sources})
    if not reached:
        return
    # The state that a reader must act on first stands for all.
    row.state = next(s for s in ("failed", "unfinished", "made", "cached") if any(r.state == s for r in reached))
    row.seconds = sum(r.seconds or 0.0 for r in reached)
    row.made_seconds = sum(r.made_seconds or 0.0 for r in reached)
    row.start = min(r.start for r in reached)
    row.end = max(r.end for r in reached)
