"""The plan of a run: hit or miss for each stage, and the reasons of a miss."""

from __future__ import annotations

import dataclasses
from typing import Any

from flows.graph.build import Node, build, key_of, key_parts, taken_artifact
from flows.recipe.model import Recipe
from flows.records import all_runs, latest_with
from stages.contract.registry import stage as find_stage
from stages.store.artifacts import Artifact, Store
from stages.store.keys import differences


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan for one node."""

    node: Node
    state: str
    """`hit`, `miss`, or `waits`: an input is a miss, and if it comes out equal this node is a hit."""
    reasons: list[str]
    seconds: float | None
    """How long it took last time."""


def plan(recipe: Recipe, force: set[str] | None = None) -> list[Planned]:
    """The plan for every node of a recipe, from the content of its store. Runs nothing and writes nothing."""
    store = Store(recipe.store)
    runs = all_runs(store)
    artifacts: dict[str, Artifact] = {}
    planned = []
    for node in build(recipe):
        # Of another run, whatever its key: it is not made here.
        taken = taken_artifact(store, node)
        if taken is not None:
            artifacts[node.name] = taken
            planned.append(Planned(node, "hit", [], taken.manifest["seconds"]))
            continue
        waiting = sorted({i.node for i in node.inputs.values() if i.node not in artifacts})
        before = latest_with(runs, recipe.name, node.name)
        seconds = before.get("made_seconds") if before else None
        if waiting:
            planned.append(Planned(node, "waits", [f"after {', '.join(waiting)}"], seconds))
            continue
        parts = key_parts(node, artifacts)
        key = key_of(parts)
        # repair=False: looking must not move a damaged artifact.
        artifact = store.get(node.stage, key, repair=False)
        if artifact is not None and node.name not in (force or set()):
            artifacts[node.name] = artifact
            planned.append(Planned(node, "hit", [], artifact.manifest["seconds"]))
        else:
            reasons = ["forced"] if artifact is not None else _reasons(store, node, parts, key, before)
            planned.append(Planned(node, "miss", reasons, seconds))
    return planned


def _reasons(store: Store, node: Node, parts: dict[str, Any], key: str, before: dict[str, Any] | None) -> list[str]:
    """Why a node is a miss, a line for each part of its key that differs from the last run's."""
    work = store.scratch / "work" / node.stage / key
    begun = [f"goes on from work in progress ({work})"] if work.exists() and any(work.iterdir()) else []
    if before is None:
        return ["never made", *begun]
    if before["key"] == key:
        # Nothing of the key changed: the artifact is missing.
        gone = before["state"] in ("hit", "made")
        return ["its artifact is gone or damaged" if gone else "was not finished last time", *begun]
    manifest = store.get(node.stage, before["key"], repair=False)
    if manifest is None:
        return ["changed; the artifact that would say what is gone", *begun]
    old = manifest.manifest["key_parts"]
    lines = []
    for line in differences(*_moves_left_out(old, parts)):
        section, _, rest = line.partition(".")
        if section == "inputs":
            lines.append(f"input {rest.split(':')[0]} has other content")
        elif section == "code":
            module, _, change = rest.partition(": ")
            lines.append(f"code {module} {_fate(change)}")
        elif section.startswith("imports:"):
            lines.append("an import reaches another module")
        elif section == "config":
            lines.append(f"{find_stage(node.stage).section or node.stage}.{rest}")
        else:
            lines.append(line)
    return lines + begun


def _fate(change: str) -> str:
    """What became of a module, from a line of `differences`: a file that was moved and edited is new and gone."""
    return next((word for word in ("new", "gone") if change.startswith(word)), "changed")


def _moves_left_out(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parts of two keys without the modules whose content is in both, under any name."""
    both = set(old["code"].values()) & set(new["code"].values())
    codes = [{name: content for name, content in p["code"].items() if content not in both} for p in (old, new)]
    # A module that changed has changed links too; links say something only where no module changed.
    hidden = {"imports": ""} if any(codes) else {}
    return old | {"code": codes[0]} | hidden, new | {"code": codes[1]} | hidden
