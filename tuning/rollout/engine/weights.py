"""The weights of an engine, in the layout of decoding, on the engine's devices."""

from __future__ import annotations

import functools
import gc
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import abstract_decoder, decoder_graph
from rlhf.tuning.precision import in_real
from rlhf.tuning.rollout.engine.decoders import Graph, Quantization, lay_out
from rlhf.tuning.rollout.engine.placement import Place, put_weights


class Weights:
    """One policy's weights at a time."""

    def __init__(
        self, config: DecoderConfig, place: Place, *, rolled: bool, quantization: Quantization, dtype: str
    ) -> None:
        """Arguments as of `Engine`; `rolled` as of `decoders.lay_out`."""
        self._config, self.quantized = config, quantization == "int8"
        self.place = place
        """Where they are."""
        self.dtype = dtype
        """Type of the matrices of layers, unless they are quantised."""
        self._graph = decoder_graph(config)
        # A joined kernel cannot be sharded over heads (see `lay_out`).
        join = not isinstance(place, Mesh)
        self._options: dict[str, Any] = {"join": join, "rolled": rolled, "quantization": quantization, "dtype": dtype}
        self._now: tuple[Graph, nnx.State] | None = None

    @property
    def now(self) -> tuple[Graph, nnx.State]:
        """Graph and state of the decoder. RuntimeError before the first weights, and after they were dropped."""
        if self._now is None:
            raise RuntimeError("the engine has no weights; call load(params) first")
        return self._now

    @functools.cached_property
    def shapes(self) -> tuple[Graph, nnx.State]:
        """The graph, and the state as shapes."""
        return abstract_weights(self._graph, self._config, **self._options)

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads."""
        return sum(x.nbytes for x in jax.tree.leaves(self._now))

    def laid_out(self, params: nnx.State) -> tuple[Graph, nnx.State]:
        """(graph, state) of parameters in the layout of decoding, on the devices of the parameters."""
        was = gc.isenabled()
        gc.disable()
        try:
            return lay_out(self._graph, in_real(params), **self._options)
        finally:
            # Cycles of references in flax's flattening would hold the arrays. Nothing grows old meanwhile, so only
            # young objects are searched: a process that has traced many programs has millions of older ones.
            gc.collect(1)
            if was:
                gc.enable()

    def load(self, params: nnx.State) -> None:
        """Lays parameters out, and moves them to the place."""
        # Dropped before the new weights are laid out: memory need not hold both.
        self.drop()
        graph, state = self.laid_out(params)
        if isinstance(self.place, Mesh):
            state = put_weights(state, self.place)
        elif self.place is not None:
            state = jax.device_put(state, self.place)
        self.use(graph, state)

    def use(self, graph: Graph, state: nnx.State) -> None:
        """As `load`, with weights that are laid out and in place."""
        self._now = graph, state

    def drop(self) -> None:
        """Gives them up, for memory."""
        self._now = None


def abstract_weights(graph: Graph, config: DecoderConfig, **options: Any) -> tuple[Graph, nnx.State]:
    """(graph, shapes) of `lay_out` with these options for a decoder's float32 parameters, which need not exist."""
    graphs: list[Graph] = []

    def state_of(params: nnx.State) -> nnx.State:
        laid_out, state = lay_out(graph, params, **options)
        # The graph is static: it cannot be a result of eval_shape.
        graphs.append(laid_out)
        return state

    shapes = jax.eval_shape(state_of, abstract_decoder(config)[1])
    return graphs[0], shapes
