"""What the patterns of `fields` took from the records: the first values, and those that are a part of a number.

Each block counts its own (`add`), and the counts of all blocks are put together in the order of the records
(`together`), so that they depend on no runner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf.tuning.data.fields import Found

SHOWN = 2
"""Values that are kept of each field."""
LONGEST = 60
"""Characters that are kept of a value."""

Extracted = dict[str, dict[str, Any]]
"""By field: its first `values`; `parts`, the records of whose number a part was taken; the first of them, `example`."""


def add(into: Extracted, found: Found, where: str) -> None:
    """Counts what a pattern took from the record that `where` names."""
    mine = into.setdefault(found.field, {"values": [], "parts": 0, "example": None})
    if len(mine["values"]) < SHOWN:
        mine["values"].append(found.value[:LONGEST])
    if found.number is not None:
        mine["parts"] += 1
        taken = f"`{found.pattern}` takes {found.value[-LONGEST:]!r} of {found.number[:LONGEST]!r}"
        mine["example"] = mine["example"] or f"{where}: {taken}"


def together(receipts: Iterable[Mapping[str, Any]]) -> Extracted:
    """The counts of all blocks. receipts: of the blocks, in the order of their records."""
    total: Extracted = {}
    for receipt in receipts:
        for field, counts in receipt["extracted"].items():
            mine = total.setdefault(field, {"values": [], "parts": 0, "example": None})
            mine["values"] = [*mine["values"], *counts["values"]][:SHOWN]
            mine["parts"] += counts["parts"]
            mine["example"] = mine["example"] or counts["example"]
    return dict(sorted(total.items()))


def warnings(extracted: Extracted) -> list[str]:
    """A sentence for each field whose pattern took a part of a number."""
    return [
        f"the pattern of `fields.{field}` takes a part of a number in {found['parts']} records ({found['example']}); "
        r"put the group `(-?\d+(?:[.,/]\d+)*)` in the place of its own, which takes all of one, and leave the rest"
        for field, found in extracted.items()
        if found["parts"]
    ]
