"""Which code a recipe may name, on a machine that takes recipes from others: RLHF_ALLOW_CODE.

    unset, any                         any module, any program
    none                               what this package brings
    team.rewards,/opt/rlhf/code        modules of that package, and modules, programs and recipes in that folder
    none,best-effort                   and code of completions and of their tests outside of the sandbox

Where it is set, RLHF_ALLOW_KEYS lists the environment variables that a recipe may send, with their hosts:

    unset                              none
    JUDGE_KEY@api.example.org          that variable, to that host, over https; over http to this machine

The user who starts the worker sets them; a recipe cannot. They are read at each use, so that processes which a
stage starts hold to them too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

VARIABLE = "RLHF_ALLOW_CODE"
KEYS = "RLHF_ALLOW_KEYS"
PASS = "RLHF_PASS_VARIABLES"
"""Names, separated by commas, of further environment variables that children get (`rlhf.tuning.parallel.children`)."""
RULES = (VARIABLE, KEYS, PASS)
"""Environment variables of a run that hold on all nodes of its cluster."""
BEST_EFFORT = "best-effort"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
SHIPPED = ("rlhf.tuning.rewards.sentiment",)
"""Modules of this package whose functions are for recipes. Others, such as those that start processes, are not."""


class NotAllowed(ValueError):
    """Code that RLHF_ALLOW_CODE does not name, or a key that RLHF_ALLOW_KEYS does not."""


def places() -> list[str] | None:
    """Packages and folders that are allowed; None where all are."""
    said = os.environ.get(VARIABLE, "").strip()
    if said in ("", "any"):
        return None
    return [place.strip() for place in said.split(",") if place.strip() not in ("", "none")]


def check_module(module: str) -> None:
    """Raises NotAllowed for a module that may not be imported for a recipe. Imports nothing but packages above it."""
    allowed = places()
    if allowed is None or module in SHIPPED or any(_below(module, package) for package in allowed):
        return
    # Its top package alone: finding a module within a package imports that.
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        found = None
    origins = [] if found is None else list(found.submodule_search_locations or [])
    if found is not None and found.has_location:
        origins.append(str(found.origin))
    # Built-in and frozen modules have no place, whatever their origin says.
    if not origins or not all(_in_folder(Path(origin), allowed) for origin in origins):
        raise NotAllowed(f"the module {module!r} is not allowed here: {_remedy()}")


def check_program(words: Sequence[str]) -> None:
    """Raises NotAllowed for a command whose program is in none of the folders."""
    allowed = places()
    if allowed is None:
        return
    program = shutil.which(words[0]) if words else None
    if program is None or not _in_folder(Path(program), allowed):
        raise NotAllowed(f"the program {words[0] if words else ''!r} is not allowed here: {_remedy()}")


def check_key(variable: str, url: str) -> None:
    """Raises NotAllowed for an environment variable whose value a recipe sends to a URL that is not listed for it."""
    if places() is None:
        return
    parts = urlsplit(url)
    name = f"{variable}@{parts.hostname}"
    if name not in map(str.strip, os.environ.get(KEYS, "").split(",")):
        raise NotAllowed(f"the key {variable} is not for {parts.hostname} here: {KEYS} of the worker lacks {name}")
    if parts.scheme != "https" and parts.hostname not in LOOPBACK:
        raise NotAllowed(
            f"the key {variable} is sent over https alone, and the address is {parts.scheme}://{parts.hostname}"
        )


def check_isolation(isolation: str) -> None:
    """Raises NotAllowed for code of completions outside of the sandbox: data of a recipe may hold any program as a
    test."""
    allowed = places()
    if allowed is not None and isolation == BEST_EFFORT and BEST_EFFORT not in allowed:
        raise NotAllowed(f"isolation: {isolation} is not allowed here: {_remedy()}; leave it out")


def check_file(path: Path) -> None:
    """Raises NotAllowed for a recipe's file that is in none of the folders."""
    allowed = places()
    if allowed is not None and not _in_folder(path, allowed):
        raise NotAllowed(f"the file {path} is not allowed here: {_remedy()}, or name a built-in recipe")


def _below(module: str, package: str) -> bool:
    return "/" not in package and f"{module}.".startswith(f"{package}.")


def _in_folder(path: Path, allowed: Sequence[str]) -> bool:
    # Links are followed: one in an allowed folder may point anywhere, and a program may be one to python.
    folders = [Path(place).resolve() for place in allowed if place.startswith("/")]
    return any(path.resolve().is_relative_to(folder) for folder in folders)


def _remedy() -> str:
    return f"{VARIABLE} of the worker is {os.environ.get(VARIABLE, '')!r}"
