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
from tuning.rollout.cpu import products

Form = Literal["dense", "int8", "out_in"]
"""How the projections of layers are held: (in, out), as `quantize.Int8`, or as `products.OutIn`."""
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Projections that are one product, in the order of their outputs."""
FORMS: dict[str, type[Int8] | type[products.OutIn]] = {"int8": Int8, "out_in": products.OutIn}
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
        self.target: str | None = None

    def multiply_by(self, target: str | None) -> None:
        """Has all products be those of `products.product` with this target."""
        self.target = target
        for _, module in nnx.iter_modules(self):
            if isinstance(module, products.OutIn):
                module.target = target

    def logits(self, hidden_RD: jax.Array) -> jax.Array:
        """Logits [R, V] in at least float32 of final hidden states."""
        if jax.default_backend() != "cpu":
            return self.rest.logits(hidden_RD)
        weight = self.rest.head_weight().astype(hidden_RD.dtype)
        return soft_cap(products.product(hidden_RD, weight, self.target), self.config.final_softcap)

    def __call__(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        attention: Attention,
        *,
        live_BL: jax.Array,
        cache: Sequence[Any],
        dtype: Any,
    ) -> tuple[jax.Array, list[Any]]:
        """Hidden states after the last norm [B, L, D], and what attention gave as each layer's new cache.

        Tokens that are not live are zeros all along (but for biases), which `products` does not compute.
        """
        c = self.config
        x = jnp.where(live_BL[..., None], self.rest.embed(tokens_BL, dtype), 0)
        distinct, row_of_layer = c.frequencies()
        cos, sin = rope_tables(positions_BL, distinct)
        changed = []

        # A function of its own is traced once for all layers that are alike.
        @functools.partial(jax.jit, static_argnums=(0, 1, 2))
        def run(graph: Any, row: int, window: int | None, state: Any, x: jax.Array, mine: Any) -> Any:
            spec = AttentionSpec(c.attention_scale, c.attention_softcap, window, positions_BL)
            return nnx.merge(graph, state)(x, (cos[row], sin[row]), of_live, spec, mine)

        def of_live(*arguments: Any) -> tuple[jax.Array, Any]:
            out, mine = attention(*arguments)
            return jnp.where(live_BL[..., None, None], out, 0), mine

        for i, layer in enumerate(self.layers):
            window = c.sliding_window if c.slides(i) else None
            graph, state = nnx.split(layer)
            x, mine = run(graph, int(row_of_layer[i]), window, state, x, cache[i])
            changed.append(mine)
        return rms_norm(x, self.rest.norm[...], c.norm_eps, c.norm_offset), changed


def _prepared(graph: Any, stacked: Any, number: jax.Array | int, join: bool, form: Form, dtype: str) -> Any:
    """One layer of a stack, as (graph, state)."""
    layer = nnx.merge(graph, jax.tree.map(lambda x: x[number].astype(dtype), stacked))
    if join:
        _join(layer)
    if form in FORMS:
        for name in (*_PROJECTIONS, *JOINED):
            if hasattr(layer, name):
                linear = getattr(layer, name)
                linear.kernel = FORMS[form](linear.kernel[...])
    return nnx.split(layer)


# The number of the layer is an argument: one program, whatever the depth.
@functools.partial(jax.jit, static_argnames=("graph", "join", "form", "dtype"))
def _state(graph: Any, stacked: Any, number: jax.Array, *, join: bool, form: Form, dtype: str) -> Any:
    return _prepared(graph, stacked, number, join, form, dtype)[1]


def unroll(graph: Any, params: Any, *, join: bool, form: Form, dtype: str) -> tuple[Any, Any]:
    """(graph, state) of an `UnrolledDecoder` with the values of a Decoder's parameters, layers cast to `dtype`.

    `join` makes one kernel of those that share an input; cutting it over a `tensor` axis would part heads from their
    devices, so it is for whole kernels.
    """
    decoder = nnx.merge(graph, params)
    stack, stacked = nnx.split(decoder.layers)
    made = nnx.eval_shape(lambda s: nnx.merge(*_prepared(stack, s, 0, join, form, dtype)), stacked)
    like = nnx.split(made)[0]
    layers = [
        nnx.merge(like, _state(stack, stacked, np.int32(i), join=join, form=form, dtype=dtype))
        for i in range(decoder.config.num_layers)
    ]
    return nnx.split(UnrolledDecoder(decoder, layers))
