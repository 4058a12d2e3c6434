"""Artifacts of other runs that a run reuses regardless of their keys: rollouts, and stages before a fork."""

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
"""Maximum number of differences in a message."""
FOLLOWS = frozenset({"number", "order_seed", "quantize", "start", "truncated"})
"""Settings of sampling that follow from others (seed, rl.update, rl.refills): reused rollouts may differ in them."""


Records = dict[str, Mapping[str, Any]]
"""A cache of the entries of the nodes of runs, by run."""


def taken_artifact(store: Store, node: Node, known: Records | None = None) -> Artifact | None:
    """Return the artifact that the node reuses from another run; None if it has its own key.

    A stage before a fork that the other run no longer has is recomputed. Raises ArtifactError for rollouts or a
    champion that are gone, and for settings that differ from those of the artifact, such as the temperature.

    known: a cache for several nodes.
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
    # By digest: the key may have been recomputed since.
    artifact = store.with_digest(entry["stage"], entry["key"], entry["digest"]) if "digest" in entry else None
    if node.taken is not None and artifact is None:
        raise ArtifactError(f"rl.rollouts_from: run {run} has no finished {node.name} in {store.shown}")
    if artifact is not None:
        _check_settings(node, artifact)
    return artifact


def _entry(store: Store, run: str, node: str, known: Records) -> Mapping[str, Any]:
    """Return the entry of a node in the record of a run, or an empty one."""
    if run not in known:
        known[run] = (runs.read(store, run) or {"nodes": {}})["nodes"]
    found: Mapping[str, Any] = known[run].get(node, {})
    return found


def check_point(node: Node, artifact: Artifact) -> None:
    """Raises ArtifactError if a fork would continue from another artifact than its recipe names."""
    if node.digest not in (None, artifact.digest):
        wanted = str(node.digest)[:12]
        raise ArtifactError(
            f"fork.digest: {node.name} is {artifact.digest[:12]} here, and the fork continues from {wanted} of run "
            f"{node.shared}, which is not in this store: use the store that has it, or fork again"
        )


def _check_settings(node: Node, artifact: Artifact) -> None:
    """Raises ArtifactError if the recipe asks for other settings than those of the artifact that it reuses."""
    old, new = _settings_of(node, artifact), config_content(node.config)
    if node.taken is not None:
        old, new = ({name: value for name, value in s.items() if name not in FOLLOWS} for s in (old, new))
    lines = [setting(node.stage, line) for line in differences(old, new)]
    draws = find_stage(node.stage).draws(node.config)
    if node.taken is None and draws and artifact.manifest["seed"] != node.seed:
        lines.append("seed: another")
    if not lines:
        return
    more = f" and {len(lines) - MOST} more" if len(lines) > MOST else ""
    said = f"{'; '.join(lines[:MOST])}{more}"
    if node.taken is not None:
        raise ArtifactError(
            f"{said}: the rollouts are those of run {node.taken}, sampled as they are; leave the setting as it was, or "
            "sample again (`rlhf run`)"
        )
    raise ArtifactError(
        f"{said}: {node.name} is before the fork of run {node.shared} and is shared as it is; leave the setting, fork "
        "at an earlier stage, or run the recipe from its beginning (`rlhf run`)"
    )


def _settings_of(node: Node, artifact: Artifact) -> dict[str, Any]:
    """Return the settings of an artifact, with defaults for settings that are newer than it."""
    config = find_stage(node.stage).config
    try:
        return config_content(config.model_validate_json(json.dumps(artifact.manifest["config"]), context=SHOWN))
    except ValidationError:
        found: dict[str, Any] = artifact.manifest["key_parts"]["config"]
        return found
