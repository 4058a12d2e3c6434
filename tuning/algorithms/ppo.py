"""PPO for language models (Schulman et al., 2017; Ouyang et al., 2022): token advantages from a critic by GAE.

    A_it = whiten(sum_k (gamma lam)^k delta_i,t+k),  delta_t = reward_t + gamma V_t+1 - V_t
    policy: -min(r_it A_it, clip(r_it) A_it)         critic: value_loss(V_it, return_it), clipped

In an environment's trajectory reward_t holds the reward of each turn at the turn's last token; observations are not
steps.
With `bi_level_gae` the recursion is over turns first (`returns.bi_level_gae`).

Settings: `settings.CriticSettings`; presets: `registry` (ppo).

Axes: N completions of the round, C completions of a micro-batch, T completion tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms.algorithm import Algorithm, Objective, Scored, clipped, every_valid
from rlhf.tuning.algorithms.flat import Column, whiten
from rlhf.tuning.algorithms.settings import CriticSettings
from rlhf.tuning.device import Compute
from rlhf.tuning.losses.aggregate import aggregate
from rlhf.tuning.losses.returns import bi_level_gae, gae
from rlhf.tuning.losses.value import value_loss
from rlhf.tuning.precision import real
from rlhf.tuning.training.forward import values
from rlhf.tuning.training.step import Batch, LossFn, Tree


def algorithm(objective: Objective) -> Algorithm:
    """The policy's half; the advantages come from `token_advantages`, which needs the critic's values."""

    def advantages(scored: Scored) -> jax.Array:
        raise TypeError("ppo takes its advantages from a critic")

    return Algorithm(advantages, clipped(objective), keep=every_valid)


def token_advantages(
    scored: Scored, values: Column, after_N: np.ndarray, critic: CriticSettings, lam: float | None = None
) -> tuple[Column, Column]:
    """Whitened advantages and returns of every token; `lam` replaces the critic's own (1: Monte Carlo).

    values: of the states in which tokens were chosen. after_N: of the state after the last token of a completion that a
    limit cut off, 0 for others.

    The reward is the score on the last token (R12) less the KL on each. With `whiten_rewards` all token rewards of
    the round are divided by their spread, the mean kept (Ziegler et al., arXiv:1909.08593). With `bootstrap_truncated`
    a truncated completion is continued by the value of its last state, since it has not ended (Pardo et al.,
    arXiv:1712.00378). Raises ValueError for `bi_level_gae` without turns.
    """
    # By blocks of rows: a round with one long completion, padded all at once, would be several times its tokens.
    rewards, advantages, returns = (Column.zeros(values.lengths_N, values.width, real()) for _ in range(3))
    for rows in rewards.blocks():
        rewards.put(rows, np.asarray(scored[rows].rewards_NT))
    if critic.whiten_rewards:
        whiten(rewards, scored.mask, shift_mean=False)
    for rows in rewards.blocks():
        raw_CT, returns_CT = _estimated(
            scored[rows], rewards.gather(rows), values.gather(rows), after_N[rows], critic, lam
        )
        advantages.put(rows, np.asarray(raw_CT, real()))
        returns.put(rows, np.asarray(returns_CT, real()))
    # Whitened for the policy only: the critic learns returns in the scale of the rewards.
    whiten(advantages, scored.mask)
    return advantages, returns


def _estimated(
    scored: Scored,
    rewards_CT: np.ndarray,
    values_CT: np.ndarray,
    after_C: np.ndarray,
    critic: CriticSettings,
    lam: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Raw advantages and returns of some completions, both [C, T]."""
    mask_CT = scored.mask_NT
    arrays = jnp.asarray(rewards_CT), jnp.asarray(values_CT), jnp.asarray(mask_CT)
    options: dict[str, Any] = {
        "gamma": critic.gamma,
        "lam": critic.lam if lam is None else lam,
        "bootstrap_B": jnp.asarray(after_C, real()) if critic.bootstrap_truncated else None,
    }
    if not critic.bi_level_gae:
        return gae(*arrays, **options)
    if scored.turns is None:
        raise ValueError("critic.bi_level_gae needs turns, and the rollouts have none: sample them from an environment")
    own = critic.lam if critic.high_level_lam is None else critic.high_level_lam
    ends_CT = jnp.asarray(scored.turns.ends_NT(mask_CT))
    high_lam = own if lam is None else lam
    return bi_level_gae(*arrays, ends_CT, high_gamma=critic.high_level_gamma, high_lam=high_lam, **options)


def critic_loss(graph: Any, critic: CriticSettings, compute: Compute) -> LossFn:
    """Clipped value loss of a micro-batch with `returns_CT` and `old_values_CT`, token mean over the step."""

    def loss(params: Tree, batch: Batch, frozen: Tree) -> tuple[jax.Array, Batch]:
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
