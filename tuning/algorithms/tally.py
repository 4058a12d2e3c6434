"""Sums over the optimizer steps of a round, and the metrics that follow from them (R19)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

from rlhf.tuning.algorithms.diagnostics import mismatch_means, summarise
from rlhf.tuning.training.step import Sums


@dataclasses.dataclass
class Tally:
    """Sums over the steps of policy and critic. A step that was skipped trained nothing, and its sums need not be
    finite (R24)."""

    by_sampler: bool = False
    """Whether log pi_old is the sampler's: then only steps before the policy's first move measure the gap between
    sampler and trainer (`mismatch_kl`); later steps measure the policy's drift from the sampler (`drift_kl`)."""
    sums: Counter[str] = dataclasses.field(default_factory=Counter)
    apart: Counter[str] = dataclasses.field(default_factory=Counter)
    """The same, of steps that measure the gap between sampler and trainer."""
    drifts: list[float] = dataclasses.field(default_factory=list)
    """`drift_kl` of each step that measures it."""
    norms: list[float] = dataclasses.field(default_factory=list)
    """Of the gradients of each step that was not skipped."""
    skipped: int = 0
    trained: float = 0.0
    """Tokens in the loss."""
    tokens: int = 0
    """Tokens in rows, padding not counted."""
    value_sums: Counter[str] = dataclasses.field(default_factory=Counter)
    value_steps: int = 0

    def add(self, step: Sums, unpacked: int = 0) -> dict[str, float]:
        """Adds a step of the policy; its own metrics. unpacked: tokens of the loss that were in no micro-batch."""
        # A norm is not a sum: kept apart from what is added over steps.
        norm, skip = step.pop("grad_norm"), step.pop("skipped")
        apart = mismatch_means(step)
        if self.by_sampler and self.norms:
            apart = {"drift_kl": apart["mismatch_kl"]} if apart else {}
            self.drifts += apart.values()
        elif not skip:
            self.apart.update(step)
        self.skipped += int(skip)
        if not skip:
            self.norms.append(norm)
            self.sums.update(step)
            self.trained += step["old_n_tokens"] + unpacked
        return {"grad_norm": norm} | summarise(step) | apart

    def add_value(self, step: Sums) -> None:
        """Adds a step of the critic."""
        if not step["skipped"]:
            self.value_sums.update(step)
            self.value_steps += 1

    def metrics(self) -> dict[str, Any]:
        """Of the policy over the round."""
        metrics: dict[str, Any] = {"steps": len(self.norms) + self.skipped, "skipped": self.skipped}
        metrics["row_tokens"] = self.tokens
        if self.drifts:
            metrics["drift_kl"] = max(self.drifts)
        if self.norms:
            metrics |= summarise(self.sums) | mismatch_means(self.apart)
            metrics |= {"loss": self.sums["loss"] / len(self.norms), "grad_norm": float(np.mean(self.norms))}
            # Of all epochs: for audits, which count what may be trained on in the tables.
            metrics["trained_tokens"] = round(self.trained)
        return metrics

    def value_metrics(self, returns: np.ndarray) -> dict[str, float]:
        """Of the critic; none where it made no step. returns: of the tokens that were trained."""
        if not self.value_steps:
            return {}
        n = max(self.value_sums["n_tokens"], 1.0)
        return {
            "value_loss": self.value_sums["loss"] / self.value_steps,
            "value_clipped": self.value_sums["value_clipped"] / n,
            # All returns of a round may be equal.
            "value_explained": 1.0 - self.value_sums["value_error_sq"] / n / max(float(np.var(returns)), 1e-12),
        }
