"""The kind of device that a worker computes on, which is part of keys, found without loading JAX.

Without a plugin for an accelerator JAX computes on the processor. With one, another process asks JAX once, and a file
keeps the answer while the devices, versions and variables that it depends on stay the same.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf.stages.contract.definition import StageConfig
from rlhf.stages.store.leases import host_scope
from rlhf.tuning.atomic import whole_file
from rlhf.tuning.names import cache_folder
from rlhf.tuning.processor import multiplies_bfloat16

C = TypeVar("C", bound=StageConfig)
CPU = "cpu:cpu"
VARIABLES = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_CHIPS")
"""Environment variables that choose a device."""
DEVICE_FILES = ("nvidia[0-9]*", "accel*", "kfd", "vfio/*")
ONE_CHIP = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_VISIBLE_CHIPS": "0"}
"""On a slice of several hosts, all of them have to ask at the same time, unless each asks for one chip."""
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""The layout of a number of chips of a host, which libtpu needs in a process that has only these."""
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_ASK = "import jax; d = jax.devices()[0]; print(f'{d.platform}:{d.device_kind}')"


@functools.cache
def device_kind() -> str:
    """Return platform and kind of this machine's first device, such as `gpu:NVIDIA H100 80GB HBM3` or `cpu:cpu`.

    Raises RuntimeError with the end of JAX's output if it finds no device.
    """
    plugins = _plugins()
    if not plugins or os.environ.get("JAX_PLATFORMS") == "cpu":
        return CPU
    place = _remembered(plugins)
    if place.is_file():
        return place.read_text()
    # Memory that it would reserve may be in use.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        environment |= ONE_CHIP
    done = subprocess.run([sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"JAX finds no device; `rlhf doctor` shows the versions:\n{done.stderr.strip()[-1000:]}")
    kind = done.stdout.strip().splitlines()[-1]
    with whole_file(place) as partial:
        partial.write_text(kind)
    return kind


def with_dtype(config: C, far: bool) -> C:
    """Return the settings with a dtype that means the same on every machine, because it is part of the key.

    far: whether workers on other hosts, whose processors are unknown here, make nodes of the run.
    """
    compute: Any = getattr(config, "compute", None)
    if compute is None or compute.dtype != "fast" or not far and device_kind() == CPU and multiplies_bfloat16():
        return config
    return config.model_copy(update={"compute": compute.model_copy(update={"dtype": "auto"})})


def confined(devices: Sequence[int], kind: str) -> dict[str, str]:
    """Return the variables that limit a process to these accelerators of its host; without any, to the processor.

    devices: their numbers, or indices into the list of a variable that already limits this process.
    kind: of the host's devices (`device_kind`). Raises ValueError, with the remedy, for devices that cannot exist.
    """
    if not devices:
        return {"JAX_PLATFORMS": "cpu"}
    platform = kind.partition(":")[0]
    if platform == "tpu":
        if len(devices) not in TPU_BOUNDS:
            raise ValueError(f"{len(devices)} chips of a TPU are not a part of a host: give it 1, 2, 4 or 8")
        bounds = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS[len(devices)]}
        return bounds | {"TPU_VISIBLE_CHIPS": ",".join(map(str, devices))}
    if platform != "gpu":
        raise ValueError(f"this machine computes on {kind} and has no numbered accelerators: leave devices out")
    # ROCm reads CUDA's variable too; its own one is narrowed where it is in use.
    names = [name for name in GPU_VARIABLES if name in os.environ] or ["CUDA_VISIBLE_DEVICES"]
    found = {}
    for name in names:
        seen = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
        if seen and max(devices) >= len(seen):
            raise ValueError(f"there is no device {max(devices)} among the {len(seen)} of {name}={os.environ[name]}")
        found[name] = ",".join(seen[number] if seen else str(number) for number in devices)
    return found


def forget() -> None:
    """Forget the answer, because a worker has found another device."""
    if plugins := _plugins():
        _remembered(plugins).unlink(missing_ok=True)


def _plugins() -> dict[str, str]:
    """Return the versions of JAX's plugins for accelerators, by name."""
    found = {e.name: e.dist.version if e.dist else "" for e in importlib.metadata.entry_points(group="jax_plugins")}
    for name in ("jax_plugins", "libtpu"):
        if importlib.util.find_spec(name) is not None:
            found.setdefault(name, "")
    return found


def _remembered(plugins: dict[str, str]) -> Path:
    """Return the file with the answer; its name hashes everything that the answer depends on."""
    devices = sorted(str(p) for pattern in DEVICE_FILES for p in Path("/dev").glob(pattern))
    facts = [host_scope(), sys.executable, importlib.metadata.version("jaxlib"), plugins, devices]
    facts.append({n: os.environ.get(n) for n in VARIABLES})
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder("RLHF_SCRATCH", "scratch") / "devices" / name
