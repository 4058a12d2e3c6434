"""Properties of a host that change results although no key contains them.

A key contains the code of its stage, the versions of its libraries and the kind of device. All processes of one host
share the rest: Python, variables of JAX and XLA, the processor. Between hosts they are compared.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping

from stages.worker.devices import CPU
from tuning.processor import instructions

VARIABLES = (
    "JAX_THREEFRY_PARTITIONABLE", "JAX_DEFAULT_PRNG_IMPL", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_DTYPE_BITS", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_DISABLE_JIT", "RLHF_REPLAY_TOLERANCE",
)  # fmt: skip
"""Environment variables that change results on any device."""
OF_DEVICES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "processor", "C compiler")
"""Properties that hosts with different kinds of device do not share."""
ABSENT = "not set"


def properties(kind: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The properties of this host by name. kind: of device that it computes on, PLATFORM:KIND."""
    found = {name: environment[name] for name in (*VARIABLES, *OF_DEVICES) if name in environment}
    found["Python"] = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    if kind == CPU:
        # Own kernels are compiled for the processor where there is a compiler; XLA does their work elsewhere.
        found["processor"] = f"{platform.machine()} {instructions()}".strip()
        found["C compiler"] = "present" if shutil.which(environment.get("CC") or "cc") else "missing"
    return found


def difference(here: Mapping[str, str], there: Mapping[str, str], same_kind: bool) -> str | None:
    """A sentence that names the first property that differs between the run's host (`here`) and a node (`there`).

    same_kind: whether both have the same kind of device. None where all that matters is equal.
    """
    for name in sorted((here.keys() | there.keys()) - set(() if same_kind else OF_DEVICES)):
        one, other = here.get(name, ABSENT), there.get(name, ABSENT)
        if one != other:
            return f"{name} is {other} there and {one} on the run's host: make them equal"
    return None
