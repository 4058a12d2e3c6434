"""Metrics of a round from the sums of its micro-batches, and the coefficients that a run adapts to them.

Sums and counts are added over micro-batches first and divided once: a mean of means would depend on the split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlhf.tuning.algorithms.settings import Objective, RoundSettings
from rlhf.tuning.losses.importance import RATIO_EDGES, effective_sample_size, ratio_quantile
from rlhf.tuning.losses.kl import adaptive_kl_coef
from rlhf.tuning.precision import real

QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}


def plain(value: Any) -> Any:
    """A metric as a JSON value."""
    return float(value) if isinstance(value, np.floating | jax.Array) else value


def summarise(sums: Mapping[str, float]) -> dict[str, float]:
    """Per-token means of summed metrics, but for those of `mismatch_means`."""
    n = max(sums["n_tokens"], 1.0)
    names = {"approx_kl": "approx_kl", "entropy": "entropy", "ref_kl": "kl"}
    # Present only for losses that have such a clip.
    names |= {"clip_low": "clip_low", "clip_high": "clip_high", "dual_clip": "clip_dual"}
    means = {name: sums[key] / n for key, name in names.items() if key in sums}
    if "clip_low" in sums and "clip_high" in sums:
        means["clip_fraction"] = (sums["clip_low"] + sums["clip_high"]) / n
    return means


def mismatch_means(sums: Mapping[str, float]) -> dict[str, float]:
    """The distance between sampler and trainer over the tokens with recorded log-probabilities; empty without any."""
    n = sums["old_n_tokens"]
    if not n:
        return {}
    means = {
        "mismatch_kl": sums["old_mismatch_k3"] / n,
        "effective_sample_size": effective_sample_size(sums["old_weight"], sums["old_weight_sq"]) / n,
    }
    # Quantiles do not add up over micro-batches; counts in bins do.
    bins = [sums[f"ratio_bin_{i:02d}"] for i in range(len(RATIO_EDGES) + 1)]
    return means | {name: ratio_quantile(bins, share) for name, share in QUANTILES.items()}


def pass_histogram(totals_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray) -> list[int]:
    """Prompts by the share of their completions that are right: whose total is above the middle of the round's totals.

    The middle is that of the 5 % and 95 % quantiles, which rare penalties and bonuses do not move. If these are equal,
    as in a round that is all right or all wrong, a total is right that is above 0 and not below them.
    """
    counts = [0] * 5
    totals = totals_N[valid_N]
    if not len(totals):
        return counts
    # Rewards need not be 0 and 1.
    low, high = np.quantile(totals, [0.05, 0.95], method="nearest")
    right_N = totals_N > (low + high) / 2 if low < high else (totals_N >= high) & (totals_N > 0)
    for group in np.unique(groups_N[valid_N]):
        share = right_N[(groups_N == group) & valid_N].mean()
        # A share of 1 belongs to the last bin.
        counts[min(4, int(share * 5))] += 1
    return counts


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """Weights that a run adapts: part of the policy's state, handed from round to round."""

    kl_scale: float = 1.0
    """Factor on the weights of the KL, in the loss and in the reward."""
    entropy_coef: float = 0.0
    entropy_bonus: bool = True
    """Whether the entropy bonus is in the loss: with a target, whether the last round's entropy was not above it."""

    @classmethod
    def start(cls, objective: Objective) -> Coefficients:
        """Of the first round; its entropy is unknown, so with a target it has no bonus."""
        return cls(1.0, objective.entropy_coef, objective.entropy_target is None)

    @property
    def entropy_weight(self) -> float:
        """Weight of the entropy bonus in the loss."""
        return self.entropy_coef * self.entropy_bonus

    def scalars(self) -> dict[str, Any]:
        """By name, for a batch: as constants of the program each new value would compile it again."""
        values = {"kl_scale": self.kl_scale, "entropy_coef": self.entropy_weight}
        return {name: real().type(value) for name, value in values.items()}

    def adapted(self, settings: RoundSettings) -> dict[str, float]:
        """Those that adapt, by name, as metrics."""
        scale = {} if settings.kl_target is None else {"kl_scale": self.kl_scale}
        return scale | ({} if settings.entropy_target is None else {"entropy_coef": self.entropy_weight})

    def next(self, settings: RoundSettings, metrics: Mapping[str, Any]) -> Coefficients:
        """The coefficients of the next round, from this one's metrics and the settings `kl_target`, `kl_horizon` and
        `entropy_step`.

        KL: Ziegler et al., arXiv:1909.08593, in completions. Entropy: a step up below the target and a step down above
        it, never below 0; no bonus above it (Skywork-OR1, arXiv:2505.22312, alpha_k = c_k 1[entropy <= target]).
        """
        scale, entropy, bonus = self.kl_scale, self.entropy_coef, self.entropy_bonus
        if settings.kl_target is not None and "kl" in metrics:
            scale = adaptive_kl_coef(
                scale,
                metrics["kl"],
                target=settings.kl_target,
                horizon=settings.kl_horizon,
                n_steps=metrics["kept"] * metrics["completions"],
            )
        if settings.entropy_target is not None and "entropy" in metrics:
            # A fixed step up or down, as the paper has it: no gain to tune.
            below = metrics["entropy"] < settings.entropy_target
            entropy = max(0.0, entropy + (settings.entropy_step if below else -settings.entropy_step))
            bonus = metrics["entropy"] <= settings.entropy_target
        return Coefficients(scale, entropy, bonus)
