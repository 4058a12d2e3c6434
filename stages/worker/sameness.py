"""What two hosts have to have in common so that one makes what the other has the key of, beside what a key holds.

A key holds the code that a stage reaches, its libraries and the kind of device. One host has for all the rest one
checkout, one Python and one environment; two hosts have them in common only where somebody looks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("stages", "tuning")
SOURCES = (".py", ".c", ".h", ".j2")
VARIABLES = (
    "JAX_THREEFRY_PARTITIONABLE", "JAX_DEFAULT_PRNG_IMPL", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_DTYPE_BITS", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_DISABLE_JIT", "RLHF_REPLAY_TOLERANCE",
)  # fmt: skip
"""Environment variables that change what is computed on any device."""
OF_DEVICES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
"""Those that may on one kind: hosts of another kind than the run's have their own."""
ABSENT = "not set"


def of_this_host(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """By name what has to be the same: variables, Python, and the sources of this project, which are about 400."""
    found = {name: environment[name] for name in (*VARIABLES, *OF_DEVICES) if name in environment}
    python = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    return found | {"Python": python} | _sources()


def difference(there: Mapping[str, str], here: Mapping[str, str], computes: bool, other_kind: bool) -> str | None:
    """What is another on this host than where the run is, as a sentence; None where nothing is.

    computes: whether the stage computes on a device: else no variable counts. other_kind: whether that is of another
    kind than those of the run's host.
    """
    free = () if computes and not other_kind else OF_DEVICES if computes else (*VARIABLES, *OF_DEVICES)
    for name in sorted((there.keys() | here.keys()) - set(free)):
        one, other = there.get(name, ABSENT), here.get(name, ABSENT)
        if one == other:
            continue
        if name.endswith(SOURCES):
            return f"{name} is another here than where the run is: give both the same commit of this project"
        return f"{name} is {other} here and {one} where the run is: give both the same"
    return None


def _sources() -> dict[str, str]:
    """Digests of the sources that workers may run: Python, C, and templates."""
    found = {}
    for package in PACKAGES:
        for path in sorted((PROJECT / package).rglob("*")):
            name = path.relative_to(PROJECT).as_posix()
            # Editors and notebooks leave copies in hidden folders.
            if path.suffix in SOURCES and not any(part.startswith(".") for part in name.split("/")):
                with contextlib.suppress(FileNotFoundError):
                    found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return found
