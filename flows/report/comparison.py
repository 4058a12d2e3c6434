"""Compare two runs for `rlhf diff`: settings, data, code, metrics, evaluations and samples."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from rlhf.flows.graph.changes import as_read, lines_between
from rlhf.flows.report.measures import number
from rlhf.flows.report.run_view import RunView
from rlhf.flows.report.samples import Policy, card, changes, choose
from rlhf.stages.contract.source_archive import kept, modules_of
from rlhf.stages.store.artifacts import Artifact, ArtifactError
from rlhf.stages.store.keys import differences, published

SAMPLES = 3
"""Problems shown side by side."""
SPEED = re.compile(r"seconds|_per_second$|^mfu$|memory|^checkpoint_bytes$")
"""Metrics of the machine."""


def compare(first: RunView, second: RunView) -> dict[str, Any]:
    """Return the differences of two runs as `--json` has them; lists are empty without any."""
    views, keys = (first, second), ("name", "status", "started")
    labels = [label for label in first.evaluations() if label in second.evaluations()]
    return {
        "runs": [{key: view.record[key] for key in keys} for view in views],
        "settings": _settings(*views),
        "data": _data(*views),
        "code": _code(*views),
        "nodes": _nodes(*views),
        "metrics": _metrics(*views),
        "evaluations": {label: _evaluation(*views, label) for label in labels},
    }


def _settings(first: RunView, second: RunView) -> list[str]:
    """Return a line for each different setting of the recipe, without name and store."""
    values = [published(view.record["recipe"]) for view in (first, second)]
    same = dict.fromkeys(("name", "description", "store"))
    old, new = (recipe | same | {"data": as_read(recipe["data"])} for recipe in values)
    return differences(old, new)


def _data(*views: RunView) -> dict[str, Any]:
    """Compare the prepared data; if it differs, also its sources and the rows of each split."""
    entries = [view.nodes.get("prepare") or {} for view in views]
    digests = [entry.get("digest") for entry in entries]
    rows = [(entry.get("metrics") or {}).get("rows", {}) for entry in entries]
    same = digests[0] == digests[1] if all(digests) else None
    data: dict[str, Any] = {"same": same, "digests": digests, "rows": differences(rows[0], rows[1])}
    artifacts = [artifact for view in views if (artifact := view.artifact("prepare")) is not None]
    if len(artifacts) == 2 and not same:
        lines = differences(*(artifact.manifest["key_parts"]["sources"] for artifact in artifacts))
        data["sources"] = [line for line in lines if "module:" not in line.partition(": ")[0]]
    return data


def _code(first: RunView, second: RunView) -> list[dict[str, Any]]:
    """Return the modules that differ between artifacts of both runs, with the changed lines if the store has them."""
    modules: dict[str, dict[str, Any]] = {}
    for name in sorted(first.nodes.keys() & second.nodes.keys()):
        pair = [a for view in (first, second) if (a := view.artifact(name)) is not None]
        if len(pair) < 2 or pair[0].key == pair[1].key:
            continue
        old, new = (modules_of(artifact.manifest["key_parts"]) for artifact in pair)
        # A moved or renamed module has one content under two names.
        moved = set(old.values()) & set(new.values())
        for module in old.keys() | new.keys():
            if {content for of in (old, new) if (content := of.get(module))} <= moved:
                continue
            if module not in modules:
                fate = "new" if module not in old else "gone" if module not in new else "changed"
                modules[module] = {"module": module, "fate": fate, "lines": _lines(module, pair), "nodes": []}
            modules[module]["nodes"].append(name)
    return [modules[module] for module in sorted(modules)]


def _lines(module: str, artifacts: list[Artifact]) -> list[str]:
    old, new = (kept(artifact.store, artifact.manifest["key_parts"]).get(module) for artifact in artifacts)
    if old is None or new is None:
        return []
    return [line.strip() for line in lines_between(old["text"], new["text"], Path(new["file"]).name)]


def _nodes(first: RunView, second: RunView) -> dict[str, list[str]]:
    """Group the nodes by whether both runs have them, with the same output or not."""
    old, new = ({n: e["digest"] for n, e in view.nodes.items() if "digest" in e} for view in (first, second))
    return {
        "same": [n for n in old if n in new and old[n] == new[n]],
        "differ": [n for n in old if n in new and old[n] != new[n]],
        "first": [n for n in old if n not in new],
        "second": [n for n in new if n not in old],
    }


def _metrics(first: RunView, second: RunView) -> dict[str, dict[str, list[float | None]]]:
    """Return the numbers that differ, by node and metric: [first, second]."""
    metrics: dict[str, dict[str, list[float | None]]] = {}
    for name in (name for name in first.nodes if name in second.nodes):
        old, new = (view.nodes[name].get("metrics") or {} for view in (first, second))
        pairs = {m: [number(old[m]), number(new[m])] for m in sorted(old.keys() & new.keys()) if not SPEED.search(m)}
        if changed := {metric: pair for metric, pair in pairs.items() if pair[0] != pair[1]}:
            metrics[name] = changed
    return metrics


def _evaluation(first: RunView, second: RunView, label: str) -> dict[str, Any]:
    """Return the scores of a policy in both runs, their paired difference, and the problems that changed most."""
    from rlhf.stages.tools.paired_evaluations import paired

    name = f"evaluate.{label}"
    scores = [view.nodes[name]["metrics"]["score"] for view in (first, second)]
    found: dict[str, Any] = {"scores": scores, "difference": None, "reason": "", "samples": []}
    try:
        pair = paired(first.stored(name), second.stored(name))
        found |= {"prompts": list(pair.prompts), "shared": len(pair.places), "reason": pair.reason}
        if pair.difference is not None:
            found["difference"] = dataclasses.asdict(pair.difference) | {"verdict": pair.difference.verdict}
        old, new = Policy(first, label), Policy(second, label)
        gained, lost, _ = changes(old, new, pair.places)
        found["samples"] = [card([(old, a), (new, b)]) for a, b in choose(gained, lost, [], SAMPLES)]
    except (ArtifactError, OSError, KeyError, ValueError) as e:
        found["reason"] = f"{type(e).__name__}: {e}"
    return found
