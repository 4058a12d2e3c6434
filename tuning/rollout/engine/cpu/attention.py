"""Attention of a decoding step, and of prompts with a cached prefix, by a kernel (`attention.c`).

XLA on CPU runs the small products of attention on one core, over every slot to the capacity. The kernel takes all
cores and reads only what each row sees. Where it does not suit, `cache.attend` computes the same.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.cpu.kernels import KV_TYPES
from rlhf.tuning.models.decoder import AttentionSpec
from rlhf.tuning.rollout.engine.cache import Stack

LANES = 16
"""The kernel's vectors: a head's size must be a multiple."""


class Spans(NamedTuple):
    """The tokens that each row sees: 0 to `end_R` of slot `slot_R` of the cache, then `first_new_R` to `end_new_R` of
    slot `slot_new_R` of the new tokens, the last of which is its own."""

    slot_R: jax.Array
    end_R: jax.Array
    slot_new_R: jax.Array
    first_new_R: jax.Array
    end_new_R: jax.Array


def of_step(length_R: jax.Array, live_R: jax.Array, t: jax.Array | int) -> Spans:
    """The spans of step `t` of a run of decoding: the slots' `length_R` tokens, and those of the run up to this
    step; rows that are not live the latter only."""
    row_R = jnp.arange(len(length_R))
    zero_R = jnp.zeros_like(row_R)
    return Spans(row_R, jnp.where(live_R, length_R, 0), row_R, zero_R, zero_R + t + 1)


def suits(kv: str, head_dim: int) -> bool:
    """Whether the kernel supports this backend, this type of keys and values, and this head size."""
    return target_platform() == "cpu" and kv in KV_TYPES and head_dim % LANES == 0


def attend(
    name: str,
    q_RNH: jax.Array,
    far: Stack,
    near: Stack,
    number: jax.Array | int,
    spans: Spans,
    position_R: jax.Array,
    spec: AttentionSpec,
) -> jax.Array:
    """Attention of one query a row over cached tokens and new ones. Out [R, N, H], in the type of the queries.

    Stacks as in `cache`, of the type that the kernel was built for; `number` is the layer's index in them.
    `position_R` is each query's. A row that sees neither cached nor new tokens is not defined.
    """
    r, n, h = q_RNH.shape
    heads = far["k"].shape[2]
    first_R = first_new_R = jnp.zeros(r, jnp.int32)
    if spec.window is not None:
        first_R = position_R - spec.window + 1
        # The last of the new tokens that a row sees is its own.
        first_new_R = spans.end_new_R - spec.window
    columns = (
        spans.slot_R,
        jnp.clip(first_R, 0, spans.end_R),
        spans.end_R,
        spans.slot_new_R,
        jnp.maximum(first_new_R, spans.first_new_R),
        spans.end_new_R,
    )
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((r, heads, n // heads, h), jnp.float32))
    q = (q_RNH.astype(jnp.float32) * spec.scale).reshape(r, heads, n // heads, h)
    # Operands are positional, in the order that attention.c documents.
    stacks = [part[name] for part in (far, near) for name in ("k", "v")]
    scales = [part[name] for part in (far, near) for name in ("k_scale", "v_scale") if name in part]
    table = jnp.stack([jnp.broadcast_to(x, (r,)).astype(jnp.int32) for x in columns], axis=-1)
    sinks = jnp.full(n, -jnp.inf, jnp.float32) if spec.sinks_N is None else spec.sinks_N.astype(jnp.float32)
    where = jnp.asarray(number, jnp.int32), table, sinks
    out = call(q, *stacks, *where, *scales, softcap=np.float32(spec.softcap or 0))
    return out.reshape(q_RNH.shape).astype(q_RNH.dtype)
