"""Checks that this process has the code, packages and device of a request's key (R26).

A module counts as it was imported, even if its file has changed (`rlhf.stages.worker.interpreter.record`). Reward
functions and readers of data run in children of this process, which may import a module later than it does: for those
the file must be the same at the end too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.stages.worker import devices, interpreter
from rlhf.stages.worker.protocol import Request

IN_CHILDREN = ("rlhf.tuning.agents.", "rlhf.tuning.data.", "rlhf.tuning.parallel.", "rlhf.tuning.rewards.")
"""Modules of this project that children of the worker import, too."""
USER_CODE = ("module:", "reached from ")
"""How names of sources in a key begin that are a user's code (`rlhf.stages.contract.sources`), after where they are
used."""

_asked: dict[str, str] = {}
"""Digests of modules by name in earlier requests, which children may have loaded."""


class CodeDiffers(RuntimeError):
    """The process has loaded other code than the key says; a fresh one loads it."""


class DataDiffers(RuntimeError):
    """A file changed while a stage read it: the same request may succeed."""


class SourceDiffers(CodeDiffers):
    """A user's code was edited while a stage ran, so that unfinished work may be of either version."""


def check_before(request: Request) -> None:
    """Raises CodeDiffers where a module that is loaded is older than the key, RuntimeError for another package."""
    _check_packages(request, "this worker has")
    _check_device(request)
    users = {n: v for n, v in request.key_parts.get("sources", {}).items() if any(kind in n for kind in USER_CODE)}
    for name, digest in (request.files | users).items():
        if _asked.setdefault(name, digest) != digest:
            raise CodeDiffers(f"{name} was edited after it was loaded")
    for name, digest in interpreter.recorded().items():
        if request.files.get(name, digest) != digest:
            raise CodeDiffers(f"module {name} was edited after it was loaded")
        if name not in request.files and _is_users(name) and _on_disk(name) not in (None, digest):
            raise CodeDiffers(f"module {name} was edited after it was loaded")


def check_after(request: Request, sources: Mapping[str, str]) -> None:
    """Raises CodeDiffers if code was edited while the stage ran, which may have loaded either version.

    sources: current digests of the files and functions that the stage read. Raises DataDiffers with the file if data
    changed, and RuntimeError if packages or the device are not those of the key.
    """
    loaded = interpreter.recorded()
    for name, digest in request.files.items():
        late = loaded.get(name, digest) != digest
        if late or (name.startswith(IN_CHILDREN) and _on_disk(name) not in (None, digest)):
            raise CodeDiffers(f"module {name} was edited while {request.stage} ran")
    before = request.key_parts.get("sources", sources)
    changed = [n for n in sorted(before.keys() | sources.keys()) if before.get(n) != sources.get(n)]
    for name in changed:
        if any(kind in name for kind in USER_CODE):
            raise SourceDiffers(f"{name.removeprefix('module:')} was edited while {request.stage} ran")
    if changed:
        file = _file_of(changed[0], request.config)
        where = "is other content here than where the run is, or " if request.elsewhere else ""
        raise DataDiffers(
            f"{file} {where}changed while {request.stage} ran, so nothing of it is kept; run again when nothing writes "
            "to it and it is the same on every host"
        )
    _check_packages(request, f"while {request.stage} ran it became")


def _file_of(name: str, config: Mapping[str, Any]) -> str:
    """The address of a file of data, which a key names by numbers (`rlhf.stages.prepare.stage.source_digests`)."""
    numbers = re.fullmatch(r"(source|decontaminate) (\d+): file (\d+)", name)
    if numbers is None:
        return name
    # Here and not above: most stages read no files.
    from rlhf.tuning.data.files import expand

    sources = [source["source"] for source in config["sources"]] or [config["source"]]
    of = sources if numbers[1] == "source" else config["decontaminate"]["sources"]
    source, number = of[int(numbers[2]) - 1], int(numbers[3])
    # A file that was added or removed has shifted the others.
    return next((file.url for file in expand(source)[number - 1 : number]), source)


def check_elsewhere(request: Request, sources: Mapping[str, str], there: str) -> None:
    """Raises RuntimeError, with the module, if this host has other code than the host that derived the key.

    sources: digests of the files and functions that the stage reads, on this host. there: the other host, for messages.
    """
    for name, digest in request.files.items():
        found = _on_disk(name)
        # Files next to a module have its name with a suffix, which no import finds.
        if found != digest and (found is not None or not name.endswith((".c", ".h", ".html.j2"))):
            raise RuntimeError(f"module {name} {_differs(found, there)}: give all hosts the same project")
    wanted = request.key_parts.get("sources", {})
    for name, digest in wanted.items():
        if any(kind in name for kind in USER_CODE) and sources.get(name) != digest:
            shown = name.removeprefix("module:")
            raise RuntimeError(f"{shown} {_differs(sources.get(name), there)}: give all hosts the same")


def _differs(found: str | None, there: str) -> str:
    return f"is not here as it is {there}" if found is None else f"is other code here than {there}"


def _check_packages(request: Request, how: str) -> None:
    for name, version in request.key_parts.get("versions", {}).items():
        # Not remembered: an upgrade in the middle of a run is what is looked for.
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "absent"
        if found != version:
            raise RuntimeError(
                f"package {name} was {version} when the run began, {how} {found}: start the run again; it "
                "recomputes the stages that depend on it"
            )


def _check_device(request: Request) -> None:
    wanted = request.key_parts.get("device", "")
    if not wanted:
        return
    import jax

    device = jax.local_devices()[0]
    found = f"{device.platform}:{device.device_kind}"
    if found != wanted:
        devices.forget()
        what = f"{request.stage} was to be computed on {wanted}, this worker has {found}"
        if request.elsewhere:
            raise RuntimeError(
                f"{what}: where the hosts of the role are right, set `device` of the role in the recipe's `workers` to "
                f'"{found}"'
            )
        raise RuntimeError(f"{what}: run again for {found}, or set JAX_PLATFORMS so that JAX finds the other")


def _is_users(name: str) -> bool:
    return name.split(".")[0] not in ("rlhf", "__main__", "__mp_main__")


def _on_disk(name: str) -> str | None:
    """SHA-256 of the source of a module as its file is now; None where there is none."""
    module: Any = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if spec is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
    origin = getattr(spec, "origin", None)
    if not origin or not Path(origin).is_file():
        return None
    return hashlib.sha256(Path(origin).read_bytes()).hexdigest()
