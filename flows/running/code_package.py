"""The code that travels to the nodes of a cluster: this project's stages and the user's own modules, as a zip file."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from rlhf.stages.worker.interpreter import PROJECT

PACKAGES = ("rlhf/stages", "rlhf/tuning")
LARGEST = 64 << 20
"""Bytes of source beyond which something other than code lies in the current folder."""


def write_package(path: Path, folder: Path) -> None:
    """Writes the package of this project and of the modules in `folder`; equal content gives equal bytes.

    Raises ValueError where the modules are too large.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as package:
        for name, file in sorted(_files(folder)):
            # Without the time and owner of the file.
            package.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    # Else Python would prefer a `rlhf` that is installed on the node.
    yield "rlhf/__init__.py", PROJECT / "rlhf" / "__init__.py"
    for name in PACKAGES:
        for file in (PROJECT / name).rglob("*"):
            if file.is_file() and not _is_left_out(file.relative_to(PROJECT)):
                yield file.relative_to(PROJECT).as_posix(), file
    total = 0
    for file in _user_files(folder):
        total += file.stat().st_size
        if total > LARGEST:
            raise ValueError(
                f"{folder} has more than {LARGEST >> 20} MiB of Python modules, which travel to the cluster's nodes: "
                "start the run in a folder with its modules only"
            )
        yield file.relative_to(folder).as_posix(), file


def _user_files(folder: Path) -> Iterator[Path]:
    """Yield the sources of modules that Python would import from the folder, not of names that other modules have."""
    for entry in sorted(folder.iterdir()):
        name = entry.stem if entry.suffix == ".py" else entry.name
        known = not name.isidentifier() or name == "rlhf" or name in sys.stdlib_module_names
        if known or (entry / "pyvenv.cfg").exists():
            continue
        files = [entry] if entry.suffix == ".py" else sorted(entry.rglob("*.py"))
        if files and _is_imported_from(folder, name):
            yield from (file for file in files if not _is_left_out(file.relative_to(folder)))


def _is_imported_from(folder: Path, name: str) -> bool:
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
    places = [*(spec.submodule_search_locations or []), spec.origin] if spec is not None else []
    return any(place and Path(place).absolute().is_relative_to(folder) for place in places)


def _is_left_out(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)
