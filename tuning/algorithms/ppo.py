"""PPO for language models (Schulman et al., 2017; Ouyang et al., 2022): token advantages from a critic by GAE."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tuning.algorithms.advantages import gae, whiten
from tuning.losses.aggregate import aggregate
from tuning.losses.rewards import kl_in_reward
from tuning.losses.value import value_loss
from tuning.training.forward import Compute, values
from tuning.training.step import LossFn


@dataclasses.dataclass(frozen=True)
class Critic:
    """How the critic is used and trained."""

    gamma: float = 1.0
    lam: float = 0.95
    value_clip: float | None = 0.2
    kl_in_reward: float = 0.0


def token_advantages(
    totals_N: np.ndarray,
    old_NT: np.ndarray,
    ref_NT: np.ndarray,
    values_NT: np.ndarray,
    mask_NT: np.ndarray,
    critic: Critic,
) -> tuple[np.ndarray, np.ndarray]:
    """Whitened advantages and returns, both [N, T].

    The reward is the score on the last token (R12) minus k1 to the reference on each.
    """
    rewards, _ = kl_in_reward(
        jnp.asarray(totals_N), jnp.asarray(old_NT), jnp.asarray(ref_NT), jnp.asarray(mask_NT), coef=critic.kl_in_reward
    )
    raw, returns = gae(rewards, jnp.asarray(values_NT), jnp.asarray(mask_NT), gamma=critic.gamma, lam=critic.lam)
    return np.asarray(whiten(raw, jnp.asarray(mask_NT)), np.float32), np.asarray(returns, np.float32)


def critic_loss(graph: Any, critic: Critic, compute: Compute) -> LossFn:
    """Clipped value loss of a micro-batch with `returns_CT` and `old_values_CT`, token mean over the step."""

    def loss(params: Any, batch: dict[str, jax.Array], frozen: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        mask = batch["mask_CT"]
        found, sums = value_loss(
            values(graph, params, batch, compute),
            batch["returns_CT"],
            mask,
            old_values_BT=batch["old_values_CT"],
            clip=critic.value_clip,
        )
        value = aggregate(found, mask, "token-mean", n_tokens=batch["n_tokens"], n_sequences=batch["n_completions"])
        return value, {k: jnp.asarray(v, jnp.float32) for k, v in sums.items()}

    return loss
