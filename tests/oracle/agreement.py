"""How far two sets of parameters are apart."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

TOLERANCE = 1e-9
"""Relative to the largest entry of a tensor. What limits it: Adam divides a gradient by its own size, so the
rounding of sums, 1e-16, comes back a hundred million times larger where a gradient is as small as its epsilon, 1e-8."""
FIGURES: list[tuple[str, float, float]] = []
"""(test, of parameters, of their change) for the table at the end of a session."""


def distance(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """The largest difference of an entry, relative to the largest entry of its tensor."""
    assert wanted.keys() == found.keys(), wanted.keys() ^ found.keys()
    return max(float((wanted[n] - found[n]).abs().max() / wanted[n].abs().max().clamp(min=1e-300)) for n in wanted)


def assert_same(
    label: str, start: Mapping[str, Tensor], wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> None:
    """That what was trained is what the oracle has, in the parameters and in how far they moved from `start`."""
    far = distance(wanted, found)
    moved = max(float((wanted[n] - start[n]).abs().max()) for n in wanted)
    # A round of ties moves nothing.
    change = max(float((wanted[n] - found[n]).abs().max()) for n in wanted) / max(moved, 1e-300)
    FIGURES.append((label, far, change))
    assert far < TOLERANCE, f"{label}: parameters differ by {far:.1e} of their size, their change by {change:.1e}"
