"""The tokens that a round trains on, and the advantages that they were given.

An algorithm gives one advantage to a completion, which all of its tokens share, or one to each token.

Axes: N completions of the round.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tuning.algorithms.flat import Column
from tuning.precision import real


@dataclasses.dataclass(frozen=True)
class Trained:
    """The tokens of a round that take part in the loss."""

    in_loss: Column
    """1 on the tokens that may."""
    keep_N: np.ndarray
    """Completions that do, [N] bool."""

    def mask_of(self, i: int) -> np.ndarray:
        """True on the tokens of completion i that take part; empty where none does."""
        return self.in_loss.row(i) if self.keep_N[i] else np.zeros(0, bool)

    def numbers(self, column: Column) -> list[np.ndarray]:
        """What a column has for them, by completion."""
        masks = [self.mask_of(i) for i in range(len(self.keep_N))]
        return [column.row(i)[: len(mask)][mask] for i, mask in enumerate(masks)]


def spread(trained: Trained, advantages: Column) -> float:
    """Standard deviation of the advantage over the tokens that are trained; 0 without one."""
    of_tokens = np.concatenate(trained.numbers(advantages))
    if not of_tokens.size:
        # Completions without a token have no advantage.
        return 0.0
    # As `of_tokens.std()`, which would make a second array of all tokens.
    of_tokens -= of_tokens.mean()
    of_tokens *= of_tokens
    return float(np.sqrt(of_tokens.mean()))


def shared_N(trained: Trained, advantages: Column | None) -> np.ndarray:
    """The advantage that the trained tokens of each completion share, [N]; NaN without one."""
    found = np.full(len(trained.keep_N), np.nan, real())
    for i, of_tokens in enumerate(trained.numbers(advantages) if advantages is not None else ()):
        if len(of_tokens) and (of_tokens == of_tokens[0]).all():
            found[i] = of_tokens[0]
    return found
