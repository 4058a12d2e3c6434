"""The LM head without the logits: log-probabilities and entropies, forward and backward in slices of the vocabulary.

Axes: M positions, D hidden, V vocabulary, W tokens of a slice.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

ELEMENTS = 2**25
"""Logits of a slice; in float32 128 MiB."""
KEPT = 2**26
"""Up to this many logits are kept for the backward pass instead of being recomputed; in float32 256 MiB."""


def token_logps(
    hidden_MD: jax.Array,
    targets_M: jax.Array,
    weight_VD: jax.Array,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    elements: int = ELEMENTS,
    kept: int = KEPT,
) -> tuple[jax.Array, jax.Array]:
    """log softmax(z / T) of the targets and the entropy of that distribution, both [M] in float32 (or wider).

    z = hidden @ weight.T accumulates in float32; with a softcap c it becomes c * tanh(z / c). The normaliser is summed
    over slices of the vocabulary (Milakov and Gimelshein, arXiv:1805.02867), and the backward pass recomputes each
    slice (Wijmans et al., arXiv:2411.09009). So about `elements` logits are held at a time, or all of them if there
    are at most `kept`. A temperature of 0 means greedy decoding and leaves logits unscaled.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    positions, vocabulary = hidden_MD.shape[0], weight_VD.shape[0]
    # At least 128 tokens a slice. Slices get about the same size, rounded up to 128, the tile of matrix units, so that
    # the last slice repeats few tokens.
    slices = -(-vocabulary // max(128, elements // max(1, positions)))
    size = min(vocabulary, -(-vocabulary // (slices * 128)) * 128)
    return _head(hidden_MD, weight_VD, targets_M, scale, softcap, size, positions * vocabulary <= kept)


def _slice(weight_VD: jax.Array, number: jax.Array, size: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The slice's first token, its weights [W, D], and which of its tokens are new [W].

    Shapes are static, so the last slice is as wide as the others: it ends at the vocabulary's end and repeats tokens
    of the slice before it, which are not `fresh`.

        vocabulary   |---- 0 ----|---- 1 ----|---- 2 --|
        slice 2                            |---- W ----|
        fresh                               0 0 1 1 1 1
    """
    start = jnp.minimum(number * size, weight_VD.shape[0] - size)
    weight = jax.lax.dynamic_slice_in_dim(weight_VD, start, size).astype(dtype)
    return start, weight, start + jnp.arange(size) >= number * size


def _wide(hidden: jax.Array) -> jnp.dtype:
    """The type in which sums run: float32, or float64 for hidden states of that type."""
    return jnp.promote_types(hidden.dtype, jnp.float32)


def _logits(hidden: jax.Array, weight: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    z = jax.lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())), preferred_element_type=_wide(hidden))
    # The cap belongs to the model and the temperature to sampling: in this order.
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    return z * scale


def _targeted(targets: jax.Array, start: jax.Array, fresh: jax.Array) -> jax.Array:
    """Where the slice's tokens are the targets, [M, W]."""
    return (targets[:, None] - start == jnp.arange(fresh.shape[0])) & fresh


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _head(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, scale: float, softcap: float | None, size: int, keep: bool
) -> tuple[jax.Array, jax.Array]:
    # This body runs only where no gradient is taken, so no logits are kept.
    return _forward(hidden, weight, targets, scale, softcap, size, False)[0]


def _forward(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, scale: float, softcap: float | None, size: int, keep: bool
) -> Any:
    """((log-probabilities, entropies) [M], residuals): one pass over the slices with a running maximum."""

    def one(carry: Any, number: jax.Array) -> Any:
        top, total, weighted, chosen = carry
        start, part, fresh = _slice(weight, number, size, hidden.dtype)
        z = _logits(hidden, part, scale, softcap)
        # Repeated tokens do not change a maximum; the sums below leave them out.
        new_top = jnp.maximum(top, jnp.max(z, axis=-1))
        e = jnp.where(fresh, jnp.exp(z - new_top[:, None]), 0.0)
        # Moves the sums so far to the new maximum; 0 in the first slice, whose `top` is -inf.
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(e, axis=-1)
        weighted = weighted * shrink + jnp.sum(e * z, axis=-1)
        chosen = chosen + jnp.sum(jnp.where(_targeted(targets, start, fresh), z, 0.0), axis=-1)
        return (new_top, total, weighted, chosen), z if keep else None

    zeros = jnp.zeros(hidden.shape[0], _wide(hidden))
    numbers = jnp.arange(-(-weight.shape[0] // size))
    (top, total, weighted, chosen), logits = jax.lax.scan(one, (zeros - jnp.inf, zeros, zeros, zeros), numbers)
    # Entropy = logz - E[z], since -log p = logz - z.
    logz = top + jnp.log(total)
    mean = weighted / total
    return (chosen - logz, logz - mean), (hidden, weight, targets, logz, mean, logits)


def _backward(scale: float, softcap: float | None, size: int, keep: bool, saved: Any, cotangents: Any) -> Any:
    hidden, weight, targets, logz, mean, logits = saved
    g_logp, g_entropy = cotangents
    # Contracts the positions: [M, W] and [M, D] to [W, D].
    d = (((0,), (0,)), ((), ()))

    def one(carry: Any, scanned: Any) -> Any:
        dhidden, dweight = carry
        number, z = scanned
        start, part, fresh = _slice(weight, number, size, hidden.dtype)
        z = z if keep else _logits(hidden, part, scale, softcap)
        p = jnp.exp(z - logz[:, None])
        # d logp = onehot - p; d entropy = -p (z - mean).
        dz = jnp.where(_targeted(targets, start, jnp.ones_like(fresh)), g_logp[:, None], 0.0)
        dz = (dz - p * (g_logp[:, None] + g_entropy[:, None] * (z - mean[:, None]))) * scale
        if softcap is not None:
            # z is capped and scaled, so z / (scale softcap) is the tanh, whose derivative is 1 - tanh^2.
            dz = dz * (1.0 - jnp.square(z / (scale * softcap)))
        dweight_part = jax.lax.dot_general(dz.astype(hidden.dtype), hidden, d, preferred_element_type=_wide(hidden))
        dweight = jax.lax.dynamic_update_slice_in_dim(dweight, dweight_part.astype(weight.dtype), start, axis=0)
        # The last slice repeats tokens of the one before. Their rows of dweight were just written with equal values,
        # but dhidden is a sum over slices and would count them twice.
        dz = jnp.where(fresh, dz, 0.0).astype(hidden.dtype)
        dhidden = dhidden + jnp.matmul(dz, part, preferred_element_type=_wide(hidden))
        return (dhidden, dweight), None

    zeros = jnp.zeros(hidden.shape, _wide(hidden)), jnp.zeros_like(weight)
    (dhidden, dweight), _ = jax.lax.scan(one, zeros, (jnp.arange(-(-weight.shape[0] // size)), logits))
    return dhidden.astype(hidden.dtype), dweight, None


_head.defvjp(_forward, _backward)
