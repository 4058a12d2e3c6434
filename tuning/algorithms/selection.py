"""Which completions of a round count, and which of those are trained on.

    failed reward or episode                 leaves everything: baselines, whitening, coefficients, loss
    `truncated: mask`, `keep_most_varied`    likewise
    `truncated: mask-loss`                   leaves the loss; its reward counts in the baseline of its group
    group of equal rewards                   no advantage; `tied_groups` says whether it counts in its step
    round of equal rewards                   likewise, if advantages are scaled by the round

Axes: N completions of the round, T completion tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from rlhf.tuning.algorithms import registry
from rlhf.tuning.algorithms.algorithm import Algorithm, Scored, find, informative
from rlhf.tuning.algorithms.diagnostics import pass_histogram
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.round_data import Division, RoundData
from rlhf.tuning.algorithms.settings import RoundSettings
from rlhf.tuning.losses.groups import LEAST_SPREAD, informative_groups, is_informative, most_varied_groups
from rlhf.tuning.precision import real


@dataclasses.dataclass
class Selection:
    """The completions of a round as its algorithm and its settings divide them; arrays are [N] bool."""

    data: RoundData
    settings: RoundSettings
    algorithm: Algorithm
    scored: Scored
    """The round as the algorithm reads it; its penalty is 0 until a forward pass has computed the KL."""

    @classmethod
    def of(cls, data: RoundData, settings: RoundSettings) -> Selection:
        """Raise ValueError for an unknown algorithm, and for `credit: turn` without turns."""
        new = cls(data, settings, find(settings.objective), None)  # type: ignore[arg-type]
        valid_N = new.counted_N & ~new.filtered_N
        # 0 for NaN: 0 x NaN, as masks would compute it, is NaN.
        totals_N = np.where(valid_N, data.totals_N, 0.0).astype(real())
        mask = dataclasses.replace(data.sampled.only(new.in_loss(valid_N)), dtype=real())
        penalty = Column.zeros(np.zeros(mask.count, int), mask.width, real())
        turns, rewards_NT = data.turns, None
        if turns is None and settings.credit == "turn":
            raise ValueError("credit: turn needs turns, and the rollouts have none: sample them from an environment")
        if turns is not None and settings.credits_turns:
            rewards_NT = turns.token_rewards_NT(mask.dense(), settings.environment_weight)
        new.scored = Scored(totals_N, data.groups_N, valid_N, mask, penalty, data.greedy_N, turns, rewards_NT)
        return new

    @property
    def counted_N(self) -> np.ndarray:
        """Completions with a reward that counts."""
        valid_N = self.data.valid_N
        return valid_N & ~self.data.truncated_N if self.settings.truncated == "mask" else valid_N

    @property
    def filtered_N(self) -> np.ndarray:
        """Completions of the groups that `keep_most_varied` leaves out."""
        share, data = self.settings.keep_most_varied, self.data
        if share is None:
            return np.zeros(len(data.valid_N), bool)
        return ~most_varied_groups(data.totals_N, data.groups_N, self.counted_N, share)

    def in_loss(self, keep_N: np.ndarray) -> np.ndarray:
        """Those that may take part in the loss."""
        return keep_N if self.settings.truncated == "keep" else keep_N & ~self.data.truncated_N

    def candidates(self) -> np.ndarray:
        """Completions that may be trained on before the KL in the reward is known.

        Raises ValueError if the algorithm needs pairs after one prompt and a group has none.
        """
        settings = self.settings
        if self.algorithm.paired:
            self.data.check_pairs(settings.algorithm)
        if settings.kl_in_reward > 0 and (self.algorithm.keep is None or settings.entry is None):
            # Rewards that tie now may differ by their KL, which takes a forward pass; so may a choice among them.
            return self.in_loss(self.scored.valid_N)
        return self.trained()

    def trained(self) -> np.ndarray:
        """Completions in the loss, by their whole rewards (R9, R24)."""
        settings, noise = self.settings, self.is_noise()
        regularised = noise and settings.regularised and settings.tied_groups == "count"
        # A critic learns from rewards that are all equal too.
        every = self.counts_ties or regularised or (noise and settings.needs_critic)
        return self.in_loss(self.scored.valid_N if every else self.signal_N)

    @property
    def counts_ties(self) -> bool:
        """Whether groups without an advantage stay in their steps and denominators."""
        return self.algorithm.keep is None and self.settings.tied_groups == "count"

    def divided(self, keep_N: np.ndarray) -> Division:
        """The loss's completions `keep_N` in steps; micro-batches have those that may add anything but 0 to it."""
        settings = self.settings
        # A custom surrogate may have terms without an advantage; a KL in the reward that is still 0 is unknown.
        # Marks are relative to all tokens of a step.
        whole = (
            settings.regularised or settings.entry is None or settings.top_entropy is not None or self.algorithm.mark
        )
        known = settings.kl_in_reward == 0 or bool(self.scored.penalty.sums_N.any())
        computed_N = keep_N & self.signal_N if known and self.counts_ties and not whole else keep_N
        return self.data.divided(keep_N, computed_N, settings.prompts_per_step)

    def moves(self) -> bool:
        """Whether the policy takes its steps: if any loss term has a gradient, or ties count.

        A step without a gradient moves weights too, by the optimizer's momentum and weight decay.
        """
        return self.counts_ties or self.settings.regularised or bool(self.signal_N.any())

    @property
    def signal_N(self) -> np.ndarray:
        """Completions with an advantage: those of the algorithm's own rule, else informative ones."""
        if self.is_noise():
            return np.zeros(len(self.scored.valid_N), bool)
        return (self.algorithm.keep or self.algorithm.signal or informative)(self.scored)

    def is_noise(self) -> bool:
        """Whether the advantages of the round would be noise of full size: they are divided by their spread over the
        round, and the rewards of the task are equal, so that the spread is that of a critic's error or of the KL alone.
        """
        if not self.settings.scaled_by_round:
            return False
        # Equal totals may have been earned at different turns.
        of_turns = self.scored.turn_rewards_NT
        return not (of_turns is not None and of_turns.any()) and not self._teaching().any()

    def informative_count(self) -> int:
        """Groups in the loss whose task rewards, before any KL, differ from their baseline (R25).

        That is the group's own, the greedy completion's, or, for other baselines, the rewards of the round.
        """
        groups_N = self.scored.groups_N
        # A reward outside the loss may teach what is inside.
        return len({*groups_N[self._teaching()].tolist()} & {*groups_N[self.in_loss(self.scored.valid_N)].tolist()})

    def overview(self, keep_N: np.ndarray) -> dict[str, Any]:
        """Metrics of the data, and of the trained completions, `keep_N`."""
        data, filtered_N = self.data, self.filtered_N
        groups = {*data.groups_N[~filtered_N].tolist()}
        metrics: dict[str, Any] = {
            "kept": float(keep_N.mean()),
            "tied": len(groups - {*data.groups_N[self.signal_N].tolist()}),
            "completions": len(data.completions),
            "groups": len(groups),
            "informative": self.informative_count(),
            "pass_histogram": pass_histogram(data.totals_N, data.groups_N, data.valid_N),
        }
        if filtered_N.any():
            metrics["filtered"] = len({*data.groups_N[filtered_N].tolist()})
        return metrics

    def _teaching(self) -> np.ndarray:
        """Completions whose rewards, before any KL, differ from their baseline."""
        scored, settings = self.scored, self.settings
        if settings.needs_greedy and scored.greedy_N is not None:
            # A greedy completion without a reward is NaN, which compares as no difference.
            return scored.valid_N & (np.abs(scored.totals_N - scored.greedy_N) >= LEAST_SPREAD)
        own = self.algorithm
        if own.keep is None or own.paired or settings.algorithm in registry.GROUP_BASELINE:
            return informative_groups(scored.totals_N, scored.groups_N, scored.valid_N)
        return scored.valid_N & is_informative(scored.totals_N[scored.valid_N])
