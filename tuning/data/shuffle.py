"""The order of an epoch: the permutation that Grain's shuffle draws.

Grain's cipher has a bit too few for the last of 2^16 + 1, 2^18 + 1, 2^20 + 1, ... positions: it repeats the number of
position 0 there and never draws the last number. Here the last number stays at the last position.
"""

from __future__ import annotations

import numpy as np
from grain.experimental import index_shuffle

ROUNDS = 4
"""As in Grain's `MapDataset.shuffle`."""
_REPEATING = {4**power + 1 for power in range(8, 16)}


def shuffled(positions: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the numbers at these positions in the order of 0 to `count` - 1 by a seed below 2^32."""
    last = count - 1 if count in _REPEATING else None
    numbers = (n if n == last else index_shuffle(n, count - 1, seed, ROUNDS) for n in positions.tolist())
    return np.fromiter(numbers, np.int64, len(positions))
