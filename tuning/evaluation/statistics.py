"""Intervals and comparisons for evaluations. Problems are the unit: samples of one problem are not independent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def mean_interval(correct_PS: np.ndarray, confidence: float = 0.95, seed: int = 0) -> tuple[float, float, float]:
    """Mean over problems of the mean over samples, with a percentile bootstrap interval over problems.

    `correct_PS` is [problems, samples] with values in [0, 1] (Efron, 1979). Where all problems
    agree the bootstrap has no width, so Wilson's interval over problems bounds it.
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
    """Wilson's score interval of a proportion (Wilson, 1927)."""
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return float(max(0.0, centre - half)), float(min(1.0, centre + half))


def paired_difference(
    a_PS: np.ndarray, b_PS: np.ndarray, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of b - a over the same problems, with a bootstrap interval over problems."""
    gaps = np.asarray(b_PS, np.float64).mean(axis=1) - np.asarray(a_PS, np.float64).mean(axis=1)
    rng = np.random.default_rng(seed)
    draws = gaps[rng.integers(0, len(gaps), (RESAMPLES, len(gaps)))].mean(axis=1)
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(gaps.mean()), float(low), float(high)


def pass_at_k(correct_PS: np.ndarray, k: int) -> float:
    """Unbiased pass@k (Chen et al., 2021): 1 - C(n - c, k) / C(n, k), mean over problems."""
    correct = np.asarray(correct_PS) > 0.5
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs between 1 and {n} samples a problem")
    total = 0.0
    for c in correct.sum(axis=1):
        total += 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
    return total / len(correct)


def constant_baseline(answers: Sequence[str]) -> tuple[str, float]:
    """The most common answer and the share of problems that giving it always would solve."""
    answer, count = Counter(answers).most_common(1)[0]
    return answer, count / len(answers)


def calibration_error(gaps: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error of sigmoid(chosen - rejected) as the probability that chosen is better.

    Each pair counts in both orders, so a model that knows nothing has error 0 at probability 0.5.
    """
    both = np.concatenate([gaps, -gaps])
    probability = 1 / (1 + np.exp(-both))
    truth = np.concatenate([np.ones(len(gaps)), np.zeros(len(gaps))])
    which = np.minimum((probability * bins).astype(int), bins - 1)
    error = 0.0
    for b in range(bins):
        mine = which == b
        if mine.any():
            error += mine.mean() * abs(probability[mine].mean() - truth[mine].mean())
    return float(error)
