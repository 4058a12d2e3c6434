"""Starts Python processes of this project, and records the code that they import.

`python -m` puts the current folder first, where a file `random.py` or a folder `rlhf` would be imported in place of the
intended module. Processes start without it (`-P`) and take over the path of the process that starts them, so that one
hashes the code that the other runs. Nothing of the project is imported here: the record begins before it.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import io
import json
import os
import signal
import sys
import sysconfig
from importlib.abc import PathEntryFinder
from pathlib import Path
from types import CodeType

PROJECT = Path(__file__).parents[3]
"""The folder with the package `rlhf`: `src` of a checkout, or one of installed packages."""

_START = (
    "import importlib, json, sys;"
    "sys.path[:] = json.loads(sys.argv.pop(1));"
    "importlib.import_module('rlhf.stages.worker.interpreter').record();"
    "sys.exit(importlib.import_module(sys.argv.pop(1)).main())"
)

_digests: dict[str, str] = {}


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that calls `main` of a module in another process with the path of this one."""
    # An empty entry is the current folder of the process that reads it.
    path = [entry or os.getcwd() for entry in sys.path]
    return [sys.executable, "-P", "-c", _START, json.dumps(path), module, *arguments]


def end_of(code: int) -> str:
    """Return how a process has ended, by its exit status from `subprocess`."""
    if code >= 0:
        return f"exited with status {code}"
    # Most signals of real time have no name.
    names = {int(one): one.name for one in signal.Signals}
    return f"was ended by signal {names.get(-code, -code)}"


def add_current_folder() -> None:
    """Make a user's modules in the current folder importable, after everything else.

    The project comes before it: a user's folder called `rlhf` would win against it in processes that this one starts.
    """
    for folder in (str(PROJECT), os.getcwd()):
        if folder not in sys.path:
            sys.path.append(folder)


def escape_output() -> None:
    """Lets stdout and stderr escape characters that their encoding lacks, where they would raise an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Recorder(importlib.machinery.SourceFileLoader):
    """Loads a module and keeps the digest of its source."""

    def get_code(self, fullname: str) -> CodeType | None:
        _digests[fullname] = hashlib.sha256(self.get_data(self.path)).hexdigest()
        return super().get_code(fullname)


def record() -> None:
    """From now on keeps digests of the sources of imported modules, but for installed packages of others."""
    from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES

    plain = importlib.machinery.FileFinder.path_hook(
        (importlib.machinery.ExtensionFileLoader, EXTENSION_SUFFIXES),
        (_Recorder, SOURCE_SUFFIXES),
        (importlib.machinery.SourcelessFileLoader, BYTECODE_SUFFIXES),
    )
    installed = [Path(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib", "purelib", "platlib")]
    own = PROJECT / "rlhf"

    def hook(path: str) -> PathEntryFinder:
        place = Path(path)
        theirs = any(place.is_relative_to(f) for f in installed) and not place.is_relative_to(own)
        if theirs:
            raise ImportError(f"{path} is left to the usual loader")
        return plain(path)

    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()


def recorded() -> dict[str, str]:
    """SHA-256 of the source of each module that was imported since `record`, as it was imported, by name."""
    return dict(_digests)
