"""Programs compiled in threads before they are needed, and the shapes of the weights that they need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from tuning.models.config import DecoderConfig
from tuning.models.decoder import abstract_decoder
from tuning.precision import without_float64
from tuning.rollout.engine.decoders import Graph, lay_out


class Ahead:
    """Threads that compile, one a key; a key names a program with its shapes."""

    def __init__(self) -> None:
        self._threads: dict[tuple[str, ...], threading.Thread] = {}

    def begin(self, key: tuple[str, ...], lowered: Callable[[], Any]) -> None:
        """Starts a thread that compiles what `lowered` returns, unless this key has one.

        JAX keeps the compiled program for the later call.
        """
        if key not in self._threads:
            compiled = without_float64(lambda: lowered().compile())
            # A daemon: the process may exit in the middle of a compilation.
            thread = threading.Thread(target=compiled, name="compile", daemon=True)
            self._threads[key] = thread
            thread.start()

    def wait(self, key: tuple[str, ...]) -> None:
        """Returns once no thread compiles this key, so that the call does not compile it a second time."""
        if key in self._threads:
            self._threads[key].join()


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
