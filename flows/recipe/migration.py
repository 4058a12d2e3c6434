"""Recipes in the records of older versions, as this version has them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

MOVED = {"stall_seconds": "limits.stall_seconds"}
"""Settings that have another place now, by the one that they had."""


def migrated(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a record's recipe with each setting where it is now."""
    found = copy.deepcopy(dict(values))
    for old, new in MOVED.items():
        if old not in found:
            continue
        section, _, name = new.partition(".")
        # A value at the new place is a later one's.
        found[section] = {name: found.pop(old)} | found.get(section, {})
    update = (found.get("rl") or {}).get("update") or {}
    if update.get("tied_groups") == "regularise":
        update["tied_groups"] = "count"
    return found
