"""Whitening over a round whose numbers are kept without padding: as `rlhf.tuning.losses.returns.whiten`, by blocks of
rows.

Axes: N completions of the round, C rows of a block, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlhf.tuning.algorithms.algorithm import Scored
from rlhf.tuning.algorithms.flat import Flat, blocks, rows_of


def whiten(x: Flat, scored: Scored, *, shift_mean: bool = True, eps: float = 1e-8) -> None:
    """Writes (x - mean) / sqrt(var + eps) over the valid tokens of the round in place of x; 0 where masked.

    Sums are in float64. shift_mean=False adds the mean back.
    """
    # From the least value on, as there: the mean of values that are far from 0 is off by more than their differences.
    least = min((float(valid.min()) for _, _, valid in _valid(x, scored) if len(valid)), default=0.0)
    count, total, squares = 0, 0.0, 0.0
    for _, _, valid in _valid(x, scored):
        count += len(valid)
        total += float((valid - least).sum(dtype=np.float64))
    mean = total / max(count, 1)
    for _, _, valid in _valid(x, scored):
        squares += float((((valid - least) - mean).astype(np.float64) ** 2).sum())
    scale = 1.0 / np.sqrt(squares / max(count - 1, 1) + eps)
    back = 0.0 if shift_mean else mean + least
    for rows, mask_CT, valid in _valid(x, scored):
        made_CT = np.zeros(mask_CT.shape, x.dtype)
        made_CT[mask_CT] = ((valid - least) - mean) * scale + back
        x.put(rows, made_CT)


def _valid(x: Flat, scored: Scored) -> Iterator[tuple[range, np.ndarray, np.ndarray]]:
    """(rows, which of their tokens are valid [C, T], the numbers of these) by blocks."""
    for rows in blocks(x.count, x.width):
        mask_CT = rows_of(scored, "mask_NT", rows) > 0
        yield rows, mask_CT, x.gathered(rows)[mask_CT]
