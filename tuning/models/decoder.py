"""The decoder: mathematics only. Layers are stacked and scanned, so compile time does not grow with depth.

Settings that differ from layer to layer (window, rotary frequencies) are scanned with the weights. Features that a
model lacks leave no trace in its program.

Axes: B rows, L tokens of a row, D hidden, F feed-forward, N query heads, K key-value heads,
H head size, V vocabulary. Weights are stored (in, out).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.experts import Experts, Routing, as_chosen, mixture, routed
from rlhf.tuning.models.linear import INIT, Linear
from rlhf.tuning.models.matmul import factor, matmul, soft_cap
from rlhf.tuning.models.remat import HEADS, INPUT, MLP, RESIDUAL, keep, rematerialised
from rlhf.tuning.models.rope import rope_tables, rotate
from rlhf.tuning.models.sharding import INNER, STREAM, constrain, with_cut_gradients
from rlhf.tuning.models.vocabulary import embedded
from rlhf.tuning.precision import real

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Of `clamped_swiglu`: slope in the sigmoid, largest gate and absolute value of up."""
UNLIMITED = np.iinfo(np.int32).max
"""The window of a layer with full attention, in a model with windowed layers."""


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


_GATED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clamped_swiglu": _clamped_swiglu,
}


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The arguments of a layer's attention other than queries, keys and values."""

    scale: float
    """Factor of the logits."""
    softcap: float | None
    """Logits z become c * tanh(z / c), after the scale and before the mask."""
    window: int | jax.Array | None
    """A query sees keys less than `window` positions before it; None for all; an array where layers differ."""
    positions_BL: jax.Array
    """Positions of the queries."""
    sliding_window: int | None = None
    """The window of the layers that have one, where `window` is an array: it is this, or wider than any row."""
    sinks_N: jax.Array | None = None
    """A logit of each head that takes part in the softmax without a key or a value."""


# attention(q_BLNH, k_BLKH, v_BLKH, spec, cache of this layer) -> (out_BLNH, new cache of this layer)
Attention = Callable[[jax.Array, jax.Array, jax.Array, AttentionSpec, Any], tuple[jax.Array, Any]]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float) -> jax.Array:
    """Root-mean-square normalisation in at least float32 (Zhang and Sennrich, 2019).

    With an offset the factor is weight + offset, applied before rounding to the type of x (Gemma).
    """
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if offset:
        return (x32 * (weight.astype(x32.dtype) + offset)).astype(x.dtype)
    # Llama rounds before the weight and Gemma after it: in bfloat16 the last bits differ.
    return x32.astype(x.dtype) * weight.astype(x.dtype)


def _scaled(x: jax.Array, factor: float | None) -> jax.Array:
    return x if factor is None else x * jnp.asarray(factor, x.dtype)


