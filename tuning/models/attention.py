"""Attention over packed rows. Axes as in `decoder`: B rows, L tokens, N and K heads, H head size."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tuning.models.decoder import Attention


def packed_mask(group_BL: jax.Array, branch_BL: jax.Array) -> jax.Array:
    """Who may see whom, [B, 1, L, L].

    A row holds groups (1, 2, ...; 0 is padding); a group is a prompt (branch 0) and completions
    (branches 1, 2, ...) that share it. A token sees earlier tokens of its own group that belong to
    the prompt or to its own branch.
    """
    length = group_BL.shape[1]
    earlier = jnp.tril(jnp.ones((length, length), bool))
    same_group = group_BL[:, :, None] == group_BL[:, None, :]
    same_branch = branch_BL[:, :, None] == branch_BL[:, None, :]
    from_prompt = (branch_BL == 0)[:, None, :]
    # Padding sees padding: every row of the softmax has something to sum over.
    return (earlier & same_group & (same_branch | from_prompt))[:, None]


def packed_attention(group_BL: jax.Array, branch_BL: jax.Array) -> Attention:
    """Attention for training and scoring: one mask for all layers, no cache."""
    mask = packed_mask(group_BL, branch_BL)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return jax.nn.dot_product_attention(q, k, v, mask=mask), cache

    return attention
