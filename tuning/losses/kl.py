"""Per-token estimators of KL(pi || ref) from sampled tokens, and the adaptive coefficient.

With d = log ref - log pi on a token sampled from pi (Schulman, "Approximating KL divergence", 2020):

    k1 = -d          unbiased as a value; its gradient has expectation zero
    k2 = d^2 / 2     biased as a value; its gradient is unbiased for on-policy samples
    k3 = e^d - d - 1 unbiased and non-negative as a value; its gradient is biased
    abs = |d|

As a loss, `kind="k3", straight_through="k2"` gives the value of k3 with the gradient of k2. As a reward term,
use k1 of the old policy (`rlhf.tuning.losses.rewards`).
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rlhf.tuning.losses.masks import masked

KLKind = Literal["k1", "k2", "k3", "abs"]
StraightThrough = Literal["k2", "weighted-k2"]
Clamp = tuple[float | None, float | None]


def clamp(x: jax.Array, bounds: Clamp | None) -> jax.Array:
    """`x` limited to `bounds`, without gradient outside them. None leaves a side open."""
    return x if bounds is None else jnp.clip(x, bounds[0], bounds[1])


def kl_per_token(
    logps_BT: jax.Array,
    ref_logps_BT: jax.Array,
    kind: KLKind = "k3",
    *,
    mask_BT: jax.Array | None = None,
    log_ratio_clamp: Clamp | None = (-20.0, 20.0),
    value_clamp: Clamp | None = None,
    straight_through: StraightThrough | None = None,
    old_logps_BT: jax.Array | None = None,
    weight_max: float | None = None,
) -> jax.Array:
    """KL estimate of every token, [B, T]; 0 where masked.

    log_ratio_clamp limits d = ref_logps - logps, value_clamp the estimate; clamps stop the gradient outside.
    straight_through keeps the value and takes the gradient of the unclamped k2 ("k2"), or of that times the
    stop-gradient weight exp(logps - old_logps), limited to `weight_max` ("weighted-k2", for off-policy samples).
    Raises ValueError for an unknown kind.
    """
    if mask_BT is not None:
        logps_BT, ref_logps_BT = masked(logps_BT, mask_BT), masked(ref_logps_BT, mask_BT)
    d_full = ref_logps_BT - logps_BT
    d = clamp(d_full, log_ratio_clamp)
    match kind:
        case "k1":
            value = -d
        case "k2":
            value = d**2 / 2
        case "k3":
            value = jnp.exp(d) - d - 1
        case "abs":
            value = jnp.abs(d)
        case _:
            raise ValueError(f"unknown KL estimator {kind!r}")
    value = clamp(value, value_clamp)
    if straight_through is None:
        return value
    # Unclamped: a clamp would stop the gradient on the tokens that are furthest from the reference.
    surrogate = d_full**2 / 2
    if straight_through == "weighted-k2":
        assert old_logps_BT is not None
        old = old_logps_BT if mask_BT is None else masked(old_logps_BT, mask_BT)
        weight = jnp.exp(jnp.clip(jax.lax.stop_gradient(logps_BT) - old, -20, 20))
        surrogate = (weight if weight_max is None else jnp.minimum(weight, weight_max)) * surrogate
    # In the forward pass the surrogate cancels; in the backward pass only the surrogate is left.
    return jax.lax.stop_gradient(value - surrogate) + surrogate


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: float, n_steps: float) -> float:
    """Next KL coefficient, coef * (1 + clip(kl / target - 1, -0.2, 0.2) n_steps / horizon); arXiv:1909.08593.

    kl: the mean KL of the last batch. n_steps: samples in it. horizon: samples over which the error is corrected.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * n_steps / horizon)
