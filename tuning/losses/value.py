"""Value losses of PPO (arXiv:1707.06347)."""

import jax
import jax.numpy as jnp

from rlhf.tuning.losses.masks import masked


def value_loss(
    values_BT: jax.Array,
    returns_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    old_values_BT: jax.Array,
    clip: float | None,
    factor: float = 0.5,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Squared error of the predicted values, optionally clipped about the old values. All arguments [B, T].

    loss = factor * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2); without `clip` the first term alone.
    Returns per-token losses [B, T] (0 where masked) and sums: `value_clipped` (tokens on which the clipped
    branch is the larger), `value_error_sq`, `n_tokens`.
    """
    values, returns = masked(values_BT, mask_BT), masked(returns_BT, mask_BT)
    error = (values - returns) ** 2
    loss, clipped = error, jnp.zeros_like(error)
    if clip is not None:
        old = masked(old_values_BT, mask_BT)
        error_clipped = (jnp.clip(values, old - clip, old + clip) - returns) ** 2
        loss, clipped = jnp.maximum(error, error_clipped), (error_clipped > error).astype(error.dtype)
    sums = {
        "value_clipped": clipped.sum(),
        "value_error_sq": error.sum(),
        "n_tokens": (mask_BT > 0).sum().astype(error.dtype),
    }
    return factor * loss, jax.tree.map(jax.lax.stop_gradient, sums)
