"""Attention of a decoding step by a kernel (`attention.c`).

XLA on CPU runs the small products of attention on one core, over every slot to the capacity. The kernel takes all
cores and reads only what each row sees. Where it does not suit, `cache.attend` computes the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tuning.models.decoder import AttentionSpec
from tuning.rollout.engine.cache import Stack
from tuning.rollout.engine.cpu.kernels import KV_TYPES
from tuning.target import target_platform

LANES = 16
"""The kernel's vectors: a head's size must be a multiple."""


def suits(kv: str, head_dim: int) -> bool:
    """Whether the kernel supports this backend, this type of keys and values, and this head size."""
    return target_platform() == "cpu" and kv in KV_TYPES and head_dim % LANES == 0


def attend(
    name: str,
    q_RCNH: jax.Array,
    far: Stack,
    near: Stack,
    number: jax.Array | int,
    live_R: jax.Array,
    length_R: jax.Array,
    t: jax.Array | int,
    spec: AttentionSpec,
) -> jax.Array:
    """Attention of one query a row (C is 1) over the first `length_R` cached tokens and `t` + 1 new ones.

    Stacks as in `cache`, of the type that the kernel was built for; `number` is the layer's index in them. The query's
    position is `length_R` + `t`. Rows that are not live see new tokens only; their output is not used. Out
    [R, 1, N, H], in the type of the queries.
    """
    r, _, n, h = q_RCNH.shape
    heads = far["k"].shape[2]
    end = jnp.where(live_R, length_R, 0)
    first, first_new = jnp.zeros((2, r), jnp.int32)
    if spec.window is not None:
        oldest = length_R + t - spec.window + 1
        first, first_new = jnp.clip(oldest, 0, end), jnp.clip(oldest - length_R, 0, t)
    spans = jnp.stack([first, end, first_new, jnp.full(r, t + 1)], axis=-1).astype(jnp.int32)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((r, heads, n // heads, h), jnp.float32))
    q = (q_RCNH.astype(jnp.float32) * spec.scale).reshape(r, heads, n // heads, h)
    # Operands are positional, in the order that attention.c documents.
    stacks = [part[name] for part in (far, near) for name in ("k", "v")]
    scales = [part[name] for part in (far, near) for name in ("k_scale", "v_scale") if name in part]
    out = call(q, *stacks, jnp.asarray(number, jnp.int32), spans, *scales, softcap=np.float32(spec.softcap or 0))
    return out.reshape(q_RCNH.shape).astype(q_RCNH.dtype)
