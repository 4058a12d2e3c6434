"""What a manifest says of how an artifact was made."""

from __future__ import annotations

import datetime
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from rlhf.stages.worker.protocol import Request

if TYPE_CHECKING:
    from rlhf.stages.contract.definition import StageConfig
    from rlhf.stages.store.artifacts import Artifact


def manifest_of(
    request: Request,
    config: StageConfig,
    inputs: dict[str, Artifact],
    metrics: dict[str, Any],
    started: float,
) -> dict[str, Any]:
    """The manifest without its files.

    started: seconds since 1970.
    """
    from rlhf.stages.contract.fingerprint import library_versions
    from rlhf.stages.store.keys import published

    return {
        "stage": request.stage,
        "key": request.key,
        "key_parts": request.key_parts,
        "config": published(config.model_dump(mode="json")),
        "inputs": {n: {"stage": a.stage, "key": a.key, "digest": a.digest} for n, a in inputs.items()},
        "seed": request.seed,
        "versions": library_versions(),
        "python": sys.version.split()[0],
        "device": _device(),
        "host": socket.gethostname(),
        "run": request.run,
        "metrics": metrics,
        "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(),
        "seconds": round(time.time() - started, 3),
    }


def _device() -> str:
    """The device of the manifest; `none` for stages that do not load JAX."""
    jax = sys.modules.get("jax")
    if jax is None:
        return "none"
    device = jax.devices()[0]
    return f"{device.platform}:{device.device_kind} x{jax.device_count()}"
