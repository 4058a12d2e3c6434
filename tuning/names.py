"""Names that people write: the nearest known one for a mistake, and the function behind `module:function`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any


def closest(name: str, known: Iterable[str]) -> str | None:
    """The name among `known` that `name` is most likely a slip of; None where none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), 1)), None)


def nearest(name: str, known: Iterable[str], also: str = "") -> str:
    """What to say about a name that is not among `known`: `did you mean sft?`, else `there are sft, reward or ...`.

    also: what is allowed beside the known names, such as `module:function`.
    """
    names = list(known)
    near = closest(name, names)
    if near:
        return f"did you mean {near}?"
    listed = ", ".join([*names, *([also] if also else [])])
    return f"there are {listed}" if listed else "there are none"


def function_of(name: str) -> Callable[..., Any]:
    """The function of `module:function`. Raises ValueError where the module or the function is not there."""
    module, colon, function = name.partition(":")
    if not colon or not function:
        raise ValueError(f"{name!r}: expected module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"{name!r}: {e}") from e
    if not callable(found):
        raise ValueError(f"{name!r} is a {type(found).__name__}: expected a function")
    return found
