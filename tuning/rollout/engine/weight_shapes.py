"""The shapes of weights that are not there yet, for programs that are compiled before they are needed."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import abstract_decoder
from rlhf.tuning.rollout.engine.decoders import Graph, lay_out


def abstract_weights(graph: Graph, config: DecoderConfig, **options: Any) -> tuple[Graph, nnx.State]:
    """(graph, shapes) of `lay_out` with these options for a decoder's float32 parameters, which need not exist yet."""
    graphs: list[Graph] = []

    def state_of(params: nnx.State) -> nnx.State:
        laid_out, state = lay_out(graph, params, **options)
        # The graph is static: it cannot be a result of eval_shape.
        graphs.append(laid_out)
        return state

    shapes = jax.eval_shape(state_of, abstract_decoder(config)[1])
    return graphs[0], shapes
