"""Properties of a host that change results.

A key contains the code of its stage, the versions of its libraries, the kind of device and the variables of JAX and XLA
that are set. All processes of one host share the rest: Python, the processor. Between hosts all of them are compared.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from rlhf.stages.worker.devices import CPU
from rlhf.tuning.processor import instructions

VARIABLES = (
    "JAX_THREEFRY_PARTITIONABLE", "JAX_DEFAULT_PRNG_IMPL", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_DTYPE_BITS", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_DISABLE_JIT",
)  # fmt: skip
"""Environment variables that change results on any device."""
FLAGS = "XLA_FLAGS"
OF_DEVICES = (FLAGS, "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "processor", "C compiler")
"""Properties that hosts with different kinds of device do not share."""
WITHOUT_EFFECT = ("--xla_force_host_platform_device_count", "--xla_dump_", "--xla_cpu_collective_")
"""How flags of XLA begin that change no result: numbers of devices, files that are written, time limits."""
ABSENT = "not set"


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that are set and change what a stage computes, for its key."""
    found = {n: environment[n] for n in (*VARIABLES, *OF_DEVICES) if n in environment}
    if FLAGS in found:
        # XLA takes the name of a file of flags, too.
        named = Path(found[FLAGS])
        text = named.read_text() if not found[FLAGS].startswith("-") and named.is_file() else found[FLAGS]
        found[FLAGS] = " ".join(flag for flag in text.split() if not flag.startswith(WITHOUT_EFFECT))
    return {name: value for name, value in found.items() if value}


def properties(kind: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the properties of this host by name. kind: of device that it computes on, PLATFORM:KIND."""
    found = variables(environment)
    found["Python"] = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    if kind == CPU:
        # With a compiler, the project's kernels are compiled for the processor; without one XLA does their work.
        found["processor"] = f"{platform.machine()} {instructions()}".strip()
        found["C compiler"] = "present" if shutil.which(environment.get("CC") or "cc") else "missing"
    return found


def difference(here: Mapping[str, str], there: Mapping[str, str], same_kind: bool) -> str | None:
    """Return a sentence about the first property that differs between the run's host (`here`) and a node (`there`).

    same_kind: whether both have the same kind of device. None if all of them are equal.
    """
    for name in sorted((here.keys() | there.keys()) - set(() if same_kind else OF_DEVICES)):
        one, other = here.get(name, ABSENT), there.get(name, ABSENT)
        if one != other:
            return f"{name} is {other} there and {one} on the run's host: make them equal"
    return None
