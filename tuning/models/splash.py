"""Attention on TPU by JAX's splash kernel: memory grows with the length of rows, not with its square.

Where completions do not share prompts, a token sees the earlier ones of its group: segment ids and a mask that is known
when the program is made, so that blocks above the diagonal and outside of a window are never visited. Where they do,
the mask is data: an array of L x L booleans a row, for short rows.

Axes: B rows, L tokens, N query heads, K key-value heads, H head size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from rlhf.tuning.compile_target import LANES, target_platform
from rlhf.tuning.models.remat import ATTENTION

LONGEST_BLOCK = 1024
"""Queries, and keys, of a block at most: its logits take 4 MiB of the 16 MiB that a kernel has on a v5e."""


def block(length: int, longest: int = LONGEST_BLOCK) -> int:
    """The largest block that divides a row of this length, a multiple of `LANES`."""
    return max(b for b in range(LANES, min(length, longest) + 1, LANES) if length % b == 0)


def segment_attention(
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    group_BL: jax.Array,
    window: int | None,
    scale: float,
    softcap: float | None,
    number: jax.Array | None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Attention [B, L, N, H] to the earlier tokens of a token's own group; with a window, to the `window` newest.

    number: the queries are those of this one of the equal parts of the row's columns; None: all. sinks_N: as of
    `blocked.blocked_attention`.
    """
    queries, heads = q_BLNH.shape[1:3]
    length = k_BLKH.shape[1]
    shape = (length, length)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    kernel = _kernel(masks.MultiHeadMask([mask] * heads), queries, length, softcap, q_BLNH.shape[3], length // queries)
    if number is not None:
        kernel = _part(kernel, number, length // queries)

    def row(q: jax.Array, k: jax.Array, v: jax.Array, group_L: jax.Array) -> jax.Array:
        own = group_L if number is None else jax.lax.dynamic_slice_in_dim(group_L, number * queries, queries)
        return kernel(q, k, v, segment_ids=splash.SegmentIds(own, group_L), sinks=sinks_N)

    return _by_rows(row, q_BLNH, k_BLKH, v_BLKH, group_BL, scale)


def masked_attention(
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    mask_BLL: jax.Array,
    scale: float,
    softcap: float | None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Attention [B, L, N, H] where `mask_BLL` [B, queries, keys] is true."""

    def row(q: jax.Array, k: jax.Array, v: jax.Array, mask_LL: jax.Array) -> jax.Array:
        queries, keys = mask_LL.shape
        kernel = _kernel(mask_LL[None], queries, keys, softcap, q.shape[-1])
        # The kernel branches on this flag in Python, but under jit it is an array.
        for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
            info = getattr(kernel, name)
            setattr(kernel, name, info._replace(is_dynamic_mask=True))
        return kernel(q, k, v, sinks=sinks_N)

    return _by_rows(row, q_BLNH, k_BLKH, v_BLKH, mask_BLL, scale)


def _kernel(mask: Any, queries: int, keys: int, softcap: float | None, head_dim: int, parts: int = 1) -> Any:
    """The kernel for a mask; parts: equal ranges of queries, each with as many blocks of the mask in memory."""
    q, k = block(queries), block(keys)
    # The gradients of keys and values hold four blocks of heads next to two of logits: with heads of 256, 17 MiB.
    longest = LONGEST_BLOCK if head_dim <= LANES else LONGEST_BLOCK // 2
    q_back, k_back = block(queries, longest), block(keys, longest)
    sizes = splash.BlockSizes(
        block_q=q, block_kv=k, block_q_dkv=q_back, block_kv_dkv=k_back, block_q_dq=q_back, block_kv_dq=k_back
    )
    return splash.make_splash_mha(
        mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=parts,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=ATTENTION,
        interpret=target_platform() != "tpu",
    )


def _part(kernel: Any, number: jax.Array, parts: int) -> Any:
    """The kernel of one of the ranges of queries: the mask is static, and which range a device has is not."""

    def own(info: Any) -> Any:
        def cut(name: str, axis: int) -> Any:
            x = getattr(info, name)
            size = 0 if x is None else x.shape[axis] // parts
            return None if x is None else jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)

        of_blocks = {name: cut(name, 1) for name in ("data_next", "mask_next", "block_mask")}
        return info._replace(**of_blocks, q_sequence=cut("q_sequence", 0))

    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    return splash.SplashAttentionKernel(*map(own, infos), **kernel.kwargs)


def _by_rows(row: Any, q: jax.Array, k: jax.Array, v: jax.Array, of_row: jax.Array, scale: float) -> jax.Array:
    """`row` over all rows, with heads first and padded with zeros to a multiple of the kernel's lanes."""
    head_dim = q.shape[-1]

    def heads_first(x: jax.Array) -> jax.Array:
        # Zeros add nothing to q k^T, and the extra columns of the output are cut off below.
        return jnp.moveaxis(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -head_dim % LANES))), 1, 2)

    # The kernel takes no scale. A scale that is itself rounded to bfloat16 would be off by up to 0.2 %.
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    out = jax.vmap(row)(heads_first(scaled), heads_first(k), heads_first(v), of_row)
    return jnp.moveaxis(out[..., :head_dim], 1, 2).astype(q.dtype)
