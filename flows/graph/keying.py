"""Keys of the nodes of a graph: everything that decides what a node makes, as one hash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.flows.graph.build import Node
from rlhf.stages.contract.fingerprint import Code, library_versions, reached
from rlhf.stages.contract.registry import stage as find_stage
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.store.keys import config_content, digest
from rlhf.stages.worker.devices import device_kind
from rlhf.stages.worker.host_compat import variables

Codes = dict[tuple[str, ...], Code]
"""The code that stages reach, by their modules."""


def code_of(node: Node) -> Code:
    """The code that the node's stage reaches with these settings, as its files are now."""
    stage = find_stage(node.stage)
    return reached(stage.module, *stage.loads(node.config))


def key_parts(
    node: Node, made: Mapping[str, Artifact], codes: Codes | None = None, *, partial: bool = False
) -> dict[str, Any]:
    """Everything that the node's key is derived from; `made` holds the artifacts of its inputs.

    codes: what several nodes reach, each looked up once: of one moment, as a plan is. partial: without the inputs that
    `made` lacks; no key follows from these parts.
    """
    stage = find_stage(node.stage)
    modules = (stage.module, *stage.loads(node.config))
    code = (codes or {}).get(modules) or code_of(node)
    if codes is not None:
        codes[modules] = code
    computes = stage.computes(node.config)
    # Absent without any: no key of other hosts changes.
    environment = {"environment": found} if computes and (found := variables()) else {}
    return environment | {
        "stage": node.stage,
        "version": stage.version,
        "code": code.modules,
        "imports": code.imports,
        "config": config_content(node.config),
        "inputs": {
            name: made[i.node].part_digest(i.parts) for name, i in node.inputs.items() if not partial or i.node in made
        },
        "seed": node.seed,
        "sources": stage.sources(node.config),
        "versions": library_versions(stage.libraries),
        # Empty: the same bits on every kind of device.
        "device": (node.device or device_kind()) if computes else "",
    }


def key_of(parts: dict[str, Any]) -> str:
    """The key of a node. Code counts by its content: the names of modules serve the messages of `plan` alone."""
    return digest(parts | {"code": sorted(set(parts["code"].values()))})
