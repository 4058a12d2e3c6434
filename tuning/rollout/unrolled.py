"""The trainer's decoder as decoding reads it fastest: a layer's weights beside each other, no scan.

A scan over stacked weights copies each layer out of the stack, which costs a step of few rows as much as reading them;
one product for queries, keys and values reads its input once. Mathematics are those of `Layer`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tuning.models.decoder import Attention, AttentionSpec, Decoder, Layer, rms_norm, soft_cap
from tuning.models.linear import Linear
from tuning.models.quantize import Int8
from tuning.models.rope import rope_tables

Weights = Literal["dense", "int8"]
FEW_ROWS = 32
"""Up to which the head on CPU is a product from the left (`UnrolledDecoder.logits`)."""
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Projections that are one product, in the order of their outputs."""
_PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


class JoinedLayer(Layer):
    """A layer whose projections of one input are one product."""

    qkv: Linear
    gate_up: Linear

    def _into_heads(self, normed: jax.Array) -> Sequence[jax.Array]:
        c = self.config
        ends = np.cumsum([c.num_heads, c.num_kv_heads]) * c.head_dim
        return jnp.split(self.qkv(normed), ends.tolist(), axis=-1)

    def _into_mlp(self, normed: jax.Array) -> Sequence[jax.Array]:
        return jnp.split(self.gate_up(normed), 2, axis=-1)


def _join(layer: Layer) -> None:
    for name, parts in JOINED.items():
        first, *rest = (getattr(layer, part) for part in parts)
        for weight in ("kernel", "bias"):
            if hasattr(first, weight):
                values = [getattr(linear, weight)[...] for linear in (first, *rest)]
                setattr(first, weight, nnx.Param(jnp.concatenate(values, axis=-1)))
        setattr(layer, name, first)
        for part in parts:
            delattr(layer, part)
    layer.__class__ = JoinedLayer


class UnrolledDecoder(nnx.Module):
    """A Decoder with a list of layers. For decoding only: nothing of it is trained."""

    def __init__(self, decoder: Decoder, layers: Sequence[Layer]):
        self.config = decoder.config
        self.layers = nnx.List(layers)
        del decoder.layers
        self.rest = decoder

    def logits(self, hidden_RD: jax.Array) -> jax.Array:
        """Logits [R, V] in at least float32 of final hidden states."""
        if jax.default_backend() != "cpu" or len(hidden_RD) > FEW_ROWS:
            return self.rest.logits(hidden_RD)
        # XLA on CPU passes over a large matrix faster where it is the left operand; the barrier keeps it there.
        weight = self.rest.head_weight().astype(hidden_RD.dtype)
        accumulate = jnp.promote_types(hidden_RD.dtype, jnp.float32)
        logits_VR = jnp.einsum("vd,rd->vr", weight, hidden_RD, preferred_element_type=accumulate)
        return soft_cap(jax.lax.optimization_barrier(logits_VR).T, self.config.final_softcap)

    def __call__(
        self, tokens_BL: jax.Array, positions_BL: jax.Array, attention: Attention, *, cache: Sequence[Any], dtype: Any
    ) -> tuple[jax.Array, list[Any]]:
        """Hidden states after the last norm [B, L, D], and what attention gave as each layer's new cache."""
        c = self.config
        x = self.rest.embed(tokens_BL, dtype)
        distinct, row_of_layer = c.frequencies()
        cos, sin = rope_tables(positions_BL, distinct)
        changed = []

        # A function of its own is traced once for all layers that are alike.
        @functools.partial(jax.jit, static_argnums=(0, 1, 2))
        def run(graph: Any, row: int, window: int | None, state: Any, x: jax.Array, mine: Any) -> Any:
            spec = AttentionSpec(c.attention_scale, c.attention_softcap, window, positions_BL)
            return nnx.merge(graph, state)(x, (cos[row], sin[row]), attention, spec, mine)

        for i, layer in enumerate(self.layers):
            window = c.sliding_window if c.slides(i) else None
            graph, state = nnx.split(layer)
            x, mine = run(graph, int(row_of_layer[i]), window, state, x, cache[i])
            changed.append(mine)
        return rms_norm(x, self.rest.norm[...], c.norm_eps, c.norm_offset), changed


def _prepared(graph: Any, stacked: Any, number: jax.Array | int, join: bool, weights: Weights, dtype: str) -> Any:
    """One layer of a stack, as (graph, state)."""
    layer = nnx.merge(graph, jax.tree.map(lambda x: x[number].astype(dtype), stacked))
    if join:
        _join(layer)
    if weights == "int8":
        for name in (*_PROJECTIONS, *JOINED):
            if hasattr(layer, name):
                linear = getattr(layer, name)
                linear.kernel = Int8(linear.kernel[...])
    return nnx.split(layer)


# The number of the layer is an argument: one program, whatever the depth.
@functools.partial(jax.jit, static_argnames=("graph", "join", "weights", "dtype"))
def _state(graph: Any, stacked: Any, number: jax.Array, *, join: bool, weights: Weights, dtype: str) -> Any:
    return _prepared(graph, stacked, number, join, weights, dtype)[1]


def unroll(graph: Any, params: Any, *, join: bool, weights: Weights, dtype: str) -> tuple[Any, Any]:
    """(graph, state) of an `UnrolledDecoder` with the values of a Decoder's parameters, layers cast to `dtype`.

    `join` makes one kernel of those that share an input; cutting it over a `tensor` axis would part heads from their
    devices, so it is for whole kernels. `int8` keeps the projections in one byte a weight.
    """
    decoder = nnx.merge(graph, params)
    stack, stacked = nnx.split(decoder.layers)
    made = nnx.eval_shape(lambda s: nnx.merge(*_prepared(stack, s, 0, join, weights, dtype)), stacked)
    like = nnx.split(made)[0]
    layers = [
        nnx.merge(like, _state(stack, stacked, np.int32(i), join=join, weights=weights, dtype=dtype))
        for i in range(decoder.config.num_layers)
    ]
    return nnx.split(UnrolledDecoder(decoder, layers))
