"""Flags of XLA for each kind of device, set in the environment of a process before it loads JAX.

A process that gets a flag which its library does not know ends at once: the names here occur in jaxlib and libtpu of
the versions in `infra/`. The user's settings win. None of them changes results, so they are in no key; on
GPUs `xla_gpu_exclude_nondeterministic_ops` is for replays, which must have the bits of the first time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag, its value and its purpose."""

    variable: str
    """The environment variable that it stands in."""
    name: str
    value: str
    why: str


def _of(variable: str, *flags: tuple[str, str]) -> tuple[Flag, ...]:
    return tuple(Flag(variable, name, "true", why) for name, why in flags)


FLAGS: dict[str, tuple[Flag, ...]] = {
    "cpu": (),
    "gpu": _of(
        "XLA_FLAGS",
        ("xla_gpu_exclude_nondeterministic_ops", "sums in one order: a replay has the same bits"),
        ("xla_gpu_enable_latency_hiding_scheduler", "collectives overlap computation"),
    ),
    "tpu": _of(
        "LIBTPU_INIT_ARGS",
        ("xla_enable_async_all_gather", "weights of the next layer come while this one computes"),
        ("xla_tpu_enable_async_collective_fusion", "collectives overlap computation"),
        ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "also the gathering of weights"),
        ("xla_tpu_enable_async_collective_fusion_multiple_steps", "over several products"),
        ("xla_tpu_overlap_compute_collective_tc", "on the core that computes"),
        ("xla_tpu_enable_data_parallel_all_reduce_opt", "sums of gradients overlap the backward pass"),
        ("xla_tpu_data_parallel_opt_different_sized_ops", "of all sizes"),
    ),
}
"""The flags by platform."""
OF_GROUPS: dict[str, tuple[Flag, ...]] = {
    # XLA on CPU orders the collectives of a program by when they are handed out, and a loop counts as handed out while
    # its own have yet to come: where much runs beside each other, two processes meet in different ones, and wait.
    "cpu": (Flag("XLA_FLAGS", "xla_cpu_enable_concurrency_optimized_scheduler", "false", "collectives in one order"),),
}
"""Further flags for the processes of a group."""
GPU_MEMORY = "XLA_CLIENT_MEM_FRACTION", "0.9"
"""The variable with the share of a GPU's memory that JAX takes, and its value: JAX's default of 0.75 leaves 20 GB of an
H100 unused, where CUDA and its libraries need less than 3."""

SHARED_GPU = {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Variables of a worker that shares its GPUs with servers which sleep: JAX takes memory at need, and returns it.

Its default pool never shrinks. `platform` returns memory too, but waits for the device at each buffer."""


def with_flags(environment: Mapping[str, str], platform: str, group: bool = False) -> dict[str, str]:
    """The environment with the platform's flags appended; a flag that is already set keeps its value.

    group: whether the process is one of a process group.

    A variable that names a file of flags, as XLA allows, stays unchanged, because no flag can follow the name.
    """
    found = dict(environment)
    # JAX ends with an error if both this variable and its older name are set.
    if platform == "gpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in found:
        found.setdefault(*GPU_MEMORY)
    for flag in FLAGS.get(platform, ()) + (OF_GROUPS.get(platform, ()) if group else ()):
        before = found.get(flag.variable, "").strip()
        if before and not before.startswith("-"):
            continue
        if value_of(flag, found) is None:
            found[flag.variable] = f"{before} --{flag.name}={flag.value}".strip()
    return found


def value_of(flag: Flag, environment: Mapping[str, str]) -> str | None:
    """The value of a flag in an environment; None where it is not set."""
    found = re.findall(rf"--{flag.name}(?:=(\S*))?(?=\s|$)", environment.get(flag.variable, ""))
    # The last one counts; without a value it is true.
    return (found[-1] or "true") if found else None
