"""Attention without a fused kernel: of whole rows at once, and in blocks of queries (after Dao et al., 2022).

In blocks, the L x L logits are never held: one block of queries at a time meets the keys before its end. Shapes are
fixed, so the keys of a block cannot end exactly at it; instead a row is divided into `STRIPES` stripes of blocks, and
every block of a stripe meets the keys up to the end of the stripe. With 4 stripes that is 5/8 of the square, where 1/2
is the least:

    queries  stripe 0 | # . . .        # computed, . skipped
             stripe 1 | # # . .
             stripe 2 | # # # .
             stripe 3 | # # # #  keys

The forward pass saves the output and each query's log-normaliser; the backward pass recomputes probabilities from them.

Axes: B rows, L tokens, N query heads, K key-value heads, G = N / K, Q queries of a block, S keys, H head size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf.tuning.models.matmul import soft_cap
from rlhf.tuning.models.remat import ATTENTION, keep

BLOCK = 128
"""Queries of a block."""
STRIPES = 4
"""Stripes of a row. More of them skip more of the square, at one more compiled loop each."""
SHORT = 1024
"""Tokens of a row up to which masks are computed once for all layers and held: a step is 2 % shorter with them."""


class Segments(NamedTuple):
    """Where each token of packed rows belongs, [B, L] each: group (0 is padding), branch, position in the group."""

    group_BL: jax.Array
    branch_BL: jax.Array
    positions_BL: jax.Array
    first: jax.Array | None = None
    """Column of the first query, where the queries are some of the L columns that follow one another; None: all."""


def visible(
    segments: Segments, window: jax.Array | int | None, start: jax.Array | int, count: int, stop: int
) -> jax.Array:
    """True where the queries [start, start + count) see the keys [0, stop), [B, Q, S]; queries count from the first.

    A token sees earlier tokens of its own group that belong to the prompt (branch 0) or to its own
    branch, and with a window those less than `window` positions before it.
    """
    if segments.first is not None:
        start = segments.first + start
    (group_q, group_k), (branch_q, branch_k), (position_q, position_k) = (
        (jax.lax.dynamic_slice_in_dim(x, start, count, axis=1)[:, :, None], x[:, None, :stop]) for x in segments[:3]
    )
    # By column, not by position: branches repeat positions.
    earlier = start + jnp.arange(count)[:, None] >= jnp.arange(stop)[None, :]
    seen = earlier & (group_q == group_k) & ((branch_q == branch_k) | (branch_k == 0))
    return seen if window is None else seen & (position_q - position_k < window)


def blocked_attention(
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    segments: Segments,
    window: jax.Array | int | None,
    scale: float,
    softcap: float | None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """softmax(mask(cap(scale * q k))) v, [B, L, N, H] in the type of v; logits and sums in at least float32.

    sinks_N: logits of one more key for each head, which has no value.

    The queries are all columns of the row, or those from `segments.first`. Such a part meets all keys: where it begins
    is not known when the program is made.
    """
    length, columns = q_BLNH.shape[1], k_BLKH.shape[1]
    of_queries = -length % BLOCK
    # Whole blocks of queries after any first column are columns too.
    of_keys = -columns % BLOCK if segments.first is None else of_queries + -(columns + of_queries) % BLOCK

    def pad(x: jax.Array, padding: int = of_keys, value: int = 0) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), constant_values=value) if padding else x

    # Padding is a separate group (-1), so that each of its queries sees itself and the softmax is finite.
    group, branch = pad(segments.group_BL, value=-1), pad(segments.branch_BL)
    padded = Segments(group, branch, pad(segments.positions_BL), segments.first)
    out = _attention(pad(q_BLNH, of_queries), pad(k_BLKH), pad(v_BLKH), sinks_N, padded, window, scale, softcap)
    return out[:, :length]


def plain_attention(
    q_BLNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    seen_BLS: jax.Array,
    scale: float,
    softcap: float | None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """softmax(mask(cap(scale * q k))) v, [B, L, N, H] in the type of v, with all logits in memory at once.

    seen_BLS: true to see; each query sees a key at least. Heads that share keys are rows of one matrix, which on a CPU
    takes four fifths of the time of `jax.nn.dot_product_attention`, and two thirds backward.
    """
    heads = k_BSKH.shape[2]
    q = _by_head(q_BLNH, heads)
    k, v = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    z = _logits(q.reshape(*q.shape[:2], -1, q.shape[-1]), k, q.shape[2], scale, softcap)
    # Weights of half types sum to 1 before they are rounded: divided after the product, the two ways through which a
    # gradient reaches the logits would be rounded apart, and what keys have in common would not cancel.
    z = jnp.where(seen_BLS[:, None, None], z, -jnp.inf)
    if sinks_N is not None:
        sinks = by_shared(sinks_N, z)
        z = jnp.concatenate([z, jnp.broadcast_to(sinks, (*z.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(z, axis=-1)[..., : k.shape[2]].astype(v.dtype)
    out = _dot(weights.reshape(*q.shape[:2], -1, k.shape[2]), v, 3, 2)
    return _by_token(out.reshape(*q.shape[:4], -1).astype(v.dtype))


def by_shared(sinks_N: jax.Array, z: jax.Array) -> jax.Array:
    """Logits of heads for arrays like z [B, K, G, ...], in its type."""
    return sinks_N.astype(z.dtype).reshape(*z.shape[1:3], *[1] * (z.ndim - 3))


def of_sinks(sinks_N: jax.Array, normaliser: jax.Array, g_dot_out: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The gradient of sinks, a sum over these axes of rows and queries: that of the logit of a key with no value."""
    shape = [1 if axis in axes else size for axis, size in enumerate(normaliser.shape)]
    weights = jnp.exp(sinks_N.astype(normaliser.dtype).reshape(shape) - normaliser)
    return -jnp.sum(weights * g_dot_out, axis=axes).reshape(sinks_N.shape).astype(sinks_N.dtype)


