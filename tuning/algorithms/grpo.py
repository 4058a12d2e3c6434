"""GRPO (Shao et al., 2024, arXiv:2402.03300): rewards against the mean of their group. No critic."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tuning.algorithms.advantages import Normalisation, group_advantages


def advantages(
    totals_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, normalisation: Normalisation
) -> np.ndarray:
    """One advantage a completion, [N] float32; statistics over whole groups, failed samples excluded (R9)."""
    totals = jnp.asarray(np.where(valid_N, totals_N, 0.0), jnp.float32)
    found = group_advantages(totals, jnp.asarray(groups_N), normalisation=normalisation, valid=jnp.asarray(valid_N))
    return np.asarray(found, np.float32)


def kept(totals_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray) -> np.ndarray:
    """Which completions carry a signal, [N] bool: valid, in a group whose rewards differ (R9)."""
    keep = valid_N.copy()
    for group in np.unique(groups_N):
        mine = (groups_N == group) & valid_N
        if mine.sum() < 2 or np.ptp(totals_N[mine]) < 1e-6:
            keep[groups_N == group] = False
    return keep
