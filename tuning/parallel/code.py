"""The code that a host has loaded, which has to be that of its pool: a node may have other files or packages."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def loaded_code(target: str) -> dict[str, str]:
    """Return the SHA-256 of the source of each loaded module, and the version of each installed package, by name.

    target: `module:Class`; its module counts although it may not be loaded.
    """
    found = {}
    for name in {*sys.modules, target.partition(":")[0]} - {"__main__"}:
        if (code := _code_of(name)) is not None:
            found[name] = code
    return found


def difference(there: Mapping[str, str]) -> str | None:
    """Return a sentence on the first module or package that differs from that of this process; None if all agree."""
    for name, code in sorted(there.items()):
        if (own := _code_of(name)) != code:
            what = "is missing here" if own is None else f"is {own[:12]} here and {code[:12]} there"
            return f"{name} {what}: give the hosts the same code and packages"
    return None


def _code_of(name: str) -> str | None:
    module = sys.modules.get(name)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    except (AttributeError, ImportError, ValueError):
        return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    if spec.origin.startswith(_INSTALLED):
        return None if "." in name else _version(name)
    try:
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except OSError:
        return None


@functools.cache
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
