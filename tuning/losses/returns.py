"""Advantages and returns per token: whitening, GAE, reward-to-go, ReMax.

Axes: B completions, T completion tokens. Everything is [B, T] and 0 where masked. Whitening takes its statistics
from all valid tokens of its arguments, so pass the whole batch.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rlhf.tuning.losses.masks import masked


def whiten(
    x_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    variance_floor: float = 0.0,
    shift_mean: bool = True,
    scale: bool = True,
) -> jax.Array:
    """(x - mean) * rsqrt(max(var, variance_floor) + eps) over valid tokens, [B, T]; 0 where masked.

    shift_mean=False adds the mean back; scale=False only removes it.
    """
    # From the least value on: in float32 the mean of values such as 1000.01 is off by more than their differences.
    least = masked(x_BT, mask_BT, jnp.inf).min(keepdims=True, initial=jnp.inf)
    above = masked(x_BT - least, mask_BT)
    # Two passes: the variance of centred values does not cancel, as sum(x^2) - n mean^2 does.
    n = (mask_BT > 0).sum(keepdims=True).astype(x_BT.dtype)
    mean = above.sum(keepdims=True) / jnp.maximum(n, 1)
    centred = masked(above - mean, mask_BT)
    if scale:
        variance = (centred**2).sum(keepdims=True) / jnp.maximum(n - ddof, 1)
        variance = jnp.maximum(variance, variance_floor) + eps
        # With eps = 0 a constant batch has variance 0 and stays 0.
        centred = centred * jnp.where(variance > 0, jax.lax.rsqrt(variance), 0)
    return centred if shift_mean else masked(centred + mean + least, mask_BT)


@jax.jit
def _backward_recursion(add_BT: jax.Array, decay_BT: jax.Array, last_B: jax.Array) -> jax.Array:
    """y_t = add_t + decay_t * y_{t+1} along the last axis, with y_T = last."""

    def step(carry: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        add, decay = inputs
        carry = add + decay * carry
        return carry, carry

    _, ys = jax.lax.scan(step, last_B, (add_BT.T, decay_BT.T), reverse=True)
    return ys.T


def _following(values_BT: jax.Array, mask_BT: jax.Array, last_B: jax.Array) -> jax.Array:
    """The value after each token, [B, T]: that of the next valid one, or `last`."""
    return jnp.concatenate([_backward_recursion(values_BT, 1 - mask_BT, last_B)[:, 1:], last_B[:, None]], -1)


def gae(
    rewards_BT: jax.Array,
    values_BT: jax.Array,
    mask_BT: jax.Array,
    gamma: float = 1.0,
    lam: float = 0.95,
    *,
    gaps: Literal["skipped", "discounted"] = "skipped",
    bootstrap_B: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (arXiv:1506.02438): advantages and returns, both [B, T], 0 where masked.

    A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; returns = A + V. The value after the last
    token is `bootstrap_B`, or 0 without it. `gaps` says what masked tokens inside a row (tool output) are:

        tokens         a   b   .   .   c        (. masked)
        "skipped"      a - b - - - - - c        c follows b, one discount
        "discounted"   a - b - 0 - 0 - c        two further steps of reward 0 and value 0

    Advantages are raw; see `whiten`.
    """
    rewards, values = masked(rewards_BT, mask_BT), masked(values_BT, mask_BT)
    m = (mask_BT > 0).astype(rewards.dtype)
    last = jnp.zeros(rewards.shape[0], rewards.dtype) if bootstrap_B is None else bootstrap_B.astype(rewards.dtype)
    zero = jnp.zeros_like(last)
    if gaps == "skipped":
        delta = m * (rewards + gamma * _following(values, m, last) - values)
        # A masked token passes on what comes after it: decay 1, delta 0.
        advantages = _backward_recursion(delta, m * (gamma * lam) + (1 - m), zero)
    else:
        following = jnp.concatenate([values[:, 1:], last[:, None]], -1)
        advantages = _backward_recursion(
            rewards + gamma * following - values, jnp.full_like(m, gamma * lam), zero
        )  # fmt: skip
    return masked(advantages, mask_BT), masked(advantages + values, mask_BT)


def bi_level_gae(
    rewards_BT: jax.Array,
    values_BT: jax.Array,
    mask_BT: jax.Array,
    ends_BT: jax.Array,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    high_gamma: float = 0.95,
    high_lam: float = 0.95,
    bootstrap_B: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """GAE over turns, then over the tokens of each turn (VAGEN, RAGEN): advantages and returns, [B, T], 0 where masked.

    ends_BT: the last valid token of each turn, given and not found by its reward, since a turn's reward may be 0. With
    e(k) the end of turn k,

        A_e(k) = delta_k + high_gamma high_lam A_e(k+1),  delta_k = r_e(k) + high_gamma V_e(k+1) - V_e(k)

    and within a turn `gae` with gamma and lam, where the end's reward is the turn's return A_e(k) + V_e(k) and nothing
    follows it. After the last turn the value is `bootstrap_B`, or 0. Advantages are raw; see `whiten`.
    """
    ends = (ends_BT > 0) & (mask_BT > 0)
    _, of_turns = gae(rewards_BT, values_BT, ends, high_gamma, high_lam, bootstrap_B=bootstrap_B)
    rewards = masked(jnp.where(ends, of_turns, rewards_BT), mask_BT)
    values = masked(values_BT, mask_BT)
    m = (mask_BT > 0).astype(rewards.dtype)
    zero = jnp.zeros(rewards.shape[0], rewards.dtype)
    inside = m * (1 - ends.astype(rewards.dtype))
    delta = m * (rewards - values) + inside * gamma * _following(values, m, zero)
    advantages = _backward_recursion(delta, inside * (gamma * lam) + (1 - m), zero)
    return masked(advantages, mask_BT), masked(advantages + values, mask_BT)


def reward_to_go(
    rewards_BT: jax.Array,
    mask_BT: jax.Array,
    gamma: float = 1.0,
    *,
    gaps: Literal["skipped", "discounted", "reset"] = "discounted",
) -> jax.Array:
    """Discounted sum of the rewards from each token on, [B, T], 0 where masked.

    Masked tokens inside a row are "discounted" steps of reward 0, or "skipped" without a discount, or "reset" the sum,
    so that later rewards do not reach earlier tokens.
    """
    rewards = masked(rewards_BT, mask_BT)
    m = (mask_BT > 0).astype(rewards.dtype)
    decay = {"discounted": jnp.full_like(m, gamma), "skipped": m * gamma + (1 - m), "reset": m * gamma}[gaps]
    returns = _backward_recursion(rewards, decay, jnp.zeros(rewards.shape[0], rewards.dtype))
    return masked(returns, mask_BT)


def remax_advantages(
    rewards_BT: jax.Array, greedy_rewards_B: jax.Array, mask_BT: jax.Array, gamma: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """ReMax (arXiv:2310.10505): reward-to-go less the reward of the greedy completion; advantages, returns [B, T]."""
    returns = reward_to_go(rewards_BT, mask_BT, gamma)
    return masked(returns - greedy_rewards_B[:, None], mask_BT), returns
