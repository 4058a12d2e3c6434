"""Programs compiled in threads before they are needed, and the shapes of what they will be given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax

from tuning.models.config import DecoderConfig
from tuning.models.decoder import abstract_decoder
from tuning.rollout.engine.decoders import lay_out


class Ahead:
    """Threads that compile, each under the key of what it compiles."""

    def __init__(self) -> None:
        self._threads: dict[tuple[str, ...], threading.Thread] = {}

    def begin(self, key: tuple[str, ...], lowered: Callable[[], Any]) -> None:
        """Has a thread compile what `lowered` gives, unless one has begun to. JAX keeps it for the call itself."""
        if key not in self._threads:
            thread = threading.Thread(target=lambda: lowered().compile(), name="compile", daemon=True)
            self._threads[key] = thread
            thread.start()

    def wait(self, key: tuple[str, ...]) -> None:
        """Returns when nobody compiles what has this key, so that it is not compiled twice."""
        if key in self._threads:
            self._threads[key].join()


def abstract_weights(graph: Any, config: DecoderConfig, **options: Any) -> tuple[Any, Any]:
    """(graph, shapes) as `lay_out` gives with these options of a decoder's float32 parameters, before there are any."""
    graphs = []

    def laid_out(params: Any) -> Any:
        found, state = lay_out(graph, params, **options)
        graphs.append(found)
        return state

    shapes = jax.eval_shape(laid_out, abstract_decoder(config)[1])
    return graphs[0], shapes
