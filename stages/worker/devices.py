"""The kind of device that a worker computes on, told without loading JAX: it is in the keys of what is computed.

Where JAX has no plugin for an accelerator it computes on the processor. Elsewhere JAX is asked once, in a process of
its own, and the answer is kept in a file for as long as nothing changes that it may follow from.
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rlhf.stages.store.leases import host_scope
from rlhf.tuning.atomic import whole_file
from rlhf.tuning.names import cache_folder

CPU = "cpu:cpu"
VARIABLES = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_CHIPS")
"""Environment variables that choose a device."""
DEVICE_FILES = ("nvidia[0-9]*", "accel*", "kfd", "vfio/*")
ONE_CHIP = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_VISIBLE_CHIPS": "0"}
"""Of a slice of several hosts all have to ask at once, unless each asks for a chip alone."""
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""How so many chips of a host lie, which libtpu is told of a process that has not all of them."""
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_ASK = "import jax; d = jax.devices()[0]; print(f'{d.platform}:{d.device_kind}')"


@functools.cache
def device_kind() -> str:
    """Platform and kind of this machine's first device, as `gpu:NVIDIA H100 80GB HBM3` or `cpu:cpu`.

    Raises RuntimeError, with the end of its output, where JAX cannot say.
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


def confined(devices: Sequence[int], kind: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables by which a process has these accelerators of its host alone; with none of them the processor.

    devices: their numbers; where a variable leaves this process some of them already, places among those.
    kind: of the host's devices (`device_kind`). Raises ValueError, with what to do, for devices that there cannot be.
    """
    if not devices:
        return {"JAX_PLATFORMS": "cpu"}
    platform = kind.partition(":")[0]
    if platform == "tpu":
        if len(devices) not in TPU_BOUNDS:
            raise ValueError(f"{len(devices)} chips of a TPU are no part of a host: give it {_any_of(TPU_BOUNDS)}")
        bounds = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS[len(devices)]}
        return bounds | {"TPU_VISIBLE_CHIPS": ",".join(map(str, devices))}
    if platform != "gpu":
        raise ValueError(f"this machine computes on {kind} and has no numbered accelerators: leave devices out")
    # ROCm reads CUDA's variable too; its own one is narrowed where it is in use.
    names = [name for name in GPU_VARIABLES if name in environment] or ["CUDA_VISIBLE_DEVICES"]
    found = {}
    for name in names:
        seen = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        if seen and max(devices) >= len(seen):
            raise ValueError(f"there is no device {max(devices)} among the {len(seen)} of {name}={environment[name]}")
        found[name] = ",".join(seen[number] if seen else str(number) for number in devices)
    return found


def _any_of(numbers: Iterable[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}"


def forget() -> None:
    """Has JAX asked again next time: a worker has found another device."""
    if plugins := _plugins():
        _remembered(plugins).unlink(missing_ok=True)


def _plugins() -> dict[str, str]:
    """Versions of what JAX may load for an accelerator, by name."""
    found = {e.name: e.dist.version if e.dist else "" for e in importlib.metadata.entry_points(group="jax_plugins")}
    for name in ("jax_plugins", "libtpu"):
        if importlib.util.find_spec(name) is not None:
            found.setdefault(name, "")
    return found


def _remembered(plugins: dict[str, str]) -> Path:
    """The file with the answer; its name holds all that the answer may follow from."""
    devices = sorted(str(p) for pattern in DEVICE_FILES for p in Path("/dev").glob(pattern))
    facts = [host_scope(), sys.executable, importlib.metadata.version("jaxlib"), plugins, devices]
    facts.append({n: os.environ.get(n) for n in VARIABLES})
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder("RLHF_SCRATCH", "scratch") / "devices" / name
