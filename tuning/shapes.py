"""Sizes of compiled shapes. Few distinct sizes mean few compilations."""

from __future__ import annotations

ROW_LENGTHS = 2
"""The most row lengths in training of a recipe whose limits are known (`training.batch.Bounds`)."""
DECODE_PROGRAMS = 6
"""The most programs that decode in an engine with `Limits.few`."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value`, for sizes whose padding costs little."""
    return 1 << max(value - 1, 0).bit_length()


def bucket(value: int, smallest: int = 8) -> int:
    """The smallest of smallest * (1, 1.5, 2, 3, 4, 6, 8, ...) that is at least `value`.

    Above `smallest` less than a third of a bucket is padding.
    """
    size = smallest
    while size < value:
        if size * 3 // 2 >= value and size % 2 == 0:
            return size * 3 // 2
        size *= 2
    return size