class Layer(nnx.Module):
    """Attention and a gated MLP or a mixture of such, each on a normalised residual stream and added to it."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c, d, f, h = config, config.hidden_size, config.intermediate_size, config.head_dim
        self.config = config

        def norm(size: int) -> nnx.Param:
            # The factor, weight + offset, starts at 1.
            return nnx.Param(jnp.full(size, 1.0 - c.norm_offset, real()))

        if c.input_norms:
            self.attention_norm, self.mlp_norm = norm(d), norm(d)
        if c.joined:
            self.qkv = Linear(d, (c.num_heads + 2 * c.num_kv_heads) * h, bias=c.qkv_bias, rngs=rngs)
        else:
            self.q = Linear(d, c.num_heads * h, bias=c.qkv_bias, rngs=rngs)
            self.k = Linear(d, c.num_kv_heads * h, bias=c.qkv_bias, rngs=rngs)
            self.v = Linear(d, c.num_kv_heads * h, bias=c.qkv_bias, rngs=rngs)
        self.o = Linear(c.num_heads * h, d, bias=c.output_bias, back=True, rngs=rngs)
        if c.sinks:
            self.sinks = nnx.Param(jnp.zeros(c.num_heads, real()))
        linear: Any = functools.partial(Linear, bias=c.mlp_bias)
        if c.num_experts:
            self.router = nnx.Param(INIT(rngs.params(), (c.num_experts, d), real()))
            linear = functools.partial(Experts, c.num_experts, bias=c.mlp_bias)
        if c.router_bias:
            self.router_bias = nnx.Param(jnp.zeros(c.num_experts, real()))
        if c.score_bias:
            self.score_bias = nnx.Param(jnp.zeros(c.num_experts, real()))
        if c.shared_size:
            self.shared_gate, self.shared_up = (Linear(d, c.shared_size, rngs=rngs) for _ in range(2))
            self.shared_down = Linear(c.shared_size, d, back=True, rngs=rngs)
        if c.shared_switch:
            self.shared_switch = nnx.Param(INIT(rngs.params(), (1, d), real()))
        if c.joined or c.paired_experts:
            self.gate_up = linear(d, 2 * f, rngs=rngs)
        else:
            self.gate, self.up = linear(d, f, rngs=rngs), linear(d, f, rngs=rngs)
        self.down = linear(f, d, back=True, rngs=rngs)
        if c.qk_norm:
            self.q_norm, self.k_norm = norm(h), norm(h)
        elif c.qk_norm_joint:
            self.q_norm, self.k_norm = norm(c.num_heads * h), norm(c.num_kv_heads * h)
        if c.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(d), norm(d)

    def __call__(
        self,
        x_BLD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        attention: Attention,
        spec: AttentionSpec,
        cache: Any,
        routing: Routing = as_chosen,
    ) -> tuple[jax.Array, Any]:
        c = self.config
        rows = x_BLD.shape[:2]

        # `keep` names what the backward pass may keep: see `remat`.
        read = self._norm(x_BLD, self.attention_norm) if c.input_norms else x_BLD
        q, k, v = (keep(constrain(x, *INNER), HEADS) for x in self._into_heads(read))
        if c.qk_norm_joint:
            q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        q = q.reshape(*rows, c.num_heads, c.head_dim)
        k, v = (x.reshape(*rows, c.num_kv_heads, c.head_dim) for x in (k, v))
        if c.qk_norm:
            q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        if c.sinks:
            spec = dataclasses.replace(spec, sinks_N=self.sinks[...])
        out, cache = attention(rotate(q, *rope), rotate(k, *rope), v, spec, cache)
        out = constrain(self.o(constrain(out.reshape(*rows, -1), *INNER)), *STREAM)
        out = self._norm(keep(out, RESIDUAL), self.attention_post_norm) if c.post_norms else out
        x_BLD = keep(x_BLD + _scaled(out, c.residual_scale), RESIDUAL)

        normed = self._norm(x_BLD, self.mlp_norm) if c.input_norms else x_BLD
        if c.num_experts:
            out, cache = self._routed(normed, routing, cache)
        else:
            out = self._mlp(normed, self._before_activation, self.down)
        out = constrain(out, *STREAM)
        out = self._norm(keep(out, MLP), self.mlp_post_norm) if c.post_norms else out
        return x_BLD + _scaled(out, c.residual_scale), cache

    def _mlp(self, normed: jax.Array, into: Sequence[Linear], back: Linear) -> jax.Array:
        return back(self._gated([keep(constrain(m(normed), *INNER), MLP) for m in into]))

    def _routed(self, normed: jax.Array, routing: Routing, cache: Any) -> tuple[jax.Array, Any]:
        """Output of the experts of each token, and of the MLP that all share, with the new cache."""
        c = self.config
        bias, choice = (
            getattr(self, name)[...] if there else None
            for name, there in (("router_bias", c.router_bias), ("score_bias", c.score_bias))
        )
        options = c.experts_per_token, c.normalise_experts, routing, cache, bias, c.sigmoid_router, choice
        experts, weights, cache = routed(normed, self.router[...], *options)
        into, back = [m.parts() for m in self._before_activation], self.down.parts()
        out = mixture(normed, experts, _scaled(weights, c.expert_scale), into, back, c.num_experts, self._gated)
        if c.shared_size:
            shared = self._mlp(normed, (self.shared_gate, self.shared_up), self.shared_down)
            if c.shared_switch:
                shared *= jax.nn.sigmoid(matmul(normed, self.shared_switch[...].T))
            out += constrain(shared, *STREAM)
        return out, cache

    # Projections of one input are joined in some families, and for decoding (`rlhf.tuning.rollout.engine.decoders`).

    def _into_heads(self, normed: jax.Array) -> Sequence[jax.Array]:
        if not hasattr(self, "qkv"):
            return self.q(normed), self.k(normed), self.v(normed)
        ends = np.cumsum([self.config.num_heads, self.config.num_kv_heads]) * self.config.head_dim
        return jnp.split(self.qkv(normed), ends.tolist(), axis=-1)

    @property
    def _before_activation(self) -> Sequence[Any]:
        return (self.gate_up,) if hasattr(self, "gate_up") else (self.gate, self.up)

    def _gated(self, inner: Sequence[jax.Array]) -> jax.Array:
        """Input of `down`, from outputs of `_before_activation`."""
        if self.config.paired_experts:
            inner = inner[0][..., ::2], inner[0][..., 1::2]
        elif len(inner) == 1:
            inner = jnp.split(inner[0], 2, axis=-1)
        return _GATED[self.config.activation](*inner)

    def _norm(self, x: jax.Array, weight: nnx.Param) -> jax.Array:
        return rms_norm(x, weight[...], self.config.norm_eps, self.config.norm_offset)


class Decoder(nnx.Module):
    """Token ids and positions to final hidden states; the LM head is `head_weight`, applied by the losses."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), real()))

        # One key a layer; every parameter gets a leading axis of layers.
        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=rngs)

        self.layers = stack(rngs)
        self.norm = nnx.Param(jnp.full(config.hidden_size, 1.0 - config.norm_offset, real()))
        if not config.tie_embeddings:
            self.head = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), real()))

    def head_weight(self) -> jax.Array:
        """The LM head, [V, D]. Its products are logits after `config.final_softcap` only."""
        return (self.embedding if self.config.tie_embeddings else self.head)[...]

    def embed(self, tokens: jax.Array, dtype: Any) -> jax.Array:
        """Embeddings of tokens [...] as the first layer reads them, [..., D] in `dtype`."""
        return _scaled(embedded(self.embedding[...], tokens, dtype), self.config.embed_scale)

    def last(self, x: jax.Array) -> jax.Array:
        """Hidden states after the last norm, as the LM head reads them."""
        c = self.config
        x = rms_norm(x, self.norm[...], c.norm_eps, c.norm_offset)
        return x if c.logits_divisor is None else _scaled(x, 1 / c.logits_divisor)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] of final hidden states [..., D], accumulated in at least float32.

        Meant for a few positions: losses use `rlhf.tuning.losses.head.token_logps`, which never holds all logits (R13).
        """
        weight = factor(self.head_weight().astype(hidden.dtype))
        accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
        logits = jnp.einsum("...d,vd->...v", factor(hidden), weight, preferred_element_type=accumulate)
        return soft_cap(logits, self.config.final_softcap)

    def __call__(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        attention: Attention,
        *,
        cache: Any = None,
        dtype: Any = jnp.float32,
        remat: str = "products",
        routing: Routing = as_chosen,
    ) -> tuple[jax.Array, Any]:
        """Hidden states after the last norm [B, L, D] in `dtype`, and the new cache (leading axis: layers).

        `remat` names what a gradient keeps of each layer (`models.remat`); `routing` is read where layers have experts.
        """
        c = self.config
        x_BLD = constrain(self.embed(tokens_BL, dtype), *STREAM)

        differs, of_layer = by_layer(c, positions_BL)
        graph, state = nnx.split(self.layers)

        def body(x: jax.Array, scanned: tuple[Any, dict[str, jax.Array], Any]) -> tuple[jax.Array, Any]:
            layer_state, mine, layer_cache = scanned
            rope, spec = of_layer(mine)
            layer = nnx.merge(graph, with_cut_gradients(layer_state))
            return layer(keep(x, INPUT), rope, attention, spec, layer_cache, routing)

        x_BLD, cache = jax.lax.scan(rematerialised(body, remat), x_BLD, (state, differs, cache))
        return self.last(x_BLD), cache


def by_layer(
    config: DecoderConfig, positions_BL: jax.Array
) -> tuple[dict[str, jax.Array], Callable[[dict[str, jax.Array]], tuple[tuple[jax.Array, jax.Array], AttentionSpec]]]:
    """The inputs of a loop over layers other than weights: values that differ by layer (leading axis: layers), and a
    function from one layer's values to its rotary tables and `AttentionSpec`.

    One set of frequencies and one window are constants of the loop; several are picked layer by layer.
    """
    c = config
    distinct, amplitudes, row_of_layer = c.frequencies()
    tables = rope_tables(positions_BL, distinct, amplitudes)
    slides = [c.slides(layer) for layer in range(c.num_layers)]
    window = c.sliding_window if all(slides) else None
    differs = {}
    if len(distinct) > 1:
        differs["rope"] = jnp.asarray(row_of_layer, jnp.int32)
    if any(slides) and not all(slides):
        # One program serves all layers, so a layer without a window has a very large one.
        differs["window"] = jnp.asarray([c.sliding_window if s else UNLIMITED for s in slides], jnp.int32)

    def of_layer(mine: dict[str, jax.Array]) -> tuple[tuple[jax.Array, jax.Array], AttentionSpec]:
        cos, sin = (table[mine.get("rope", 0)] for table in tables)
        width = mine.get("window", window)
        spec = AttentionSpec(c.attention_scale, c.attention_softcap, width, positions_BL, c.sliding_window)
        return (cos, sin), spec

    return differs, of_layer


class ScalarHead(nnx.Module):
    """A decoder with one linear output a position: reward models and critics."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.decoder = Decoder(config, rngs=rngs)
        self.score = nnx.Param(jnp.zeros(config.hidden_size, real()))

    def scores(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] to scores [...], in float32 at least: bfloat16 would round differences away."""
        # Exact also where the device by default rounds the inputs of float32 products.
        wide = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
        wide = _scaled(wide, self.decoder.config.logits_divisor)
        return jnp.matmul(wide, self.score[...].astype(wide.dtype), precision="highest")


@functools.lru_cache(maxsize=8)
def _abstract(config: DecoderConfig, weights: np.dtype[Any]) -> tuple[Any, Any]:
    # `weights` is `real` of the call: the shapes have that type.
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def abstract_decoder(config: DecoderConfig) -> tuple[Any, Any]:
    """Graph (static, hashable) and parameter shapes of a decoder, without allocating parameters."""
    graph, shapes = _abstract(config, real())
    # A copy: callers replace the shapes in place.
    return graph, jax.tree.map(lambda x: x, shapes)


def decoder_graph(config: DecoderConfig) -> Any:
    """The static half of a Decoder (hashable), to be merged with parameters inside jit."""
    return abstract_decoder(config)[0]


@functools.lru_cache(maxsize=8)
def scalar_graph(config: DecoderConfig) -> Any:
    """The static half of a ScalarHead."""
    return nnx.split(nnx.eval_shape(lambda: ScalarHead(config, rngs=nnx.Rngs(0))))[0]
