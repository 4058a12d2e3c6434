"""The trainer's decoder in the layouts that decoding reads fastest. Mathematics are those of `Layer`.

A scan over stacked weights copies each layer out of the stack, which for a step of few rows costs as much as reading
them. There are two layouts without that copy:

- `UnrolledDecoder`: every layer by itself; the program grows with depth.
- `RolledDecoder`: the stacks, with a loop. The CPU kernels take the stack and a layer's index, so nothing is copied,
  and compile time does not grow with depth. (Work that XLA does in place of a kernel copies the layer each time.)

Projections with one input are joined, so that their product reads the input once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.models.decoder import Attention, AttentionSpec, Decoder, Layer, by_layer
from rlhf.tuning.models.experts import Routing, as_chosen
from rlhf.tuning.models.linear import JOINED
from rlhf.tuning.models.matmul import factor, soft_cap
from rlhf.tuning.models.quantize import Int8
from rlhf.tuning.models.rope import rope_tables
from rlhf.tuning.models.sharding import path_names
from rlhf.tuning.rollout.engine.cache import Stack
from rlhf.tuning.rollout.engine.cpu import products


@jax.tree_util.register_static
class Graph(nnx.GraphDef[Any]):
    """The static half of a module; its other half is an `nnx.State`.

    It keeps its hash, which each call of a program asks for: that of 32 layers takes milliseconds.
    """

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


Quantization = Literal["none", "int8"]
"""Of the weight matrices of layers; int8 as in `quantize.Int8`."""
Ways = tuple[Attention, Routing]
"""How layers attend and route."""
_APART = {name: (name,) for name in ("q", "k", "v", "o", "gate", "up", "down")}
_TOGETHER = {name: _APART[name] for name in ("o", "down")} | JOINED
"""The products of a layer, and the projections that each consists of."""


class DecodingDecoder(nnx.Module):
    """A Decoder with its layers in another layout; for decoding, not for training.

    `target`, set before use, is the name of the kernel for products, as in `products.product`.
    """

    def __init__(self, decoder: Decoder):
        self.config = decoder.config
        del decoder.layers
        # Embedding, final norm and LM head.
        self.rest = decoder
        self.target: str | None = None

    def logits(self, hidden_RD: jax.Array) -> jax.Array:
        """Logits [R, V] in at least float32 of final hidden states."""
        if target_platform() != "cpu":
            return self.rest.logits(hidden_RD)
        weight = factor(self.rest.head_weight().astype(hidden_RD.dtype))
        return soft_cap(products.product(hidden_RD, weight[None], 0, self.target), self.config.final_softcap)

    def __call__(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        attention: Attention,
        *,
        live_BL: jax.Array,
        cache: Sequence[Stack],
        new: Sequence[Stack],
        dtype: Any,
        routing: Routing = as_chosen,
    ) -> tuple[jax.Array, list[Stack]]:
        """Hidden states after the last norm [B, L, D], and `new` with the keys and values that attention wrote.

        Attention and routing receive and return (a stack of `cache`, the same stack of `new`, index of the layer in
        both). Of their results only the stack of `new` is kept.

        Tokens that are not live are zeros in every layer (but for biases): `products` skips rows of zeros.
        """
        x = jnp.where(live_BL[..., None], self.rest.embed(tokens_BL, dtype), 0)

        def of_live(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, mine: Any) -> Any:
            out, mine = attention(q, k, v, spec, mine)
            return jnp.where(live_BL[..., None, None], out, 0), mine

        x, new = self._through_layers(x, positions_BL, (of_live, routing), cache, new)
        return self.rest.last(x), new

    def _through_layers(
        self, x: jax.Array, positions: jax.Array, ways: Ways, cache: Sequence[Stack], new: Sequence[Stack]
    ) -> tuple[jax.Array, list[Stack]]:
        raise NotImplementedError


class UnrolledDecoder(DecodingDecoder):
    """Each layer by itself, with its own cache."""

    def __init__(self, decoder: Decoder, layers: Sequence[Layer]):
        super().__init__(decoder)
        self.layers = nnx.List(layers)

    def _through_layers(
        self, x: jax.Array, positions: jax.Array, ways: Ways, cache: Sequence[Stack], new: Sequence[Stack]
    ) -> tuple[jax.Array, list[Stack]]:
        c = self.config
        distinct, amplitudes, row_of_layer = c.frequencies()
        cos, sin = rope_tables(positions, distinct, amplitudes)
        changed = []

        # Nested jit: traced once for all layers with the same graph, frequencies and window.
        @functools.partial(jax.jit, static_argnums=(0, 1, 2))
        def run(graph: Any, row: int, window: int | None, state: Any, x: jax.Array, far: Stack, near: Stack) -> Any:
            spec = AttentionSpec(c.attention_scale, c.attention_softcap, window, positions)
            attention, routing = ways
            layer = nnx.merge(graph, state)
            x, (_, near, _) = layer(x, (cos[row], sin[row]), attention, spec, (far, near, 0), routing)
            return x, near

        for i, layer in enumerate(self.layers):
            window = c.sliding_window if c.slides(i) else None
            graph, state = nnx.split(layer)
            x, near = run(graph, int(row_of_layer[i]), window, state, x, cache[i], new[i])
            changed.append(near)
        return x, changed


class RolledDecoder(DecodingDecoder):
    """Stacked layers in a loop, with one cache for all."""

    def __init__(self, decoder: Decoder, layers: Layer):
        super().__init__(decoder)
        self.layers = layers

    def _through_layers(
        self, x: jax.Array, positions: jax.Array, ways: Ways, cache: Sequence[Stack], new: Sequence[Stack]
    ) -> tuple[jax.Array, list[Stack]]:
        (far,), (near,) = cache, new
        differs, of_layer = by_layer(self.config, positions)
        graph, in_stack, *sliced = nnx.split(self.layers, products.InStack, ...)

        def body(number: jax.Array, carried: tuple[jax.Array, Stack]) -> tuple[jax.Array, Stack]:
            x, near = carried
            # Only small parameters (norms, biases, scales) are taken out of the stack. The matrices,
            # `in_stack`, stay: their kernel takes the index of the layer.
            mine, differences = jax.tree.map(lambda s: s[number], (sliced, differs))
            layer = nnx.merge(graph, in_stack, *mine)
            for _, module in nnx.iter_modules(layer):
                if isinstance(module, products.OutIn):
                    module.number, module.target = number, self.target
            rope, spec = of_layer(differences)
            attention, routing = ways
            x, (_, near, _) = layer(x, rope, attention, spec, (far, near, number), routing)
            return x, near

        x, near = jax.lax.fori_loop(0, self.config.num_layers, body, (x, near))
        return x, [near]


def _prepared(
    graph: Any, layer: Any, join: bool, rolled: bool, quantization: Quantization, dtype: str
) -> tuple[Any, nnx.State]:
    """One layer, as (graph, state)."""
    int8 = quantization == "int8"
    # Weights that become int8 are not cast before: they would be rounded twice.
    layer = nnx.merge(
        graph, jax.tree_util.tree_map_with_path(functools.partial(_narrow, None if int8 else dtype), layer)
    )
    parts_of = _TOGETHER if join else _APART
    if layer.config.joined:
        parts_of = {name: (name,) for name in _TOGETHER}
    if layer.config.shared_size:
        parts_of = parts_of | {name: (name,) for name in ("shared_gate", "shared_up", "shared_down")}
    if layer.config.paired_experts:
        parts_of = {name: parts_of[name] for name in parts_of if name not in ("gate", "up")} | {"gate_up": ("gate_up",)}
    for name, parts in parts_of.items():
        linears = [getattr(layer, part) for part in parts]
        whole, kernels = linears[0], [linear.kernel[...] for linear in linears]
        if rolled:
            whole.kernel = products.OutIn(kernels, int8=int8)
        else:
            whole.kernel = (Int8 if int8 else nnx.Param)(_side_by_side(kernels))
        if hasattr(whole, "bias"):
            whole.bias = nnx.Param(_side_by_side([linear.bias[...] for linear in linears]))
        for part in parts:
            delattr(layer, part)
        setattr(layer, name, whole)
    return nnx.split(layer)


def _side_by_side(weights: Sequence[jax.Array]) -> jax.Array:
    return weights[0] if len(weights) == 1 else jnp.concatenate(weights, axis=-1)


def _narrow(dtype: str | None, path: Any, x: jax.Array) -> jax.Array:
    # The trainer reads weights of routers and biases of experts as they are.
    return x if path_names(path)[-1] in ("router", "bias") else _cast(x, dtype)


def _cast(x: jax.Array, dtype: str | None) -> jax.Array:
    """Matrices in `dtype`, to which the trainer casts them at each use; vectors stay."""
    return x.astype(dtype) if dtype and x.ndim > 1 else x


def _layer(stacked: Any, number: jax.Array | int) -> Any:
    return jax.tree.map(lambda x: x[number], stacked)


# The index of the layer is an argument, so one program serves all depths.
@functools.partial(jax.jit, static_argnames=("graph", "join", "quantization", "dtype"))
def _state(graph: Any, stacked: Any, number: jax.Array, *, join: bool, quantization: Quantization, dtype: str) -> Any:
    return _prepared(graph, _layer(stacked, number), join, False, quantization, dtype)[1]


# All layers at once: in a loop over layers XLA on CPU has one core transpose them.
@functools.partial(jax.jit, static_argnames=("graph", "join", "quantization", "dtype"))
def _states(graph: Any, stacked: Any, *, join: bool, quantization: Quantization, dtype: str) -> Any:
    return jax.vmap(lambda layer: _prepared(graph, layer, join, True, quantization, dtype)[1])(stacked)


def lay_out(
    graph: Graph, params: nnx.State, *, join: bool, rolled: bool, quantization: Quantization, dtype: str
) -> tuple[Graph, nnx.State]:
    """(graph, state) of a `DecodingDecoder` with a Decoder's parameters.

    The matrices of layers, and on accelerators the tables of tokens, are cast to `dtype`.

    It is a `RolledDecoder` if `rolled`, else an `UnrolledDecoder`. `join` concatenates kernels that share an input. It
    is not for a mesh with a `tensor` axis: an even split of the joined outputs would divide heads between devices.
    """
    decoder = nnx.merge(graph, params)
    for name in ("embedding", "head"):
        # XLA on CPU would hold a float32 copy of a smaller table through each run of steps.
        if hasattr(decoder, name) and target_platform() != "cpu":
            setattr(decoder, name, nnx.Param(_cast(getattr(decoder, name)[...], dtype)))
    stack, stacked = nnx.split(decoder.layers)
    options: dict[str, Any] = {"join": join, "quantization": quantization, "dtype": dtype}
    # The structure of a laid-out layer, from shapes alone: the compiled programs below return states only.
    abstract = nnx.eval_shape(lambda s: nnx.merge(*_prepared(stack, _layer(s, 0), rolled=rolled, **options)), stacked)
    like = nnx.split(abstract)[0]
    if rolled:
        made: nnx.Module = RolledDecoder(decoder, nnx.merge(like, _states(stack, stacked, **options)))
    else:
        numbers = np.arange(decoder.config.num_layers, dtype=np.int32)
        made = UnrolledDecoder(decoder, [nnx.merge(like, _state(stack, stacked, i, **options)) for i in numbers])
    definition, state = nnx.split(made)
    # Arrays alone: each call of a program would sort the metadata of every variable.
    return Graph(definition.nodes, definition.attributes, definition.num_leaves), nnx.as_pure(state)
