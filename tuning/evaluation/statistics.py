"""Intervals and comparisons for evaluations. Problems are resampled: samples of one problem are dependent.

`correct_PS` is [problems, samples]: the score of each completion, NaN where the judge does not apply. A problem without
any score is left out. Problems of one cluster (a group of related problems) are resampled together.

A bootstrap of a few clusters is too narrow, and of one it has no width. Below `FEW` clusters an interval is Student's,
of the means of the clusters; a single cluster does not tell how clusters differ, and its interval is all that is
possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.special import stdtrit

RESAMPLES = 2000
FEW = 10
"""Clusters from which on they are resampled."""
_CHUNK = 1 << 22
"""Numbers drawn at a time: the resamples of many problems do not fit the memory together."""

Clusters = Sequence[Hashable] | None
"""The cluster of each problem; None: every problem is its own."""


def problem_means(correct_PS: np.ndarray) -> np.ndarray:
    """Mean over the samples of each problem, [problems]; NaN if none has a score."""
    scores = np.asarray(correct_PS, np.float64)
    counts = np.isfinite(scores).sum(axis=1)
    return np.where(counts > 0, np.nansum(scores, axis=1) / np.maximum(counts, 1), np.nan)


def mean_interval(
    correct_PS: np.ndarray, confidence: float = 0.95, seed: int = 0, clusters: Clusters = None
) -> tuple[float, float, float]:
    """Mean over problems of the mean over samples, with a percentile bootstrap interval over clusters of problems.

    The bootstrap is Efron's (1979), of clusters as in Field and Welsh (2007); below `FEW` clusters the interval is
    Student's (`_few`). Where all problems have one value neither has a width, and for a share Wilson's interval takes
    their place; that of one cluster is all that is possible. Raises ValueError without a problem.
    """
    means = problem_means(correct_PS)
    known = np.isfinite(means)
    values, names = means[known], scored_names(clusters, known)
    if len(values) == 0:
        raise ValueError("an interval needs at least one problem that has a score")
    mean = float(values.mean())
    if np.ptp(values) == 0 and 0 <= mean <= 1:
        return mean, *wilson(mean, len(set(names)), _z(confidence))
    if len(set(names)) == 1 or (np.ptp(values) > 0 and len(set(names)) < FEW):
        # Scores are from 0 to 1, unless they themselves go beyond.
        return mean, *_few(values, names, confidence, (min(0.0, float(values.min())), max(1.0, float(values.max()))))
    return mean, *_bootstrap(values, names, confidence, seed)


def wilson(mean: float, n: int, z: float) -> tuple[float, float]:
    """Wilson's score interval of a proportion `mean` of `n` trials (Wilson, 1927); z = 1.96 is 95 %."""
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return float(max(0.0, centre - half)), float(min(1.0, centre + half))


def paired_difference(
    a_PS: np.ndarray,
    b_PS: np.ndarray,
    confidence: float = 0.95,
    seed: int = 0,
    clusters: Clusters = None,
    resample: bool = True,
) -> tuple[float, float, float]:
    """Mean of b - a with a bootstrap interval over clusters of problems, Student's below `FEW` clusters (`_few`).

    resample: False: Student's for any number of clusters.

    Both are [problems, samples], their rows match by problem, and problems without a score on either side are left out.
    Where no problem differs, all differ by a whole point, or those of a few clusters differ alike, neither has a width:
    the interval then allows for the largest share of other problems that Wilson's interval does not exclude. That of
    one cluster always holds 0. Raises ValueError without a problem.
    """
    # Differences are resampled, not each side: the difficulty that a problem has for both cancels.
    values, names = paired_gaps(a_PS, b_PS, clusters)
    mean, count = float(values.mean()), len(set(names))
    many = resample and count >= FEW
    # A difference is at most a whole point, unless one is larger.
    most = max(1.0, float(np.abs(values).max()))
    # Equal differences of scores are equal up to rounding.
    alike = np.ptp(values) == 0 and mean in (-1.0, 0.0, 1.0) if many else np.ptp(values) < 1e-9 * most
    if alike:
        unseen = wilson(0.0, count, _z(confidence))[1]
        return mean, max(-most, mean * (1 - unseen) - unseen * most), min(most, mean * (1 - unseen) + unseen * most)
    if not many:
        return mean, *_few(values, names, confidence, (-most, most))
    return mean, *_bootstrap(values, names, confidence, seed)


