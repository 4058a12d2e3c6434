"""Names in settings: the nearest known one for a typing error, the function that `module:function` names, and foreign
texts for a terminal."""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rlhf.tuning.allowed import check_module

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """A text of others for a terminal: control characters and marks of direction, which can rewrite it, are shown."""
    return _CONTROL.sub("\ufffd", text)


def cache_folder(variable: str, name: str) -> Path:
    """Return the folder of an environment variable, else `~/.cache/rlhf-pipeline/NAME`. Raises OSError without both."""
    if given := os.environ.get(variable):
        return Path(given)
    try:
        return Path.home() / ".cache" / "rlhf-pipeline" / name
    except RuntimeError:
        raise OSError(f"this user has no home folder: set {variable} to a folder") from None


def closest(name: str, known: Iterable[str], ratio: float = 0.6) -> str | None:
    """The name among `known` that `name` probably meant; None if none has this ratio of equal characters."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, ratio)), None)


def nearest(name: str, known: Iterable[str], also: str = "") -> str:
    """The hint for a name that is not among `known`: `did you mean sft?`, else `there are sft, reward, ...`.

    also: an allowed form in addition to the known names, such as `module:function`.
    """
    names = list(known)
    if near := closest(name, names):
        return f"did you mean {near}?"
    listed = ", ".join([*names, *([also] if also else [])])
    return f"there are {listed}" if listed else "there are none"


def function_of(name: str) -> Callable[..., Any]:
    """The function of `module:function`. Raises ValueError where the module or the function does not exist."""
    module, colon, function = name.partition(":")
    if not colon or not function:
        raise ValueError(f"{name!r}: expected module:function")
    check_module(module)
    try:
        value = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"{name!r}: {e}") from e
    if not callable(value):
        raise ValueError(f"{name!r} is a {type(value).__name__}: expected a function")
    return value
