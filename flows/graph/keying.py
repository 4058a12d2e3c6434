"""Keys of the nodes of a graph: a hash of everything that determines what a node makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.flows.graph.build import Node
from rlhf.stages.contract.fingerprint import Code, library_versions, reached
from rlhf.stages.contract.registry import stage as find_stage
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.store.keys import config_content, digest
from rlhf.stages.worker.client import StageFailed
from rlhf.stages.worker.devices import device_kind
from rlhf.stages.worker.host_compat import variables

Codes = dict[tuple[str, ...], Code]
"""The code that stages reach, by their modules."""


def code_of(node: Node) -> Code:
    """Return the code that the node's stage reaches with these settings, from the files as they are now."""
    stage = find_stage(node.stage)
    return reached(stage.module, *stage.loads(node.config))


def key_parts(node: Node, made: Mapping[str, Artifact], codes: Codes | None = None) -> dict[str, Any]:
    """Return everything that the node's key is derived from.

    made: the artifacts of its inputs. codes: a cache for several nodes whose code is read at one moment.
    """
    stage = find_stage(node.stage)
    modules = (stage.module, *stage.loads(node.config))
    codes = {} if codes is None else codes
    if modules not in codes:
        codes[modules] = code_of(node)
    code = codes[modules]
    computes = stage.computes(node.config)
    # Absent if empty, so that keys of hosts without such variables do not change.
    environment = {"environment": found} if computes and (found := variables()) else {}
    return environment | {
        "stage": node.stage,
        "version": stage.version,
        "code": code.modules,
        "imports": code.imports,
        "config": config_content(node.config),
        "inputs": {name: made[i.node].part_digest(i.parts) for name, i in node.inputs.items()},
        "seed": node.seed,
        "sources": stage.sources(node.config),
        "versions": library_versions(stage.libraries),
        # Empty: the same bits on every kind of device.
        "device": (node.device or device_kind()) if computes else "",
    }


def key_of(parts: dict[str, Any]) -> str:
    """Return the key of a node. Code counts by content: names of modules only serve the messages of `plan`."""
    return digest(parts | {"code": sorted(set(parts["code"].values()))})


def key_now(node: Node, inputs: Mapping[str, Artifact]) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return a node's key, its parts, and the digests of its files of code, all read at one moment.

    Raises StageFailed if a file was edited during the run and cannot be read any more.
    """
    codes: Codes = {}
    try:
        parts = key_parts(node, inputs, codes)
    except (ValueError, SyntaxError, FileNotFoundError) as e:
        raise StageFailed(f"{node.name}: {e}") from e
    (code,) = codes.values()
    return key_of(parts), parts, code.files
