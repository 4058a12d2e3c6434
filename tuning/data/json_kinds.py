"""Checks of JSON values, their form in error messages, and their canonical text."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.tuning.texts import normal


def is_list_of_objects(value: Any) -> bool:
    """Return whether the value is a list of one or more objects."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def is_finite(value: Any) -> bool:
    """Return whether the value is a finite number."""
    try:
        # In Python a bool is an int.
        return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False  # an integer beyond every float


def kind_of(value: Any) -> str:
    """Return a value's form in errors: its JSON type and its start."""
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{names.get(type(value), type(value).__name__)} {shown}"


def opening(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the turns before the assistant's first one without the system's; if there are none, all but the system's.

    Records that begin alike belong together, because SFT trains every turn, perhaps the answer to another prompt.
    """
    turns = [message for message in messages if message["role"] != "system"]
    first = next((i for i, message in enumerate(turns) if message["role"] == "assistant"), len(turns))
    return turns[:first] or turns


def comparable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content in the form in which texts are compared."""
    content = message.get("content")
    return {**message, "content": normal(content)} if isinstance(content, str) else dict(message)


# `json.dumps` with these settings builds an encoder at each call, which is noticeable on millions of records.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def canonical_json(value: Any) -> str:
    """Return the canonical JSON of a value: sorted keys, no spaces. Raises ValueError or TypeError if it has none."""
    return _canonical(value)


def digest(text: str) -> str:
    """Return the sha256 of the text, as 64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()
