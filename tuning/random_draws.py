"""Random draws by a hash of names: they depend on their arguments alone, never on what else is drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def uniform(seed: int, purpose: str, group: str) -> float:
    """A number in [0, 1) that depends on its arguments alone: more data never moves a group to another split."""
    bits = hashlib.sha256(f"{seed}\n{purpose}\n{group}".encode()).digest()[:8]
    return int.from_bytes(bits, "big") / 2.0**64


def by_group(groups: Sequence[str], seed: int, purpose: str) -> list[list[int]]:
    """The numbers of the rows of each group; the groups in an order that is random by a hash of their names.

    groups: the group of each row, [N].
    """
    rows: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        rows.setdefault(group, []).append(number)
    return [rows[group] for group in sorted(rows, key=lambda group: (uniform(seed, purpose, group), group))]


def some_by_group(groups: Sequence[str], count: int, seed: int, purpose: str) -> list[int]:
    """The numbers of `count` rows, or of all where there are fewer, in ascending order: group after random group.

    Only the last group may be divided. A larger count adds rows and changes none.
    """
    return sorted([number for rows in by_group(groups, seed, purpose) for number in rows][:count])


def whole_groups(groups: Sequence[str], most: int, seed: int, purpose: str) -> list[int]:
    """The numbers of about `most` rows in ascending order: random groups, none of them divided.

    As many groups as fit; where none does, the smallest, so that rows of two groups or more are never all on one side.
    """
    taken: list[int] = []
    if not most or not groups:
        return taken
    every = by_group(groups, seed, purpose)
    for rows in every:
        if len(taken) + len(rows) <= most:
            taken += rows
    return sorted(taken) if taken else min(every, key=len)
