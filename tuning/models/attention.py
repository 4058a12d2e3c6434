"""Attention over packed rows, and which implementation computes it. Axes as in `decoder`: B rows, L tokens, N and K
heads, H head size; M queries.

A row holds groups (1, 2, ...; 0 is padding); a group is a prompt (branch 0) and completions (branches 1, 2, ...) that
share it. A token sees earlier tokens of its own group that belong to the prompt or to its own branch, and with a
window those of them whose position is near enough: positions go on from the prompt in every branch, columns do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tuning.models.decoder import Attention, AttentionSpec, soft_cap

Implementation = Literal["plain", "blocked", "cudnn", "splash"]

BLOCK = 256
"""Queries of one block of the blocked implementation."""
PLAIN_TOKENS = 1024
"""The longest row whose logits [B, N, L, L] are held whole."""
_LANES = 128
"""Splash's blocks and head sizes are multiples of it."""


def packed_mask(
    group_BL: jax.Array, branch_BL: jax.Array, queries: jax.Array | None = None, limit: Any = None
) -> jax.Array:
    """Who may see whom, [B, 1, M, L]; `queries` are the columns [M] that ask, all by default.

    `limit` is (window, positions_BL) where there is a window.
    """
    columns = jnp.arange(group_BL.shape[1])
    queries = columns if queries is None else queries
    same_group = group_BL[:, queries, None] == group_BL[:, None, :]
    same_branch = branch_BL[:, queries, None] == branch_BL[:, None, :]
    from_prompt = (branch_BL == 0)[:, None, :]
    # Padding sees padding: every row of the softmax has something to sum over.
    mask = (columns <= queries[:, None]) & same_group & (same_branch | from_prompt)
    if limit is not None:
        window, positions_BL = limit
        mask &= positions_BL[:, queries, None] - positions_BL[:, None, :] < window
    return mask[:, None]


def choose(q: jax.Array, softcap: float | None, platform: str | None = None) -> Implementation:
    """The implementation for queries of this shape and type on a platform (by default that of this process)."""
    platform = platform or jax.default_backend()
    length, head_dim = q.shape[1], q.shape[3]
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    # 256 needs a Hopper; what cuDNN or splash cannot do runs as XLA's own.
    if platform == "gpu" and half and softcap is None and head_dim <= 128 and head_dim % 8 == 0 and length % 2 == 0:
        return "cudnn"
    if platform == "tpu" and length % _LANES == 0:
        return "splash"
    return "plain" if length <= PLAIN_TOKENS else "blocked"


def packed_attention(
    group_BL: jax.Array, branch_BL: jax.Array, implementation: Implementation | None = None
) -> Attention:
    """Attention for training and scoring of whole rows, without a cache; `choose` picks the implementation.

    `plain` and `blocked` are compared with each other and with transformers on CPU; `splash` on CPU in Pallas'
    interpreter, forward and backward, and on no TPU; `cudnn` was not run: it is the documented
    `jax.nn.dot_product_attention(implementation="cudnn")` with a boolean mask.
    """
    # One mask for all layers; long rows and windows have theirs made in the layer, a part at a time where possible.
    shared = packed_mask(group_BL, branch_BL) if group_BL.shape[1] <= PLAIN_TOKENS else None

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, cache: Any) -> tuple[jax.Array, Any]:
        how = implementation or choose(q, spec.softcap)
        limit = None if spec.window is None else (spec.window, spec.positions_BL)
        if how == "blocked":
            return _blocked(q, k, v, functools.partial(packed_mask, group_BL, branch_BL, limit=limit), spec), cache
        mask = packed_mask(group_BL, branch_BL, limit=limit) if limit or shared is None else shared
        if how == "splash":
            return _splash(q, k, v, mask, spec), cache
        if how == "cudnn":
            return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=spec.scale, implementation="cudnn"), cache
        return attend(q, k, v, mask, spec), cache

    return attention


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Attention [B, M, N, H] of q [B, M, N, H] over all of k and v [B, L, K, H]; mask [B, 1, M, L] is true to see."""
    if spec.softcap is None:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=spec.scale)
    b, m, n, h = q.shape
    q = q.reshape(b, m, k.shape[2], n // k.shape[2], h)
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("bmkah,blkh->bkaml", q, k, preferred_element_type=accumulate)
    logits = jnp.where(mask[:, :, None], soft_cap(logits * spec.scale, spec.softcap), -1e30)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("bkaml,blkh->bmkah", weights, v).reshape(b, m, n, h)


def _blocked(
    q: jax.Array, k: jax.Array, v: jax.Array, mask_of: Callable[[jax.Array], jax.Array], spec: AttentionSpec
) -> jax.Array:
    """`attend`, some queries at a time, forward and backward: logits of [B, N, BLOCK, L] at most are held.

    `mask_of` gives the mask of the queries in the columns [M].
    """
    b, length, n, h = q.shape
    padding = -length % BLOCK
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0))).reshape(b, -1, BLOCK, n, h)
    columns = jnp.minimum(jnp.arange(length + padding), length - 1).reshape(-1, BLOCK)

    @jax.checkpoint
    def block(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, at = args
        return attend(queries, k, v, mask_of(at), spec)

    out = jax.lax.map(block, (jnp.moveaxis(q, 1, 0), columns))
    return jnp.moveaxis(out, 0, 1).reshape(b, length + padding, n, h)[:, :length]


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, spec: AttentionSpec) -> jax.Array:
    """`attend` by the TPU kernel, row by row; heads are filled up with zeros to a multiple of its lanes."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    interpret = jax.default_backend() != "tpu"
    head_dim = q.shape[-1]

    def heads_first(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -head_dim % _LANES))), 1, 2)

    def row(q_NLH: jax.Array, k_KLH: jax.Array, v_KLH: jax.Array, mask_LL: jax.Array) -> jax.Array:
        kernel = splash.make_splash_mha(
            jnp.broadcast_to(mask_LL, (q_NLH.shape[0], *mask_LL.shape)),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=spec.softcap,
            interpret=interpret,
        )
        return kernel(q_NLH, k_KLH, v_KLH)

    # The kernel has no scale of its own.
    out = jax.vmap(row)(heads_first(q * jnp.asarray(spec.scale, q.dtype)), heads_first(k), heads_first(v), mask[:, 0])
    return jnp.moveaxis(out[..., :head_dim], 1, 2).astype(q.dtype)
