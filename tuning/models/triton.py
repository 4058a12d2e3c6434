"""Attention of packed rows and its gradient on GPU, by Pallas kernels that Triton compiles: no L x L array.

A query sees keys of at most two ranges of columns: of its prompt and, up to itself, of its own branch (`_limits`).
The kernels visit the blocks of keys from the first to the last that a block of queries sees, and none above the
diagonal, between groups or outside of a window. Each sum is made by one program in a fixed order, so that a replay has
the same bits. Passes are those of FlashAttention-2 (Dao, arXiv:2307.08691); gradients are derived in `blocked`.

Compared with `plain_attention` in Pallas' interpreter and compiled for H100, not run on a GPU. Rejected, in JAX 0.10.2:

- cuDNN by offsets (`jax._src.cudnn`): heads that share keys read those of wrong tokens (jax pull 39521), and in sums of
  one order its backward pass wants memory that grows with the square of a row (cudnn-frontend pull 398);
- `jax.experimental.pallas.ops.gpu.attention`: it has no windows, softcap or shared keys, visits the blocks of other
  groups, and rounds sum(g * out) to bfloat16;
- `attention_mgpu`, also of JAX: it has no causal gradient and no segments.

Axes as in `blocked`: B rows, L queries, S keys, N query heads, K key-value heads, G = N / K, H head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.models.blocked import Segments, of_sinks
from rlhf.tuning.models.matmul import soft_cap
from rlhf.tuning.models.remat import ATTENTION, keep

BLOCK = 64
"""Queries, and keys, of a block; the kernels take columns that are a multiple of it."""
LARGEST_HEAD = 256
_LOW = -1e30
"""Of a logit that does not count. Finite, so that a block without any leaves no NaN."""


def triton_attention(
    q_BLNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments: Segments,
    window: jax.Array | int | None,
    scale: float,
    softcap: float | None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """softmax(mask(cap(scale * q k))) v, [B, L, N, H] in the type of v; logits and sums in float32.

    sinks_N: as of `blocked.blocked_attention`.

    The queries are all columns of the row, or those from `segments.first`. The columns of a group follow one another,
    and within it those of the prompt and of each branch, in this order.
    """
    size = q_BLNH.shape[3]
    # Triton's arrays are powers of two; zeros add nothing to a product.
    padding = (0, pl.next_power_of_2(size) - size)
    q, k, v = (jnp.pad(x, ((0, 0),) * 3 + (padding,)) if padding[1] else x for x in (q_BLNH, k_BSKH, v_BSKH))
    limits_B4L = _limits(segments, window)
    if segments.first is not None:
        limits_B4L = jax.lax.dynamic_slice_in_dim(limits_B4L, segments.first, q.shape[1], axis=2)
    return _attention(q, k, v, sinks_N, limits_B4L, scale, softcap)[..., :size]


def _limits(segments: Segments, window: jax.Array | int | None) -> jax.Array:
    """For each query the keys that it sees, those of columns [start, stop) and [own, column], as [B, 4, columns]."""
    group, branch = segments.group_BL, segments.branch_BL
    columns = jnp.broadcast_to(jnp.arange(group.shape[1], dtype=jnp.int32), group.shape)

    def begins(ids: jax.Array) -> jax.Array:
        return jnp.diff(ids, axis=1, prepend=-1) != 0

    def latest(there: jax.Array, offset: int = 0) -> jax.Array:
        return jax.lax.cummax(jnp.where(there, columns + offset, 0), axis=1)

    start, own = latest(begins(group)), latest(begins(group) | begins(branch))
    # In the prompt itself the first range is empty.
    stop = jnp.where(branch == 0, start, latest(branch == 0, 1))
    if window is not None:
        # Positions go on from the prompt: this one is `columns - own` tokens into its branch.
        start = start + jnp.maximum(0, stop - start + columns - own - window + 1)
        own = jnp.maximum(own, columns - window + 1)
    return jnp.stack((jnp.minimum(start, stop), stop, own, columns), axis=1)


def _blocks(limits: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """The limits of blocks, in blocks: [B, 4, L / BLOCK], as `_limits`; and for each block of keys the first block of
    queries that sees any, and the number of the block after the last, [B, 2, S / BLOCK]."""
    start, stop, own, column = (x.reshape(len(x), -1, BLOCK) for x in limits.swapaxes(0, 1))
    ranges = start.min(2) // BLOCK, pl.cdiv(stop.max(2), BLOCK), own.min(2) // BLOCK, column.max(2) // BLOCK
    seen = jax.vmap(lambda *x: _seen(x, 0, keys // BLOCK))(*ranges)
    numbers = jnp.arange(seen.shape[1], dtype=jnp.int32)[:, None]
    of_keys = jnp.where(seen, numbers, len(numbers)).min(1), jnp.where(seen, numbers + 1, 0).max(1)
    return jnp.stack(ranges, axis=1), jnp.stack(of_keys, axis=1)


def _seen(limits: Any, first: jax.Array | int, keys: int) -> jax.Array:
    """True where queries of these four limits [Q] see the `keys` from the first, [Q, keys]."""
    start, stop, own, column = (x[:, None] for x in limits)
    key = (first + jnp.arange(keys, dtype=jnp.int32))[None, :]
    return ((key >= start) & (key < stop)) | ((key >= own) & (key <= column))


def _place() -> tuple[Any, Any, Any]:
    """The row, the block of columns and the head of this program."""
    return pl.program_id(1), pl.ds(pl.program_id(0) * BLOCK, BLOCK), pl.program_id(2)


def _over_keys(refs: Sequence[Any], groups: int, body: Callable[..., Any], carry: Any) -> Any:
    """`body(place of keys, mask, carry)` for each block of keys within the limits of this block of queries."""
    b, columns, n = _place()
    limits = [refs[0][b, i, columns] for i in range(4)]
    start, stop, own, column = (refs[1][b, i, pl.program_id(0)] for i in range(4))
    skipped = jnp.maximum(stop, own) - stop

    def block(number: jax.Array, carry: Any) -> Any:
        first = (number + jnp.where(number < stop, 0, skipped)) * BLOCK
        return body((b, pl.ds(first, BLOCK), n // groups), _seen(limits, first, BLOCK), carry)

    return jax.lax.fori_loop(start, column + 1 - skipped, block, carry)


def _forward_kernel(*refs: Any, groups: int, scale: float, cap: float | None) -> None:
    """Output and log-normaliser of a block of queries of one head, with a running maximum."""
    q_ref, k_ref, v_ref, sinks_ref, out_ref, norm_ref = refs[2:]
    b, columns, n = here = _place()
    q = q_ref[here]

    def body(keys: Any, seen: jax.Array, carry: Any) -> Any:
        out, top, total = carry
        v = v_ref[keys]
        z = jnp.where(seen, soft_cap(plgpu.dot(q, k_ref[keys], trans_b=True) * scale, cap), _LOW)
        higher = jnp.maximum(top, jnp.max(z, axis=1))
        e, shrink = jnp.exp(z - higher[:, None]), jnp.exp(top - higher)
        return out * shrink[:, None] + plgpu.dot(e.astype(v.dtype), v), higher, total * shrink + jnp.sum(e, axis=1)

    zeros = jnp.zeros(BLOCK, norm_ref.dtype)
    # The first key shrinks a sink of _LOW, and sums of no keys before it, to nothing.
    carry = jnp.zeros(q.shape, norm_ref.dtype), zeros + sinks_ref[n], zeros + 1
    out, top, total = _over_keys(refs, groups, body, carry)
    out_ref[here] = (out / total[:, None]).astype(out_ref.dtype)
    norm_ref[b, n, columns] = top + jnp.log(total)


def _of_logits(
    refs: Sequence[Any], at: Any, k: jax.Array, v: jax.Array, seen: jax.Array, scale: float, cap: float | None
) -> tuple[jax.Array, ...]:
    """Queries and gradients of outputs at a place, probabilities of keys, and the gradient of q k."""
    b, columns, n = at
    q, g, (norm, g_dot_out) = refs[0][at], refs[1][at], (x[b, n, columns][:, None] for x in refs[2:4])
    z = soft_cap(plgpu.dot(q, k, trans_b=True) * scale, cap)
    p = jnp.where(seen, jnp.exp(z - norm), 0.0)
    ds = p * (plgpu.dot(g, v, trans_b=True) - g_dot_out) * scale
    return q, g, p.astype(k.dtype), (ds if cap is None else ds * (1.0 - jnp.square(z / cap))).astype(k.dtype)


def _queries_kernel(*refs: Any, groups: int, **options: Any) -> None:
    """The gradient of a block of queries of one head."""
    k_ref, v_ref, dq_ref = refs[6:]
    here = _place()

    def body(keys: Any, seen: jax.Array, dq: jax.Array) -> jax.Array:
        k = k_ref[keys]
        return dq + plgpu.dot(_of_logits(refs[2:], here, k, v_ref[keys], seen, **options)[3], k)

    zeros = jnp.zeros((BLOCK, dq_ref.shape[3]), refs[4].dtype)
    dq_ref[here] = _over_keys(refs, groups, body, zeros).astype(dq_ref.dtype)


def _keys_kernel(*refs: Any, groups: int, **options: Any) -> None:
    """The gradients of a block of keys and values of one head, from all queries that share it."""
    k_ref, v_ref, dk_ref, dv_ref = refs[6:]
    b, keys, shared = here = _place()
    k, v = k_ref[here], v_ref[here]
    first, stop = (refs[1][b, i, pl.program_id(0)] for i in range(2))

    def of_head(n: jax.Array, sums: Any) -> Any:
        def body(number: jax.Array, sums: Any) -> Any:
            at = b, pl.ds(number * BLOCK, BLOCK), n
            seen = _seen([refs[0][b, i, at[1]] for i in range(4)], keys.start, BLOCK)
            q, g, p, ds = _of_logits(refs[2:], at, k, v, seen, **options)
            return sums[0] + plgpu.dot(ds, q, trans_a=True), sums[1] + plgpu.dot(p, g, trans_a=True)

        return jax.lax.fori_loop(first, stop, body, sums)

    zeros = jnp.zeros(k.shape, refs[4].dtype)
    dk, dv = jax.lax.fori_loop(shared * groups, (shared + 1) * groups, of_head, (zeros, zeros))
    dk_ref[here], dv_ref[here] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


def _call(kernel: Any, arrays: Sequence[jax.Array], outputs: Sequence[Any], *options: Any) -> Any:
    """Results like `outputs` of the kernel by a program for each block, row and head of the first of them."""
    b, length, n, size = outputs[0].shape
    return pl.pallas_call(
        functools.partial(kernel, **dict(zip(("groups", "scale", "cap"), options, strict=True))),
        grid=(length // BLOCK, b, n),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        # Eight, so that the sums of large heads stay in registers.
        compiler_params=plgpu.CompilerParams(num_warps=4 if size <= 128 else 8, num_stages=2),
        interpret=target_platform() != "gpu",
        name=kernel.__name__.strip("_"),
    )(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(*args: Any) -> jax.Array:
    return _forward(*args)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    limits: jax.Array,
    scale: float,
    cap: float | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    b, length, n, _ = q.shape
    norms = jax.ShapeDtypeStruct((b, n, length), jnp.promote_types(q.dtype, jnp.float32))
    logits = jnp.full(n, _LOW, norms.dtype) if sinks is None else sinks.astype(norms.dtype)
    arrays = limits, _blocks(limits, k.shape[1])[0], q, k, v, logits
    out, norm = (keep(x, ATTENTION) for x in _call(_forward_kernel, arrays, (q, norms), n // k.shape[2], scale, cap))
    return out, (q, k, v, sinks, limits, out, norm)


def _backward(scale: float, cap: float | None, saved: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    q, k, v, sinks, limits, out, norm = saved
    g_dot_out = jnp.einsum("blnh,blnh->bnl", g, out, preferred_element_type=norm.dtype)
    of_queries, of_keys = _blocks(limits, k.shape[1])
    arrays, options = (q, g, norm, g_dot_out, k, v), (q.shape[2] // k.shape[2], scale, cap)
    (dq,) = _call(_queries_kernel, (limits, of_queries, *arrays), (q,), *options)
    d_sinks = None if sinks is None else of_sinks(sinks, norm, g_dot_out, (0, 2))
    return dq, *_call(_keys_kernel, (limits, of_keys, *arrays), (k, v), *options), d_sinks, None


_attention.defvjp(_forward, _backward)
