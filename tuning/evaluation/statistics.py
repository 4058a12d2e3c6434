"""Intervals and comparisons for evaluations. Problems are resampled: samples of one problem are dependent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def mean_interval(correct_PS: np.ndarray, confidence: float = 0.95, seed: int = 0) -> tuple[float, float, float]:
    """Mean over problems of the mean over samples, with a percentile bootstrap interval over problems.

    `correct_PS` is [problems, samples] with values in [0, 1]; the bootstrap is Efron's (1979). Where all problems have
    one value the bootstrap has no width, and Wilson's interval over problems takes its place. Raises ValueError
    without a problem.
    """
    per_problem = np.asarray(correct_PS, np.float64).mean(axis=1)
    n = len(per_problem)
    if n == 0:
        raise ValueError("an interval needs at least one problem")
    mean = float(per_problem.mean())
    rng = np.random.default_rng(seed)
    draws = per_problem[rng.integers(0, n, (RESAMPLES, n))].mean(axis=1)
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    if per_problem.std() == 0:
        low, high = wilson(mean, n)
    return mean, float(low), float(high)


def wilson(mean: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion `mean` of `n` trials (Wilson, 1927); z = 1.96 is 95 %."""
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return float(max(0.0, centre - half)), float(min(1.0, centre + half))


def paired_difference(
    a_PS: np.ndarray, b_PS: np.ndarray, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of b - a with a bootstrap interval over problems. Both are [problems, samples]; rows match by problem."""
    # Differences are resampled, not each side: the difficulty that a problem has for both cancels.
    gaps = np.asarray(b_PS, np.float64).mean(axis=1) - np.asarray(a_PS, np.float64).mean(axis=1)
    rng = np.random.default_rng(seed)
    draws = gaps[rng.integers(0, len(gaps), (RESAMPLES, len(gaps)))].mean(axis=1)
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(gaps.mean()), float(low), float(high)


def pass_at_k(correct_PS: np.ndarray, k: int) -> float:
    """Unbiased pass@k (Chen et al., arXiv:2107.03374): mean over problems of 1 - C(n - c, k) / C(n, k).

    `correct_PS` is [problems, samples]; above 0.5 counts as right. Raises ValueError unless 1 <= k <= n samples.
    """
    correct = np.asarray(correct_PS) > 0.5
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs between 1 and {n} samples a problem")
    total = 0.0
    for c in correct.sum(axis=1):
        # The quotient of binomials as a product of at most n factors, which does not overflow.
        total += 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
    return total / len(correct)


def constant_baseline(answers: Sequence[str]) -> tuple[str, float]:
    """The most common answer, and the share of problems that always giving it would solve."""
    answer, count = Counter(answers).most_common(1)[0]
    return answer, count / len(answers)


def calibration_error(gaps: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error of sigmoid(chosen - rejected) as the probability that chosen is better.

    `gaps` are differences of scores, [pairs]. Each pair counts in both orders, so that a model which always answers
    0.5 has error 0.
    """
    both = np.concatenate([gaps, -gaps])
    probability = 1 / (1 + np.exp(-both))
    truth = np.concatenate([np.ones(len(gaps)), np.zeros(len(gaps))])
    # Bins of equal width; a probability of exactly 1 belongs to the last.
    which = np.minimum((probability * bins).astype(int), bins - 1)
    error = 0.0
    for b in range(bins):
        members = which == b
        if members.any():
            error += members.mean() * abs(probability[members].mean() - truth[members].mean())
    return float(error)
