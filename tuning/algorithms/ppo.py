"""PPO for language models (Schulman et al., 2017; Ouyang et al., 2022): token advantages from a critic by GAE.

    A_it = whiten(sum_k (gamma lam)^k delta_i,t+k),  delta_t = reward_t + gamma V_t+1 - V_t
    policy: -min(r_it A_it, clip(r_it) A_it)         critic: value_loss(V_it, return_it), clipped

Of an environment's trajectory reward_t holds what each turn earned at the turn's last token; observations are no steps.
With `bi_level_gae` the recursion is over turns first (`returns.bi_level_gae`).

Settings: `settings.CriticSettings`; presets: `registry` (ppo).

Axes: N completions of the round, C completions of a micro-batch, T completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Scored, clipped, every_valid
from rlhf.tuning.algorithms.flat import Column, Flat, blocks, lengths_of, rows_of
from rlhf.tuning.algorithms.settings import CriticSettings
from rlhf.tuning.algorithms.whitening import whiten
from rlhf.tuning.device import Compute
from rlhf.tuning.losses.aggregate import aggregate
from rlhf.tuning.losses.returns import bi_level_gae, gae
from rlhf.tuning.losses.value import value_loss
from rlhf.tuning.precision import real
from rlhf.tuning.training.forward import values
from rlhf.tuning.training.step import LossFn


@dataclasses.dataclass(frozen=True)
class Judged:
    """The critic's values of a round before its update."""

    values_NT: np.ndarray | Column
    """Value of the state in which each token was chosen."""
    after_N: np.ndarray
    """Value of the state after the last token."""
    truncated_N: np.ndarray
    """Completions that max_tokens or a limit of their episodes cut off, and no environment ended, [N] bool."""

    def some(self, ids: Sequence[int]) -> Judged:
        """Those of some completions, dense."""
        rows = list(ids)
        return Judged(rows_of(self, "values_NT", rows), self.after_N[rows], self.truncated_N[rows])


def algorithm(objective: Objective) -> Algorithm:
    """The policy's half; the advantages come from `token_advantages`, which needs the critic's values."""

    def advantages(scored: Scored) -> jax.Array:
        raise TypeError("ppo takes its advantages from a critic")

    return Algorithm(advantages, clipped(objective), keep=every_valid)


def token_advantages(
    scored: Scored, judged: Judged, critic: CriticSettings, lam: float | None = None
) -> tuple[Flat, Flat]:
    """Whitened advantages and returns of every token; `lam` in place of the critic's own (1: Monte Carlo).

    The reward is the score on the last token (R12) less the KL on each. With `whiten_rewards` all token rewards of
    the round are divided by their spread, the mean kept (Ziegler et al., arXiv:1909.08593). With `bootstrap_truncated`
    a truncated completion is continued by the value of its last state, since it has not ended (Pardo et al.,
    arXiv:1712.00378). Raises ValueError for `bi_level_gae` without turns.
    """
    # By blocks of rows: a round with one long completion, padded all at once, would be several times its tokens.
    lengths_N, width = lengths_of(judged, "values_NT"), scored.width
    advantages, returns = (Flat.zeros(lengths_N, width, real()) for _ in range(2))
    rewards = None
    if critic.whiten_rewards:
        rewards = Flat.zeros(lengths_N, width, real())
        for rows in blocks(rewards.count, width):
            rewards.put(rows, np.asarray(scored.some(rows).rewards_NT))
        whiten(rewards, scored, shift_mean=False)
    for rows in blocks(advantages.count, width):
        some = scored.some(rows)
        rewards_CT = some.rewards_NT if rewards is None else jnp.asarray(rewards.gathered(rows))
        raw_CT, returns_CT = _estimated(some, rewards_CT, judged.some(rows), critic, lam)
        advantages.put(rows, np.asarray(raw_CT, real()))
        returns.put(rows, np.asarray(returns_CT, real()))
    # Whitened for the policy only: the critic learns returns in the scale of the rewards.
    whiten(advantages, scored)
    return advantages, returns


def _estimated(
    scored: Scored, rewards_CT: jax.Array, judged: Judged, critic: CriticSettings, lam: float | None
) -> tuple[jax.Array, jax.Array]:
    """Raw advantages and returns of some completions, both [C, T]."""
    mask_CT = jnp.asarray(scored.mask_NT)
    # A completion that ended has value 0 behind its last token.
    after = np.where(judged.truncated_N, judged.after_N, 0.0).astype(real())
    of_tokens = critic.lam if lam is None else lam
    arrays = (rewards_CT, jnp.asarray(judged.values_NT), mask_CT)
    bootstrap_B = jnp.asarray(after) if critic.bootstrap_truncated else None
    if not critic.bi_level_gae:
        return gae(*arrays, gamma=critic.gamma, lam=of_tokens, bootstrap_B=bootstrap_B)
    if scored.turns is None:
        raise ValueError("critic.bi_level_gae needs turns, and the rollouts have none: sample them from an environment")
    own = critic.lam if critic.high_level_lam is None else critic.high_level_lam
    return bi_level_gae(
        *arrays,
        jnp.asarray(scored.turns.ends_NT(scored.mask_NT)),
        gamma=critic.gamma,
        lam=of_tokens,
        high_gamma=critic.high_level_gamma,
        high_lam=own if lam is None else lam,
        bootstrap_B=bootstrap_B,
    )


def critic_loss(graph: Any, critic: CriticSettings, compute: Compute) -> LossFn:
    """Clipped value loss of a micro-batch with `returns_CT` and `old_values_CT`, token mean over the step."""

    def loss(params: Any, batch: dict[str, jax.Array], frozen: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        mask = batch["mask_CT"]
        losses, sums = value_loss(
            values(graph, params, batch, compute),
            batch["returns_CT"],
            mask,
            old_values_BT=batch["old_values_CT"],
            clip=critic.value_clip,
        )
        value = aggregate(losses, mask, "token-mean", n_tokens=batch["n_tokens"], n_sequences=batch["n_completions"])
        return value, {k: jnp.asarray(v, real()) for k, v in sums.items()}

    return loss
