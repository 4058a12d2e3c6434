"""Sizes of compiled shapes: few of them, so little is compiled."""

from __future__ import annotations


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


def bucket(value: int, smallest: int = 8) -> int:
    """The next of smallest * (1, 1.5, 2, 3, 4, 6, 8, ...): at most a third of a bucket is padding."""
    size = smallest
    while size < value:
        if size * 3 // 2 >= value and size % 2 == 0:
            return size * 3 // 2
        size *= 2
    return size
