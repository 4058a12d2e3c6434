"""Masks and positions of completions.

Axes: B completions (rows), T completion tokens. A mask is 1 (or True) on tokens that count. Masked positions
may hold anything, NaN and infinity included: every loss replaces them with `masked` before it does arithmetic,
since `0 * inf` is NaN in the value and in the gradient.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def masked(x: jax.Array, mask: jax.Array, fill: float = 0.0) -> jax.Array:
    """`x` where the mask is set, `fill` elsewhere; shapes broadcast; no gradient reaches masked positions."""
    return jnp.where(mask > 0, x, jnp.asarray(fill, x.dtype))


def row_sum(x_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Sum over each row's valid tokens, [B, 1]."""
    return masked(x_BT, mask_BT).sum(-1, keepdims=True)


def row_mean(x_BT: jax.Array, mask_BT: jax.Array, eps: float = 0.0) -> jax.Array:
    """Mean over each row's valid tokens, [B, 1]; 0 for a row of none."""
    length = jnp.maximum((mask_BT > 0).sum(-1, keepdims=True), 1)
    return row_sum(x_BT, mask_BT) / (length.astype(x_BT.dtype) + eps)


def segment_total(x_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """For each token of a packed row the sum over the valid tokens of its segment, [B, T].

    Segment ids are integers in 0..T that mark the sequences of a row.
    """
    rows = jnp.arange(x_BT.shape[0])[:, None]
    totals = jnp.zeros((x_BT.shape[0], x_BT.shape[1] + 1), x_BT.dtype)
    totals = totals.at[rows, segment_ids_BT].add(masked(x_BT, mask_BT))
    return jnp.take_along_axis(totals, segment_ids_BT, axis=-1)


def sequence_sum(x_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array | None = None) -> jax.Array:
    """Sum over the sequence of each token: [B, 1] for one sequence a row, [B, T] for packed rows."""
    return row_sum(x_BT, mask_BT) if segment_ids_BT is None else segment_total(x_BT, mask_BT, segment_ids_BT)


def sequence_mean(x_BT: jax.Array, mask_BT: jax.Array, segment_ids_BT: jax.Array | None = None) -> jax.Array:
    """Mean over the sequence of each token: [B, 1] for one sequence a row, [B, T] for packed rows."""
    length = sequence_sum(jnp.ones_like(x_BT), mask_BT, segment_ids_BT)
    return sequence_sum(x_BT, mask_BT, segment_ids_BT) / jnp.maximum(length, 1)


def per_token(x: jax.Array, like_BT: jax.Array) -> jax.Array:
    """Broadcast [B] or [B, 1] values over the tokens of their rows; [B, T] values stay."""
    x = x[:, None] if x.ndim == 1 else x
    return jnp.broadcast_to(x, like_BT.shape)


def finite_mask(mask_BT: jax.Array, *logps_BT: jax.Array) -> jax.Array:
    """The mask without tokens for which any of the given log-probabilities is not finite.

    Such a token leaves the numerator and the denominator alike: count tokens with the mask this returns.
    """
    keep = mask_BT > 0
    for logps in logps_BT:
        keep = keep & jnp.isfinite(logps)
    return keep.astype(mask_BT.dtype)


def completion_mask_from_lengths(lengths_B: jax.Array, width: int) -> jax.Array:
    """1 on the first `lengths_B[b]` positions, [B, width]. Lengths count the end-of-sequence token."""
    return (jnp.arange(width)[None, :] < lengths_B[:, None]).astype(jnp.int32)


def completion_mask(completion_ids_BT: jax.Array, eos_ids: Sequence[int]) -> jax.Array:
    """1 up to and including the first token that is one of `eos_ids`; all ones for a row without one.

    Recorded lengths (`completion_mask_from_lengths`) are preferred wherever they exist.
    """
    is_eos = jnp.isin(completion_ids_BT, jnp.asarray(list(eos_ids))).astype(jnp.int32)
    seen_before = jnp.cumsum(is_eos, axis=-1) - is_eos
    return (seen_before == 0).astype(jnp.int32)


def positions_from_mask(mask_BT: jax.Array) -> jax.Array:
    """Position of each token counted over valid tokens, from 0; constant on padding, 0 before the first token."""
    return jnp.maximum(jnp.cumsum((mask_BT > 0).astype(jnp.int32), axis=-1) - 1, 0)
