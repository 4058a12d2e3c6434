"""Kinds of devices by their public figures, and machines of several of them by name, such as `v5e-16` or `h100x8`.

Sources: docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e; NVIDIA's data sheets of A100 80GB, H100, H200 and B200
in SXM boards (bfloat16 without sparsity). Interconnect is what one device sends to its neighbours in a second: of a TPU
half of the two-way figure, of a GPU half of NVLink's, and past one host the network card's.
"""

from __future__ import annotations

import dataclasses
import re

import jax

from tuning import device
from tuning.precision import resolved
from tuning.target import Platform, compiling_for

TB, GB, GIB = 1e12, 1e9, 2**30


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of device."""

    name: str
    platform: Platform
    memory_bytes: int
    usable: float
    """Share of the memory that programs get: a TPU keeps some of it, and JAX takes 0.75 of a GPU's unless it is told
    otherwise (XLA_PYTHON_CLIENT_MEM_FRACTION)."""
    flops: float
    """FLOP/s of products in bfloat16."""
    memory_rate: float
    """Bytes/s to and from its memory."""
    link_rate: float
    """Bytes/s to its neighbours; 0 where there are none."""
    node: int = 0
    """Devices that such links connect; 0: all."""
    far_rate: float = 0.0
    """Bytes/s past those."""
    cores: int = 1
    """What the name counts of a device: a `v5p-64` is 64 TensorCores of 32 chips."""
    most: int = 0
    """Devices of the largest slice; 0: no limit."""

    def lacks(self, count: int) -> str:
        """Which counts there are, where so many devices of this kind are no machine; else empty."""
        if self.most and count > self.most:
            return f"its largest slice has {self.most * self.cores}"
        if self.platform == "gpu" and count > self.node and count % self.node:
            return f"past one node of {self.node} it is a multiple of {self.node}"
        # Slices in two dimensions are powers of two; those in three, from one host's four chips on, multiples of four.
        if self.platform == "tpu" and count & (count - 1) and (self.cores == 1 or count % 4):
            return "slices are powers of two" if self.cores == 1 else f"slices are multiples of {4 * self.cores}"
        return ""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("v4", "tpu", 32 * GIB, 0.98, 275 * TB, 1228 * GB, 150 * GB, cores=2, most=4096),
        Kind("v5e", "tpu", 16 * GIB, 0.98, 197 * TB, 819 * GB, 200 * GB, most=256),
        Kind("v5p", "tpu", 95 * GIB, 0.98, 459 * TB, 2765 * GB, 600 * GB, cores=2, most=8960),
        Kind("v6e", "tpu", 32 * GIB, 0.98, 918 * TB, 1600 * GB, 400 * GB, most=256),
        Kind("a100", "gpu", 80 * GIB, 0.75, 312 * TB, 2039 * GB, 300 * GB, 8, 25 * GB),
        Kind("h100", "gpu", 80 * GIB, 0.75, 989 * TB, 3350 * GB, 450 * GB, 8, 50 * GB),
        Kind("h200", "gpu", 141 * 10**9, 0.75, 989 * TB, 4800 * GB, 450 * GB, 8, 50 * GB),
        Kind("b200", "gpu", 180 * 10**9, 0.75, 2250 * TB, 7700 * GB, 900 * GB, 8, 50 * GB),
    )
}
"""The kinds by name."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind."""

    name: str
    kind: Kind
    count: int

    @property
    def limit(self) -> int:
        """Bytes of a device that programs may use."""
        return int(self.kind.memory_bytes * self.kind.usable)

    @property
    def link_rate(self) -> float:
        """Bytes/s that a device sends when all of them exchange."""
        far = self.kind.node and self.count > self.kind.node
        return self.kind.far_rate if far else self.kind.link_rate

    def choices(self, dtype: str, remat: str = "auto") -> device.Device:
        """What the product chooses on such a device, as `tuning.device.choose` does on one that is here."""
        kind = self.kind
        with compiling_for(kind.platform):
            return device.choices(kind.platform, kind.name, self.count, self.limit, self.resolved(dtype), remat)

    def resolved(self, dtype: str) -> str:
        """What a compute dtype stands for there."""
        with compiling_for(self.kind.platform):
            return resolved(dtype)


def machine(name: str) -> Machine:
    """The machine of this name: KIND-N or KINDxN, or `cpu` for the devices of this process.

    Raises ValueError, which lists the kinds, for a name that is none.
    """
    if name == "cpu":
        return _here(name)
    match = re.fullmatch(r"([a-z]+\d+[a-z]*)(?:([-x])(\d+))?", name)
    if match is None or match[1] not in KINDS:
        raise ValueError(
            f"--on {name}: say cpu, or a kind and a number, as v5e-16 or h100x8; kinds: {', '.join(KINDS)}"
        )
    kind, number = KINDS[match[1]], int(match[3] or 1)
    cores = kind.cores if match[2] == "-" else 1
    if number < 1:
        raise ValueError(f"--on {name}: there is no such machine: it has no device; the least is {cores}")
    if number % cores:
        raise ValueError(f"--on {name}: the number counts TensorCores, {cores} a chip; it is a multiple of {cores}")
    if lacks := kind.lacks(number // cores):
        raise ValueError(f"--on {name}: there is no such machine: {lacks}")
    return Machine(name, kind, number // cores)


def _here(name: str) -> Machine:
    """The devices of this process, with rates measured now."""
    import jax.numpy as jnp

    from tuning.training.speed import measured_peak, rate

    first, count = jax.devices()[0], jax.device_count()
    for kind in KINDS.values():
        if first.platform == kind.platform and kind.name in first.device_kind.lower().replace(" ", "").replace(
            "lite", "e"
        ):
            return Machine(name, dataclasses.replace(kind, memory_bytes=device.memory_bytes(), usable=1.0), count)
    x = jnp.ones(2**24, jnp.float32)
    bytes_a_second = rate(lambda x: x + 1, x, work=2.0 * x.nbytes)[-1]
    platform: Platform = first.platform  # type: ignore[assignment]
    flops = measured_peak(device.choose().compute.dtype) / count
    # Devices that share one processor share its memory and its rates.
    return Machine(
        name,
        Kind(first.device_kind, platform, device.memory_bytes(), 1.0, flops, bytes_a_second / count, bytes_a_second),
        count,
    )
