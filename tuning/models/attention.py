"""Attention over packed rows, and the choice of its implementation. Axes as in `decoder`: B rows, L tokens, N and K
heads, H head size.

A row holds groups (1, 2, ...; 0 is padding); a group is a prompt (branch 0) and completions (branches 1, 2, ...) that
share it. A token sees earlier tokens of its own group that belong to the prompt or to its own branch; with a window,
only those less than `window` positions before it. Positions continue from the prompt in every branch, columns do not:

    group     1 1 1 1 1 1 1 2 2 2 0
    branch    0 0 0 1 1 2 2 0 1 1 0
    position  0 1 2 3 4 3 4 0 1 2 0
    column    0 1 2 3 4 5 6 7 8 9 10     column 5 sees columns 0, 1, 2 and 5
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from tuning.models.blocked import Segments, blocked_attention, visible
from tuning.models.decoder import Attention, AttentionSpec, soft_cap

Implementation = Literal["plain", "blocked", "cudnn", "splash"]

PLAIN_TOKENS = 1024
"""The longest row whose logits [B, N, L, L] are held in memory at once."""
PLAIN_TOKENS_CPU = 255
"""The longest row for which blocks are no faster on a CPU; two blocks skip a quarter of the logits."""
_LANES = 128
"""Splash's blocks and head sizes are multiples of it."""


def choose(q: jax.Array, softcap: float | None, platform: str | None = None) -> Implementation:
    """The implementation for queries of this shape and type on a platform (by default that of this process)."""
    platform = platform or jax.default_backend()
    length, head_dim = q.shape[1], q.shape[3]
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    # cuDNN has no softcap, and takes heads of more than 128 on some devices only.
    if platform == "gpu" and half and softcap is None and head_dim <= 128 and head_dim % 8 == 0 and length % 2 == 0:
        return "cudnn"
    if platform == "tpu" and length % _LANES == 0:
        return "splash"
    return "plain" if length <= (PLAIN_TOKENS_CPU if platform == "cpu" else PLAIN_TOKENS) else "blocked"


def packed_attention(
    group_BL: jax.Array, branch_BL: jax.Array, implementation: Implementation | None = None
) -> Attention:
    """Attention for training and scoring of whole rows, without a cache; `choose` picks the implementation.

    Tested: `plain` and `blocked` on CPU against each other and transformers; `splash` against them on CPU in
    Pallas' interpreter, forward and backward, on no TPU. Not run at all: `cudnn`, which is the documented
    `jax.nn.dot_product_attention(implementation="cudnn")` with a boolean mask.
    """
    length = group_BL.shape[1]

    def mask_of(positions_BL: jax.Array, window: int | jax.Array | None) -> jax.Array:
        return visible(Segments(group_BL, branch_BL, positions_BL), window, 0, length, length)[:, None]

    # One mask for all layers, unless it differs by layer or is too large to keep; blocked attention computes its own.
    # Without a window positions do not matter, so any array takes their place.
    shared = mask_of(group_BL, None) if length <= PLAIN_TOKENS else None

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, cache: Any) -> tuple[jax.Array, Any]:
        how = implementation or choose(q, spec.softcap)
        if how == "blocked":
            segments = Segments(group_BL, branch_BL, spec.positions_BL)
            return blocked_attention(q, k, v, segments, spec.window, spec.scale, spec.softcap), cache
        mask = shared
        if mask is None or spec.window is not None:
            mask = mask_of(spec.positions_BL, spec.window)
        if how == "splash":
            return _splash(q, k, v, mask, spec), cache
        if how == "cudnn":
            out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=spec.scale, implementation="cudnn")
            return out, cache
        return _plain(q, k, v, mask, spec), cache

    return attention


def _plain(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Attention [B, L, N, H]; mask [B, 1, L, L] is true to see."""
    # JAX's own function has no softcap, and takes its softmax in float32 whatever the type of its arguments.
    if spec.softcap is None and q.dtype != jnp.float64:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=spec.scale)
    b, length, n, h = q.shape
    q = q.reshape(b, length, k.shape[2], n // k.shape[2], h)
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("bmkah,blkh->bkaml", q, k, preferred_element_type=accumulate)
    # A finite fill: a query without a visible key would give NaN with -inf. The cap comes before the mask, as it would
    # bring -inf back to -cap.
    logits = jnp.where(mask[:, :, None], soft_cap(logits * spec.scale, spec.softcap), -1e30)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("bkaml,blkh->bmkah", weights, v).reshape(b, length, n, h)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, spec: AttentionSpec) -> jax.Array:
    """`_plain` by the TPU kernel, row by row; heads are padded with zeros to a multiple of its lanes."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    interpret = jax.default_backend() != "tpu"
    head_dim = q.shape[-1]

    def heads_first(x: jax.Array) -> jax.Array:
        # Zeros add nothing to q k^T, and the extra columns of the output are cut off below.
        return jnp.moveaxis(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -head_dim % _LANES))), 1, 2)

    def row(q_NLH: jax.Array, k_KLH: jax.Array, v_KLH: jax.Array, mask_LL: jax.Array) -> jax.Array:
        kernel = splash.make_splash_mha(
            mask_LL[None], head_shards=1, q_seq_shards=1, attn_logits_soft_cap=spec.softcap, interpret=interpret
        )
        # The kernel branches on this flag in Python, but under jit it is an array.
        for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
            info = getattr(kernel, name)
            if info is not None:
                setattr(kernel, name, info._replace(is_dynamic_mask=True))
        return kernel(q_NLH, k_KLH, v_KLH)

    # The kernel has no scale of its own.
    out = jax.vmap(row)(heads_first(q * jnp.asarray(spec.scale, q.dtype)), heads_first(k), heads_first(v), mask[:, 0])
    return jnp.moveaxis(out[..., :head_dim], 1, 2).astype(q.dtype)
