"""Whether the mean of paired differences is above a bound, whatever their distribution.

Signs tell nothing of losses that a sample has missed, nor a bootstrap, which has none to draw; and with a bound
below 0, not worse by more than a margin, equal scores lie on one side of it. Gaffke's bound on the mean of a
bounded variable adds the least that can be to the sample, and weighs all of it by the spacings of uniform numbers.
For scores of 0 and 1 that only lose it is that of Clopper and Pearson; that it holds for every bounded variable is
proved for some cases and without a counterexample (Learned-Miller and Thomas, A New Confidence Interval for the
Mean of a Bounded Random Variable, 2019).
"""

from __future__ import annotations

import numpy as np

from rlhf.tuning.evaluation.permutation import CHUNK, draws_for
from rlhf.tuning.evaluation.statistics import Clusters, by_cluster, paired_gaps


def above_margin(
    a_PS: np.ndarray, b_PS: np.ndarray, level: float, least: float, seed: int = 0, clusters: Clusters = None
) -> float:
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
    rng = np.random.default_rng(seed)
    rows, not_above = max(1, CHUNK // len(counts)), 0
    for start in range(0, draws, rows):
        weights = rng.gamma(counts, size=(min(rows, draws - start), len(counts)))
        not_above += int(((weights @ kinds[0]) / (weights @ kinds[1]) <= least).sum())
    return (1 + not_above) / (1 + draws)