def _stripes(length: int, keys: int, part: bool) -> list[tuple[int, int, int]]:
    """(first query, number of blocks, number of keys) of each stripe; part: whether the queries are some columns."""
    blocks = length // BLOCK
    if part:
        return [(0, blocks, keys)]
    # Rows of fewer blocks than STRIPES get one block a stripe.
    each = -(-blocks // STRIPES)
    return [(i * BLOCK, min(each, blocks - i), min(i + each, blocks) * BLOCK) for i in range(0, blocks, each)]


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """A product over one axis of each, batched over rows and key-value heads."""
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((0, 1), (0, 1))), preferred_element_type=_accumulator(a))


def _accumulator(x: jax.Array) -> jnp.dtype:
    """The type in which sums run: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _by_head(x_BLNH: jax.Array, heads: int) -> jax.Array:
    """[B, L, N, H] -> [B, K, G, L, H]."""
    b, length, n, h = x_BLNH.shape
    return x_BLNH.reshape(b, length, heads, n // heads, h).transpose(0, 2, 3, 1, 4)


def _by_token(x_BKGLH: jax.Array) -> jax.Array:
    """[B, K, G, L, H] -> [B, L, N, H]."""
    b, k, g, length, h = x_BKGLH.shape
    return x_BKGLH.transpose(0, 3, 1, 2, 4).reshape(b, length, k * g, h)


def _logits(q_rows: jax.Array, keys: jax.Array, groups: int, scale: float, softcap: float | None) -> jax.Array:
    """[B, K, G, Q, S] in at least float32."""
    z = _dot(q_rows, keys, 3, 3) * scale
    z = soft_cap(z, softcap)
    b, k, rows, s = z.shape
    return z.reshape(b, k, groups, rows // groups, s)


def _block(x: jax.Array, start: jax.Array | int) -> jax.Array:
    """The block of [B, K, G, L, H] that begins at `start`, as [B, K, G * Q, H].

    The G query heads of a key-value head are rows of one matrix, so that products read keys and values once for all.
    """
    b, k, g, _, h = x.shape
    return jax.lax.dynamic_slice_in_dim(x, start, BLOCK, axis=3).reshape(b, k, g * BLOCK, h)


def _joined(blocks: list[jax.Array]) -> jax.Array:
    """Stripes of stacked blocks, [blocks, B, K, G, Q, H] each, as one [B, K, G, L, H]."""
    stacked = jnp.concatenate(blocks)
    n, b, k, g, q, h = stacked.shape
    return stacked.transpose(1, 2, 3, 0, 4, 5).reshape(b, k, g, n * q, h)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attention(*args: Any) -> jax.Array:
    return _forward(*args)[0]


def _forward(
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    sinks_N: jax.Array | None,
    segments: Segments,
    window: jax.Array | int | None,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    heads = k_BLKH.shape[2]
    groups = q_BLNH.shape[2] // heads
    begin: jax.Array | int = 0
    if q_BLNH.shape[1] > SHORT:
        # The same in all layers, masks would be computed before the first one and held, [N, L, L]: so they wait for q.
        q_BLNH, segments, begin = jax.lax.optimization_barrier((q_BLNH, segments, jnp.zeros((), jnp.int32)))
    q, k, v = _by_head(q_BLNH, heads), k_BLKH.transpose(0, 2, 1, 3), v_BLKH.transpose(0, 2, 1, 3)

    def block(start: jax.Array | int, stop: int) -> tuple[jax.Array, jax.Array]:
        z = _logits(_block(q, start), k[:, :, :stop], groups, scale, softcap)
        z = jnp.where(visible(segments, window, start, BLOCK, stop)[:, None, None], z, -jnp.inf)
        # Every token sees itself, so the maximum is finite.
        top = jnp.max(z, axis=-1, keepdims=True)
        if sinks_N is not None:
            top = jnp.maximum(top, by_shared(sinks_N, z))
        e = jnp.exp(z - top)
        total = jnp.sum(e, axis=-1, keepdims=True)
        if sinks_N is not None:
            total += jnp.exp(by_shared(sinks_N, z) - top)
        weights = e.astype(v.dtype).reshape(*e.shape[:2], -1, stop)
        # Dividing after the product takes H divisions a query in place of S.
        out = _dot(weights, v[:, :, :stop], 3, 2).reshape(*e.shape[:4], -1) / total
        return out.astype(v.dtype), top + jnp.log(total)

    outs, normalisers = [], []
    for first, count, stop in _stripes(q.shape[3], k.shape[2], segments.first is not None):
        starts = begin + first + BLOCK * jnp.arange(count)
        out, normaliser = jax.lax.map(functools.partial(block, stop=stop), starts)
        outs.append(out)
        normalisers.append(normaliser)
    out, normaliser = (keep(_joined(x), ATTENTION) for x in (outs, normalisers))
    return _by_token(out), (q, k, v, sinks_N, segments, window, out, normaliser)


def _backward(
    scale: float, softcap: float | None, saved: tuple[Any, ...], g_BLNH: jax.Array
) -> tuple[jax.Array | None, ...]:
    """Gradients of q, k and v, block by block. For one head, with g the gradient of the output o:

        s = scale * q k^T      z = c tanh(s / c), or s without a softcap      p = exp(z - n)      o = p v

    where n is the saved log-normaliser of a query, log(sum(exp(z))). The chain rule back through each of them:

        dv = p^T g
        dp = g v^T                     of a sink 0
        dz = p * (dp - sum(p * dp))    of the softmax; the sum over keys is g . o, as p v = o, unless o is rounded
        ds = dz * (1 - (z / c)^2)      of the softcap; tanh' = 1 - tanh^2
        dq = scale * ds k = scale * (ds (k - m) + sum(ds) m), for any m
        dk = scale * ds^T q
    """
    q, k, v, sinks_N, segments, window, out, normaliser = saved
    heads, groups = q.shape[1], q.shape[2]
    g = _by_head(g_BLNH, heads)
    # sum(p * dp), one number a query, without p.
    g_dot_out = jnp.sum(g.astype(_accumulator(g)) * out.astype(_accumulator(out)), axis=-1, keepdims=True)
    rounds = k.dtype != _accumulator(k)
    if rounds:
        # Without a softcap and sinks ds sums to 0, but rounded it does not: what keys have in common would be left.
        # Columns that fill a block up are 0.
        there = jnp.any(k != 0, axis=3, keepdims=True)
        mean = jnp.sum(k, axis=2, keepdims=True, dtype=_accumulator(k)) / jnp.sum(there, axis=2, keepdims=True).clip(1)
    k_own = (k - mean).astype(k.dtype) if rounds else k

    def block(sums: tuple[jax.Array, jax.Array], start: jax.Array | int, stop: int) -> Any:
        """Adds to (dk, dv) what one block of queries contributes, and gives its dq."""
        q_rows, g_rows = _block(q, start), _block(g, start)
        z = _logits(q_rows, k[:, :, :stop], groups, scale, softcap)
        seen = visible(segments, window, start, BLOCK, stop)[:, None, None]
        norm, dot = (jax.lax.dynamic_slice_in_dim(x, start, BLOCK, axis=3) for x in (normaliser, g_dot_out))
        # Logits are not masked here, so invisible keys are taken out of the probabilities.
        p = jnp.where(seen, jnp.exp(z - norm), 0.0)
        dp = _dot(g_rows, v[:, :, :stop], 3, 3).reshape(p.shape)
        if out.dtype != dp.dtype:
            # Of a rounded output it would be off by more than what keys have in common can bear.
            dot = jnp.sum(p * dp, axis=-1, keepdims=True)
        # scale * ds; the factor of dq and dk is put in here, once.
        ds = p * (dp - dot) * scale
        if softcap is not None:
            # z is capped already, so z / c is the tanh.
            ds = ds * (1.0 - jnp.square(z / softcap))
        flat = (*p.shape[:2], -1, stop)
        p_rows, ds_rows = p.astype(v.dtype).reshape(flat), ds.astype(k.dtype).reshape(flat)
        dq = _dot(ds_rows, k_own[:, :, :stop], 3, 2).reshape(*p.shape[:4], -1)
        if rounds and (softcap is not None or sinks_N is not None):
            dq += jnp.sum(ds, axis=-1, keepdims=True) * mean[:, :, None]
        dk, dv = sums
        return (dk + _dot(q_rows, ds_rows, 2, 2), dv + _dot(g_rows, p_rows, 2, 2)), dq

    # Gradients of keys and values as [B, K, H, L]: then the small operand of their products is the transposed one.
    dqs, dk, dv = [], *(jnp.zeros(x.swapaxes(2, 3).shape, _accumulator(x)) for x in (k, v))
    for first, count, stop in _stripes(q.shape[3], k.shape[2], segments.first is not None):
        starts = first + BLOCK * jnp.arange(count)
        zeros = tuple(jnp.zeros((*x.shape[:3], stop), x.dtype) for x in (dk, dv))
        (dk_stripe, dv_stripe), dq = jax.lax.scan(functools.partial(block, stop=stop), zeros, starts)
        dk, dv = dk.at[..., :stop].add(dk_stripe), dv.at[..., :stop].add(dv_stripe)
        dqs.append(dq)
    dq_BLNH = _by_token(_joined(dqs)).astype(q.dtype)
    dk_BLKH, dv_BLKH = (x.transpose(0, 3, 1, 2).astype(k.dtype) for x in (dk, dv))
    d_sinks = None
    if sinks_N is not None:
        d_sinks = of_sinks(sinks_N, normaliser[..., 0], g_dot_out[..., 0], (0, 3))
    return dq_BLNH, dk_BLKH, dv_BLKH, d_sinks, None, None


_attention.defvjp(_forward, _backward)
