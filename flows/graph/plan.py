"""The plan of a run: hit or miss for each stage, and the reasons of a miss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.flows.graph.build import Node, nodes_of
from rlhf.flows.graph.changes import beside_inputs, reasons_of
from rlhf.flows.graph.keying import Codes, key_of, key_parts
from rlhf.flows.graph.reuse import Records, check_point, taken_artifact
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.records import latest_with, readable_runs
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.runs import in_parallel

MOST_BESIDE = 5
"""Artifacts of a node that waits that it is compared with: each is a manifest to read, of each of many rounds."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan for one node."""

    node: Node
    state: str
    """`hit`, `miss`, or `waits`: an input is a miss, and if it comes out equal this node is a hit, unless it differs
    itself."""
    reasons: list[str]
    """The reasons of a miss; for a waiting node its missing inputs and other differences."""
    seconds: float | None
    """How long it took last time."""
    nearest: str = ""
    """The run whose artifact the reasons compare with: the one from which the fewest parts differ."""
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Those of the artifact of a hit."""


def plan(recipe: Recipe, force: set[str] | None = None) -> list[Planned]:
    """The plan for every node of a recipe, from the content of its store. Runs nothing and writes nothing."""
    store = Store(recipe.store)
    runs = readable_runs(store)
    known, taken_from = _known(store, recipe.name, runs), Records()
    codes = Codes()
    artifacts: dict[str, Artifact] = {}
    planned = []
    for node in nodes_of(recipe):
        # Of another run, whatever its key: it is not made here.
        artifact = taken_artifact(store, node, taken_from)
        if artifact is None:
            waiting = sorted({i.node for i in node.inputs.values() if i.node not in artifacts})
            before = latest_with(runs, recipe.name, node.name)
            seconds = before.get("made_seconds") if before else None
            if waiting:
                differs, nearest = _beside_inputs(store, recipe.name, node, artifacts, codes, runs, known)
                planned.append(Planned(node, "waits", [f"after {', '.join(waiting)}", *differs], seconds, nearest))
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
        planned.append(Planned(node, "hit", [], artifact.manifest["seconds"], metrics=artifact.metrics))
    return planned


def _beside_inputs(
    store: Store,
    recipe: str,
    node: Node,
    made: Mapping[str, Artifact],
    codes: Codes,
    runs: Sequence[Mapping[str, Any]],
    known: Mapping[tuple[str, str], Artifact],
) -> tuple[list[str], str]:
    """What of a node that waits differs from the nearest of its artifacts in the newest runs of the recipe, inputs that
    it waits for aside; and that run. Nothing where there is none, or it would have to be asked for far away.
    """
    stores = store if store.is_local else None
    found: dict[str, tuple[list[str], str]] = {}
    parts = None
    for record in reversed(runs):
        entry = record["nodes"].get(node.name, {})
        if record["recipe"]["name"] != recipe or "digest" not in entry or entry["stage"] != node.stage:
            continue
        if entry["key"] in found:
            continue
        place = node.stage, entry["key"]
        artifact = known.get(place) or (stores.get(*place) if stores else None)
        if artifact is None:
            continue
        parts = parts or key_parts(node, made, codes, partial=True)
        differs = beside_inputs(store, node, artifact, parts)
        if not differs:
            return [], ""
        found[entry["key"]] = differs, str(record["name"])
        if len(found) == MOST_BESIDE:
            break
    return min(found.values(), key=lambda one: len(one[0]), default=([], ""))


def _known(store: Store, recipe: str, runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Artifact]:
    """What the newest run of the recipe has, where the store is far away: a plan finds it in few requests at a time.

    Keys follow from one another, so without it each node would wait for the one before.
    """
    if store.is_local:
        return {}
    of_recipe = (record["nodes"] for record in reversed(runs) if record["recipe"]["name"] == recipe)
    newest: Mapping[str, Any] = next(of_recipe, {})
    refs: list[tuple[str, str]] = [(e["stage"], e["key"]) for e in newest.values() if "digest" in e]
    found = in_parallel(store, lambda ref: store.get(ref[0], ref[1]), refs)
    return {ref: artifact for ref, artifact in zip(refs, found, strict=True) if artifact is not None}
