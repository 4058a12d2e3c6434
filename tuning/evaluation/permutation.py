"""A test of paired differences by their signs: exact, whatever their distribution, under the null that it tests.

The null: the differences of clusters, less `least`, are symmetric about 0 and independent of each other, so that each
sign is a coin's (Fisher, The Design of Experiments, 1935, section 21; Good, Permutation, Parametric and Bootstrap
Tests, 2005). Two policies of equal ability on every problem are such a case. A mean of `least` alone is not:
differences that lean to one side, as scores of 0 and 1 do with a `least` other than 0, can keep their mean and be
rejected more often.

`above_margin` tests whether the mean of paired differences is above a bound, whatever their distribution. Signs tell
nothing of losses that a sample has missed, nor a bootstrap, which has none to draw; and with a bound below 0, not worse
by more than a margin, equal scores lie on one side of it. Gaffke's bound on the mean of a bounded variable adds the
least that can be to the sample, and weighs all of it by the spacings of uniform numbers. For scores of 0 and 1 that
only lose it is that of Clopper and Pearson; that it holds for every bounded variable is proved for some cases and
without a counterexample (Learned-Miller and Thomas, A New Confidence Interval for the Mean of a Bounded Random
Variable, 2019).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import gammaln

from rlhf.tuning.evaluation.statistics import Clusters, by_cluster, paired_gaps

if TYPE_CHECKING:
    from collections.abc import Sequence


def above_margin(a_PS: np.ndarray, b_PS: np.ndarray, level: float, least: float, clusters: Clusters = None) -> float:
    """p of a one-sided test whether the mean of b - a is above `least`, by Gaffke's bound over clusters.

    Arrays and clusters are as of `statistics.paired_difference`. level: the smallest relevant p; fewer draws are made
    if it is large. p is (1 + b) / (1 + B) for b of B draws whose mean is not above. A problem can lose 1, or the
    largest difference that was seen if that is more. Raises ValueError if no problem has a score on both sides.
    """
    gaps, names = paired_gaps(a_PS, b_PS, clusters)
    sums, sizes = by_cluster(gaps, names)
    size = sizes.mean()
    worst = -max(1.0, float(np.abs(gaps).max())) * size
    # Spacings are exponential numbers over their sum; those of equal clusters are added up, to a gamma number.
    kinds, counts = np.unique(np.stack([np.append(sums, worst), np.append(sizes, size)]), axis=1, return_counts=True)
    draws = draws_for(level)
    rng = np.random.default_rng(0)
    rows, not_above = max(1, CHUNK // len(counts)), 0
    for start in range(0, draws, rows):
        weights = rng.gamma(counts, size=(min(rows, draws - start), len(counts)))
        not_above += int(((weights @ kinds[0]) / (weights @ kinds[1]) <= least).sum())
    return (1 + not_above) / (1 + draws)


FLIPS = 999_999
"""The most random choices of signs: the least p that they can give is one in a million."""
_FEWEST = 9_999
_HITS = 50
"""Choices of signs expected at the level: its p is known to a seventh."""
_EXACT = 1 << 20
"""Sums whose probabilities are added up; if there are more, signs are drawn."""
CHUNK = 1 << 22
"""Numbers drawn at a time."""
_DIGITS = 10


@dataclasses.dataclass(frozen=True)
class SignFlip:
    """The probability of a sum as large as the one seen, or larger, by the signs alone."""

    p: float
    clusters: int
    """Clusters whose difference is not `least`: the others have no sign."""


def sign_flip(
    a_PS: np.ndarray, b_PS: np.ndarray, level: float, least: float = 0.0, clusters: Clusters = None
) -> SignFlip:
    """Tests one-sided whether b - a is above `least`, by the signs of the differences of clusters.

    Arrays and clusters are as of `statistics.paired_difference`. The sum over all problems decides, whose mean has the
    same order. level: the smallest relevant p; a larger one needs fewer signs.

    Clusters of one size of difference are counted by how many of them are positive, a binomial number, and equal sums
    are taken together: for scores on a grid that enumerates all choices of signs. Where sums are too many, signs are
    drawn, and p is (1 + b) / (1 + B) for b of B sums as large, which holds the level for any B (Phipson and Smyth,
    Statistical Applications in Genetics and Molecular Biology 9, 2010).
    """
    gaps, names = paired_gaps(a_PS, b_PS, clusters)
    sums, _ = by_cluster(gaps - least, names)
    scale = max(1.0, float(np.abs(sums).max()))
    # Sums of equal scores are equal up to rounding.
    sums = np.round(sums / scale, _DIGITS)
    sums = sums[sums != 0]
    if not len(sums):
        return SignFlip(1.0, 0)
    sizes, counts = np.unique(np.abs(sums), return_counts=True)
    seen = float(sums.sum()) - 10.0**-_DIGITS * len(sums)
    p = _exact(sizes, counts, seen)
    return SignFlip(_drawn(sizes, counts, seen, level) if p is None else p, len(sums))


def draws_for(level: float) -> int:
    """Return the number of random draws that resolve a p of about `level`, between two bounds."""
    return min(FLIPS, max(_FEWEST, math.ceil(_HITS / level)))


def _exact(sizes: np.ndarray, counts: Sequence[int] | np.ndarray, seen: float) -> float | None:
    """The probability of a sum of at least `seen`; None if there are too many sums."""
    sums: np.ndarray = np.zeros(1)
    chances: np.ndarray = np.ones(1)
    for size, count in zip(sizes, counts, strict=True):
        if len(sums) * (count + 1) > _EXACT:
            return None
        positive = np.arange(count + 1)
        logs = gammaln(count + 1) - gammaln(positive + 1) - gammaln(count - positive + 1) - count * math.log(2)
        every = np.round(sums[:, None] + size * (2 * positive - count), _DIGITS).ravel()
        sums, place = np.unique(every, return_inverse=True)
        chances = np.bincount(place, (chances[:, None] * np.exp(logs)).ravel(), len(sums))
    return min(1.0, float(chances[sums >= seen].sum()))


def _drawn(sizes: np.ndarray, counts: np.ndarray, seen: float, level: float) -> float:
    """As `_exact`, from random signs."""
    draws = draws_for(level)
    rng = np.random.default_rng(0)
    rows, as_large = max(1, CHUNK // len(sizes)), 0
    for start in range(0, draws, rows):
        positive = rng.binomial(counts, 0.5, (min(rows, draws - start), len(sizes)))
        as_large += int(((2 * positive - counts) @ sizes >= seen).sum())
    return (1 + as_large) / (1 + draws)
