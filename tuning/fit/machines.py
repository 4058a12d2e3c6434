"""Machines by name, such as `v5e-16` or `h100x8`, and the devices that XLA compiles for in place of theirs.

The compilers need no device: libtpu has the topologies of TPUs, JAX's plugin for CUDA takes the description of a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh

from rlhf.tuning import device
from rlhf.tuning.axes import Axes
from rlhf.tuning.compile_target import Platform, compiling_for
from rlhf.tuning.mesh import make_mesh
from rlhf.tuning.precision import resolved

GIB = 2**30
NODE = 8
"""GPUs of a node."""
USABLE = {"tpu": 0.98, "gpu": device.GPU_SHARE}
"""Share of the memory that programs get: a TPU reserves some, and a worker sets JAX's share of a GPU
(XLA_CLIENT_MEM_FRACTION)."""
ALONE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""With these libtpu compiles without a TPU: it asks no metadata server, and locks no chip."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of device, by its public figures."""

    name: str
    platform: Platform
    memory_bytes: int
    cores: int = 1
    """TensorCores of a chip, which the name of a slice counts: a `v5p-64` has 32 chips."""
    per_host: int = 4
    """Devices of a host of several."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("v5e", "tpu", 16 * GIB),
        Kind("v5p", "tpu", 95 * GIB, cores=2),
        Kind("v6e", "tpu", 32 * GIB),
        Kind("a100", "gpu", 80 * GIB, per_host=NODE),
        Kind("h100", "gpu", 80 * GIB, per_host=NODE),
        Kind("h200", "gpu", 141 * 10**9, per_host=NODE),
        Kind("b200", "gpu", 180 * 10**9, per_host=NODE),
    )
}
"""The kinds by name."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind."""

    name: str
    kind: Kind
    count: int
    here: bool = False
    """Whether they are those of this process."""

    @property
    def limit(self) -> int:
        """Bytes of a device that programs may use."""
        share = 1.0 if self.here else USABLE[self.kind.platform]
        return int(self.kind.memory_bytes * share)

    @property
    def per_host(self) -> int:
        """Devices of a host. Up to eight v5e or v6e chips may be those of one host."""
        single = self.kind.name in ("v5e", "v6e") and self.count <= NODE
        return self.count if self.here or single else min(self.count, self.kind.per_host)

    def choices(self, dtype: str, remat: str = "auto") -> device.Device:
        """The choices of `rlhf.tuning.device.choose` on such a device."""
        kind = self.kind
        with self.compiling():
            return device.choices(kind.platform, kind.name, self.count, self.limit, resolved(dtype), remat)

    @property
    def uncompiled(self) -> str:
        """The package to install to compile for these devices; empty if it is installed."""
        library, remedy = {
            "tpu": ("libtpu", "libtpu (infra/requirements-tpu.txt)"),
            "gpu": ("jax_cuda13_plugin", "jax-cuda13-plugin, jax-cuda13-pjrt (infra/requirements-gpu-aot.txt)"),
        }.get(self.kind.platform, ("jax", ""))
        return "" if self.here or importlib.util.find_spec(library) else remedy

    @functools.cached_property
    def devices(self) -> list[Any]:
        """The devices to compile for. If `uncompiled` names a package, one device stands for all in sums."""
        if self.here or self.uncompiled:
            return jax.devices() if self.here else jax.devices()[:1] * self.count
        if self.kind.platform == "tpu":
            os.environ.update(ALONE)
            # The least slice that libtpu knows is a host of four chips.
            sides = [2, 2] if self.kind.cores == 1 else [2, 2, 1]
            while math.prod(sides) < self.count:
                sides[sides.index(min(sides))] *= 2
            options = {"platform": "tpu", "topology_name": f"{self.kind.name}:{'x'.join(map(str, sides))}"}
        else:
            text = Path(__file__).with_name("h100.txtpb").read_text()
            shape = f"{-(-self.count // NODE)}x1x{min(self.count, NODE)}"
            options = {"platform": "cuda", "target_config": text, "topology": shape}
        return list(get_topology_desc(**options).devices)[: self.count]

    def compiling(self) -> AbstractContextManager[None]:
        """Within it this thread traces for the machine's platform."""
        return compiling_for(self.kind.platform)

    def mesh(self, axes: Axes, count: int = 0) -> Mesh | None:
        """The mesh of all devices, or the first `count`; None for a single device of this process, as the product has
        it. Raises ValueError if the product of the axes is another number."""
        count = count or self.count
        return None if self.here and count == 1 else make_mesh(axes, self.devices[:count])


def machine(name: str) -> Machine:
    """The machine of this name: KIND-N or KINDxN, or `cpu` for the devices of this process.

    Raises ValueError, which lists the kinds, for an unknown name.
    """
    if name == "cpu":
        first = jax.devices()[0]
        platform: Platform = first.platform  # type: ignore[assignment]
        return Machine(name, Kind(first.device_kind, platform, device.memory_bytes()), jax.device_count(), True)
    match = re.fullmatch(r"([a-z]+\d+[a-z]*)(?:([-x])(\d+))?", name)
    if match is None or match[1] not in KINDS:
        raise ValueError(
            f"--on {name}: say cpu, or a kind and a number, as v5e-16 or h100x8; kinds: {', '.join(KINDS)}"
        )
    kind = KINDS[match[1]]
    count, rest = divmod(int(match[3] or 1), kind.cores if match[2] == "-" else 1)
    if rest or count < 1 or (count & (count - 1) and (kind.platform == "tpu" or count % NODE)):
        raise ValueError(
            f"--on {name}: no such machine; {kind.name} has 1, 2, 4, 8, ... devices, of a GPU multiples of {NODE}; "
            f"the number after - counts TensorCores, {kind.cores} a device"
        )
    return Machine(name, kind, count)
