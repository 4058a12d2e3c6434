"""Two runs side by side: settings, data, code, metrics, evaluations and some samples. `rlhf diff` prints it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.flows.graph.changes import as_read, lines_between
from rlhf.flows.report.measures import number
from rlhf.flows.report.run_view import RunView
from rlhf.flows.report.samples import Policy
from rlhf.stages.contract.source_archive import kept, modules_of
from rlhf.stages.store.artifacts import Artifact, ArtifactError
from rlhf.stages.store.keys import differences, published

SAMPLES = 3
"""Problems shown side by side."""
SPEED = re.compile(r"seconds|_per_second$|^mfu$|memory|^checkpoint_bytes$")
"""Metrics of the machine and the moment, which say nothing of a run."""


def compared(first: RunView, second: RunView) -> dict[str, Any]:
    """What differs between two runs, as `--json` has it; lists are empty where nothing does."""
    runs = [{"name": v.record["name"], "status": v.record["status"], "started": v.record["started"]}
            for v in (first, second)]  # fmt: skip
    return {
        "runs": runs,
        "settings": _settings(first, second),
        "data": _data(first, second),
        "code": _code(first, second),
        "nodes": _nodes(first, second),
        "metrics": _metrics(first, second),
        "evaluations": _evaluations(first, second),
    }


def _settings(first: RunView, second: RunView) -> list[str]:
    """A line for each setting of the recipe that differs, but its name and store."""
    values = [published(view.record["recipe"]) for view in (first, second)]
    same = dict.fromkeys(("name", "description", "store"))
    shown = [recipe | same | {"data": as_read(recipe["data"])} for recipe in values]
    return differences(shown[0], shown[1])


def _data(first: RunView, second: RunView) -> dict[str, Any]:
    """Whether the prepared data is the same; if not, the sources that differ and the rows of each split."""
    entries: list[dict[str, Any]] = [dict(view.nodes.get("prepare") or {}) for view in (first, second)]
    digests = [entry.get("digest") for entry in entries]
    found: dict[str, Any] = {"same": digests[0] == digests[1] if all(digests) else None, "digests": digests}
    rows = [(entry.get("metrics") or {}).get("rows", {}) for entry in entries]
    found["rows"] = differences(rows[0], rows[1])
    artifacts = [view.artifact("prepare") for view in (first, second)]
    if all(artifacts) and digests[0] != digests[1]:
        parts = [a.manifest["key_parts"]["sources"] for a in artifacts if a is not None]
        found["sources"] = [
            line for line in differences(parts[0], parts[1]) if "module:" not in line.partition(": ")[0]
        ]
    return found


def _code(first: RunView, second: RunView) -> list[dict[str, Any]]:
    """The modules that differ behind the artifacts of both, whatever came out, with the lines as far as the store has
    kept their text."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(first.nodes.keys() & second.nodes.keys()):
        pair = [a for view in (first, second) if (a := view.artifact(name)) is not None]
        if len(pair) < 2 or pair[0].key == pair[1].key:
            continue
        hashes = [modules_of(artifact.manifest["key_parts"]) for artifact in pair]
        # A module that was moved or renamed has one content under two names.
        both = set(hashes[0].values()) & set(hashes[1].values())
        for module in hashes[0].keys() | hashes[1].keys():
            contents = {h[module] for h in hashes if module in h}
            if contents <= both:
                continue
            if module not in found:
                fate = "changed" if all(module in h for h in hashes) else "new" if module in hashes[1] else "gone"
                found[module] = {"module": module, "fate": fate, "lines": _lines(module, pair), "nodes": []}
            found[module]["nodes"].append(name)
    return [found[module] for module in sorted(found)]


def _lines(module: str, artifacts: list[Artifact]) -> list[str]:
    texts = [kept(artifact.store, artifact.manifest["key_parts"]).get(module) for artifact in artifacts]
    pair = [text for text in texts if text is not None]
    if len(pair) < 2:
        return []
    return [line.strip() for line in lines_between(pair[0]["text"], pair[1]["text"], Path(pair[1]["file"]).name)]


def _nodes(first: RunView, second: RunView) -> dict[str, list[str]]:
    """Names of nodes by whether both runs have them, with the same output or not."""
    ends = [{n: e["digest"] for n, e in view.nodes.items() if "digest" in e} for view in (first, second)]
    both = [n for n in ends[0] if n in ends[1]]
    return {
        "same": [n for n in both if ends[0][n] == ends[1][n]],
        "differ": [n for n in both if ends[0][n] != ends[1][n]],
        "first": [n for n in ends[0] if n not in ends[1]],
        "second": [n for n in ends[1] if n not in ends[0]],
    }


def _metrics(first: RunView, second: RunView) -> dict[str, dict[str, list[float | None]]]:
    """Numbers of the nodes that both have and that differ, by node and metric: [first, second]."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for name in (name for name in first.nodes if name in second.nodes):
        old, new = (view.nodes[name].get("metrics") or {} for view in (first, second))
        pairs = {m: [number(old[m]), number(new[m])] for m in sorted(old.keys() & new.keys()) if not SPEED.search(m)}
        if changed := {metric: pair for metric, pair in pairs.items() if pair[0] != pair[1]}:
            found[name] = changed
    return found


def _evaluations(first: RunView, second: RunView) -> dict[str, dict[str, Any]]:
    """Scores of each policy that both have evaluated, their paired difference, and some problems side by side."""
    scores = [view.evaluations() for view in (first, second)]
    return {label: _evaluation(first, second, label) for label in scores[0] if label in scores[1]}


def _evaluation(first: RunView, second: RunView, label: str) -> dict[str, Any]:
    name = f"evaluate.{label}"
    found: dict[str, Any] = {
        "scores": [view.nodes[name]["metrics"]["score"] for view in (first, second)],
        "difference": None,
        "reason": "",
        "samples": [],
    }
    from rlhf.stages.tools.paired_evaluations import paired

    try:
        pair = paired(first.stored(name), second.stored(name))
        found |= {"prompts": list(pair.prompts), "shared": len(pair.places), "reason": pair.reason}
        if pair.difference is not None:
            found["difference"] = dataclasses.asdict(pair.difference) | {"verdict": pair.difference.verdict}
        found["samples"] = _samples(Policy(first, label), Policy(second, label), pair.places)
    except (ArtifactError, OSError, KeyError, ValueError) as e:
        found["reason"] = f"{type(e).__name__}: {e}"
    return found


def _samples(old: Policy, new: Policy, places: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Some problems that both have: those whose score changed most first, gains and losses in turn."""
    judged = [(a, b) for a, b in places if a in old.scores and b in new.scores]
    gains = sorted(judged, key=lambda pair: old.mean(pair[0]) - new.mean(pair[1]))
    chosen = list(dict.fromkeys(pair for both in zip(gains, reversed(gains), strict=True) for pair in both))[:SAMPLES]
    found = []
    for a, b in chosen:
        shown = min(old.scores[a].keys() & new.scores[b].keys(), default=None)
        if shown is not None:
            row = new.rows[b, shown]
            answers: list[Mapping[str, Any]] = [
                {"text": p.rows[place, shown]["text"], "score": p.scores[place].get(shown), "mean": p.mean(place)}
                for p, place in ((old, a), (new, b))
            ]
            found.append({"prompt": row["prompt"], "answer": row["answer"], "policies": answers})
    return found
