"""The plan of a run: hit or miss for each stage, and the reasons for a miss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.flows.graph.build import Node, nodes_of
from rlhf.flows.graph.changes import reasons_of
from rlhf.flows.graph.keying import Codes, key_of, key_parts
from rlhf.flows.graph.reuse import Records, check_point, taken_artifact
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.records import latest_with, readable_runs
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.runs import in_parallel


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan for one node."""

    node: Node
    state: str
    """`hit`, `miss`, or `waits` for an input that is a miss: a hit if that comes out equal and nothing else differs."""
    reasons: list[str]
    """Reasons for a miss; for a waiting node its missing inputs."""
    seconds: float | None
    """The time that it took last time."""
    nearest: str = ""
    """The run whose artifact the reasons compare with: that with the fewest differences."""
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Metrics of the artifact of a hit."""
    digest: str = ""
    """Its digest."""


def plan(recipe: Recipe, force: set[str] | None = None) -> list[Planned]:
    """Return the plan for every node of a recipe, from the content of its store. Writes nothing."""
    store = Store(recipe.store)
    runs = readable_runs(store)
    known, taken_from = _known(store, recipe.name, runs), Records()
    codes = Codes()
    artifacts: dict[str, Artifact] = {}
    planned = []
    for node in nodes_of(recipe):
        # An artifact of another run is used whatever its key is.
        artifact = taken_artifact(store, node, taken_from)
        if artifact is None:
            waiting = sorted({i.node for i in node.inputs.values() if i.node not in artifacts})
            before = latest_with(runs, recipe.name, node.name)
            seconds = before.get("made_seconds") if before else None
            if waiting:
                planned.append(Planned(node, "waits", [f"after {', '.join(waiting)}"], seconds))
                continue
            parts = key_parts(node, artifacts, codes)
            key = key_of(parts)
            artifact = known.get((node.stage, key)) or store.get(node.stage, key)
            if artifact is None or node.name in (force or ()):
                reasons, nearest = ["forced"], ""
                if artifact is None:
                    reasons, nearest = reasons_of(store, recipe.name, node, parts, key, runs)
                planned.append(Planned(node, "miss", reasons, seconds, nearest))
                continue
        check_point(node, artifact)
        artifacts[node.name] = artifact
        seconds = artifact.manifest["seconds"]
        planned.append(Planned(node, "hit", [], seconds, metrics=artifact.metrics, digest=artifact.digest))
    return planned


def _known(store: Store, recipe: str, runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Artifact]:
    """Return the artifacts of the recipe's newest run in a remote store, read by several requests at a time.

    Keys depend on one another, so without it each node would wait for the one before.
    """
    if store.is_local:
        return {}
    of_recipe = (record["nodes"] for record in reversed(runs) if record["recipe"]["name"] == recipe)
    newest: Mapping[str, Any] = next(of_recipe, {})
    refs: list[tuple[str, str]] = [(e["stage"], e["key"]) for e in newest.values() if "digest" in e]
    found = in_parallel(store, lambda ref: store.get(ref[0], ref[1]), refs)
    return {ref: artifact for ref, artifact in zip(refs, found, strict=True) if artifact is not None}
