"""What two hosts have to have in common so that one makes what the other has the key of, beside what a key holds.

A key holds the code that a stage reaches, its libraries and the kind of device. One host has for all the rest one
checkout, one Python and one environment; two hosts have them in common only where somebody looks.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("stages", "tuning")
SOURCES = (".py", ".c", ".h", ".j2")
PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "NVIDIA_TF32", "RLHF_REPLAY")
"""Environment variables that change what is computed."""
FREE = (
    "JAX_PLATFORMS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAX_LOGGING", "JAX_DEBUG_LOG", "JAX_TRACEBACK",
    "XLA_PYTHON_CLIENT",
)  # fmt: skip
"""Of these those that begin so: they choose devices, memory and places, which decide no bits."""
ABSENT = "not set"


def of_this_host(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """By name what has to be the same. Reads about 400 small files."""
    found = {name: value for name, value in environment.items() if name.startswith(PREFIXES)}
    found = {name: value for name, value in found.items() if not name.startswith(FREE)}
    python = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    return found | {"Python": python, "this project": _sources()}


def difference(there: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """What is another on this host than where the run is, as a sentence; None where nothing is."""
    for name in sorted(there.keys() | here.keys()):
        one, other = there.get(name, ABSENT), here.get(name, ABSENT)
        if one == other:
            continue
        if name == "this project":
            return "the sources of this project are others here than where the run is: give both the same commit"
        return f"{name} is {other} here and {one} where the run is: give both the same"
    return None


def _sources() -> str:
    """SHA-256 over the sources that workers may run: Python, C, and templates."""
    found = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((PROJECT / package).rglob("*")):
            if path.suffix in SOURCES and path.is_file():
                found.update(path.relative_to(PROJECT).as_posix().encode() + b"\0")
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