def differences_from_first(
    settings: Sequence[Sequence[tuple[np.ndarray, np.ndarray, Sequence[Hashable]]]], comparisons: int
) -> list[tuple[float, float, float]]:
    """Differences of several settings from a first one: (mean, low, high) of each. The intervals hold together at 95 %.

    settings: for each other setting and seed the scores of the first one and its own, as of `paired_difference`, with
    the clusters. comparisons: number of intervals that hold together, each at 1 - 0.05 / comparisons (Bonferroni).
    Intervals over problems are Student's: so far out, the tails of a bootstrap are too light.

    With several seeds an interval covers other problems and other seeds. The variance of a run beyond its setting and
    its seed is pooled over all settings (randomised blocks; Montgomery, Design and Analysis of Experiments, 4.1).
    Student's half-width of it and that over problems add up in quadrature (Zou and Donner, Statistics in Medicine 27,
    2008). With one seed an interval is of these policies alone.
    """
    confidence = 1 - 0.05 / comparisons
    # The first setting differs from itself by 0; an effect of a seed on all settings cancels.
    means_KR = np.asarray([[0.0] * len(settings[0]), *([paired_gaps(*runs)[0].mean() for runs in s] for s in settings)])
    rest_KR = means_KR - means_KR.mean(axis=0) - means_KR.mean(axis=1, keepdims=True) + means_KR.mean()
    others, seeds = len(settings), means_KR.shape[1]
    half = 0.0
    if seeds > 1:
        freedom = others * (seeds - 1)
        variance = 2 * (rest_KR**2).sum() / freedom / seeds
        half = float(stdtrit(freedom, (1 + confidence) / 2) * np.sqrt(variance))
    found = []
    for runs in settings:
        first, own, clusters = (list(part) for part in zip(*runs, strict=True))
        names = [name for of_run in clusters for name in of_run]
        sides = np.concatenate(first), np.concatenate(own)
        mean, low, high = paired_difference(*sides, confidence, clusters=names, resample=False)
        found.append((mean, mean - float(np.hypot(mean - low, half)), mean + float(np.hypot(high - mean, half))))
    return found


def paired_gaps(a_PS: np.ndarray, b_PS: np.ndarray, clusters: Clusters) -> tuple[np.ndarray, list[Hashable]]:
    """Return b - a of each problem that has a score on both sides, and its cluster. Raises ValueError without one."""
    gaps = problem_means(b_PS) - problem_means(a_PS)
    known = np.isfinite(gaps)
    if not known.any():
        raise ValueError("a difference needs at least one problem that has a score on both sides")
    return gaps[known], scored_names(clusters, known)


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def scored_names(clusters: Clusters, known: np.ndarray) -> list[Hashable]:
    """The clusters of the problems that have a score."""
    named: Sequence[Hashable] = range(len(known)) if clusters is None else clusters
    return [name for name, there in zip(named, known, strict=True) if there]


