"""Artifacts that a run takes from another regardless of their keys: rollouts, and the part before a fork."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rlhf.flows.graph.build import Node
from rlhf.flows.graph.changes import setting
from rlhf.stages.contract.registry import stage as find_stage
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import Artifact, ArtifactError, Store
from rlhf.stages.store.keys import SHOWN, config_content, differences

MOST = 3
"""Differences that a message lists."""
FOLLOWS = frozenset({"number", "order_seed", "quantize", "start", "truncated"})
"""Settings of sampling that a recipe gives elsewhere (seed, rl.update, rl.refills): rollouts that are taken are what
they are, whatever these say."""


Records = dict[str, Mapping[str, Any]]
"""Entries of the nodes of runs, by run, that were read before."""


def taken_artifact(store: Store, node: Node, known: Records | None = None) -> Artifact | None:
    """The artifact that the node takes from another run; None where it is to be found or made by its key.

    What a fork shares and its run no longer has is made again by its own settings. Raises ArtifactError for rollouts
    that the run or store has not, for a champion that is gone, and for settings that differ from those that the
    artifact was made with: another temperature of rollouts, which ratios are computed at, is not theirs.

    known: for several nodes, so that the record of a run is read once.
    """
    if node.held is not None:
        held = store.with_digest(*node.held)
        if held is None:
            raise ArtifactError(f"{node.name}: {node.held[0]}/{node.held[1][:12]} is gone from {store.shown}")
        return held
    run = node.taken or node.shared
    if run is None:
        return None
    entry = _entry(store, run, node.name, {} if known is None else known)
    # What that run had, also where it was made again since.
    artifact = store.with_digest(entry["stage"], entry["key"], entry["digest"]) if "digest" in entry else None
    if node.taken is not None and artifact is None:
        raise ArtifactError(f"rl.rollouts_from: run {run} has no finished {node.name} in {store.shown}")
    if artifact is not None and node.taken is not None:
        _check_sampling(node, artifact)
    elif artifact is not None:
        _check_settings(node, artifact)
    return artifact


def _entry(store: Store, run: str, node: str, known: Records) -> Mapping[str, Any]:
    """The entry of a node in the record of a run; empty where it has none."""
    if run not in known:
        known[run] = (runs.read(store, run) or {"nodes": {}})["nodes"]
    found: Mapping[str, Any] = known[run].get(node, {})
    return found


def check_point(node: Node, artifact: Artifact) -> None:
    """Raises ArtifactError where a fork would go on from another artifact than the one that its recipe names."""
    if node.digest not in (None, artifact.digest):
        wanted = str(node.digest)[:12]
        raise ArtifactError(
            f"fork.digest: {node.name} is {artifact.digest[:12]} here, and the fork goes on from {wanted} of run "
            f"{node.shared}, which is not in this store: use the store that has it, or fork again"
        )


def _check_sampling(node: Node, artifact: Artifact) -> None:
    """Raises ArtifactError where a recipe asks for other rollouts than those that it takes."""
    old, new = _of_sampling(_settings_of(node, artifact)), _of_sampling(config_content(node.config))
    if changed := differences(old, new):
        raise ArtifactError(
            f"{_listed([setting(node.stage, line) for line in changed])}: the rollouts are those of run "
            f"{node.taken}, sampled as they are; leave the setting as it was, or sample anew (`rlhf run`)"
        )


def _of_sampling(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in FOLLOWS}


def _listed(lines: list[str]) -> str:
    more = f" and {len(lines) - MOST} more" if len(lines) > MOST else ""
    return f"{'; '.join(lines[:MOST])}{more}"


def _check_settings(node: Node, artifact: Artifact) -> None:
    """Raises ArtifactError where a stage before a fork would be made with other settings than it was."""
    changed = differences(_settings_of(node, artifact), config_content(node.config))
    lines = [setting(node.stage, line) for line in changed]
    if artifact.manifest["seed"] != node.seed:
        lines.append("seed: another")
    if lines:
        raise ArtifactError(
            f"{_listed(lines)}: {node.name} is before the fork of run {node.shared} and is shared as it "
            "is; leave it, fork at an earlier stage, or run the recipe from its beginning (`rlhf run`)"
        )


def _settings_of(node: Node, artifact: Artifact) -> dict[str, Any]:
    """The settings that an artifact was made with, those included that its version did not have, by their defaults."""
    config = find_stage(node.stage).config
    try:
        return config_content(config.model_validate_json(json.dumps(artifact.manifest["config"]), context=SHOWN))
    except ValidationError:
        found: dict[str, Any] = artifact.manifest["key_parts"]["config"]
        return found