def by_cluster(values: np.ndarray, names: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """The sum and the number of the values of each cluster."""
    numbers: dict[Hashable, int] = {}
    cluster_N = np.asarray([numbers.setdefault(name, len(numbers)) for name in names])
    return np.bincount(cluster_N, values), np.bincount(cluster_N)


def _few(
    values: np.ndarray, names: Sequence[Hashable], confidence: float, possible: tuple[float, float]
) -> tuple[float, float]:
    """Student's interval of the mean of `values` with clusters - 1 degrees of freedom, within the `possible` range.

    The mean weighs clusters by their shares w of the problems: its variance is sum(w^2) s^2, s^2 the variance of the
    means of clusters, and at least that of independent problems, since a few means may agree by chance. One cluster has
    no s^2: all that is possible.
    """
    sums, counts = by_cluster(values, names)
    if len(sums) == 1:
        return possible
    shares = counts / counts.sum()
    variance = max((shares**2).sum() * np.var(sums / counts, ddof=1), np.var(values, ddof=1) / len(values))
    half = stdtrit(len(sums) - 1, (1 + confidence) / 2) * np.sqrt(variance)
    return float(max(possible[0], values.mean() - half)), float(min(possible[1], values.mean() + half))


def _bootstrap(values: np.ndarray, names: Sequence[Hashable], confidence: float, seed: int) -> tuple[float, float]:
    """Percentile interval of the mean of `values`, resampled by cluster."""
    sums, counts = by_cluster(values, names)
    rng = np.random.default_rng(seed)
    draws: list[np.ndarray] = []
    rows = max(1, _CHUNK // len(sums))
    for start in range(0, RESAMPLES, rows):
        chosen = rng.integers(0, len(sums), (min(rows, RESAMPLES - start), len(sums)))
        draws.append(sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1))
    low, high = np.quantile(np.concatenate(draws), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def pass_at_k(correct_PS: np.ndarray, k: int) -> float:
    """Unbiased pass@k (Chen et al., arXiv:2107.03374): mean over problems of 1 - C(n - c, k) / C(n, k).

    Above 0.5 counts as right; problems with fewer than k scores are left out. Raises ValueError unless
    1 <= k <= n samples, and if no problem has k scores.
    """
    scores = np.asarray(correct_PS, np.float64)
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"pass@{k} needs between 1 and {scores.shape[1]} samples a problem")
    counts = np.isfinite(scores).sum(axis=1)
    rates = [
        # The quotient of binomials as a product of at most n factors, which does not overflow.
        1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
        for n, c in zip(counts, (scores > 0.5).sum(axis=1), strict=True)
        if n >= k
    ]
    if not rates:
        raise ValueError(f"pass@{k} needs at least one problem with {k} scores")
    return float(np.mean(rates))


def majority(correct_PS: np.ndarray, answers_PS: Sequence[Sequence[Hashable | None]]) -> float:
    """maj@n, self-consistency (Wang et al., arXiv:2203.11171): the mean score of each problem's most common answer.

    answers_PS: [problems, samples]; None, no answer, does not vote, and a problem without votes scores 0. Of answers
    that are equally common each counts with an equal share, which is the mean over breaking the tie at random. Raises
    ValueError if no problem has a score.
    """
    shares = []
    for scores, answers in zip(np.asarray(correct_PS, np.float64), answers_PS, strict=True):
        judged = [(a, s) for a, s in zip(answers, scores, strict=True) if np.isfinite(s)]
        votes = Counter(a for a, _ in judged if a is not None)
        most = max(votes.values(), default=0)
        winners = [a for a, count in votes.items() if count == most]
        if winners:
            # A judge that sees more than the answer may score equal answers apart: their mean stands for them.
            shares.append(np.mean([np.mean([s for a, s in judged if a == winner]) for winner in winners]))
        elif judged:
            shares.append(0.0)
    if not shares:
        raise ValueError("a majority needs at least one problem that has a score")
    return float(np.mean(shares))


def constant_baseline(answers: Sequence[str], forms: Sequence[str] | None = None) -> tuple[str, float]:
    """The most common answer, and the share of problems that always giving it would solve.

    forms: of each answer a text that is the same for equal answers; None: the answer itself. Raises ValueError without
    an answer.
    """
    if not answers:
        raise ValueError("a constant answer needs at least one problem that has an answer")
    forms = list(answers if forms is None else forms)
    form, count = Counter(forms).most_common(1)[0]
    return answers[forms.index(form)], count / len(answers)


def win_rate(good: Any, bad: Any) -> float:
    """Return the share of pairs of arrays in which `good` is above `bad`; a tie is half: constant scores give 0.5."""
    return float(((good > bad) + 0.5 * (good == bad)).mean())


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
