"""Forward passes of a policy or critic over the micro-batches of a round.

Axes: N completions of the round, C completions of a micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf.tuning import multihost
from rlhf.tuning.device import Compute
from rlhf.tuning.mesh import put_batch, under
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import decoder_graph, scalar_graph
from rlhf.tuning.training.batch import Packed
from rlhf.tuning.training.forward import logps_and_entropy, values_and_last
from rlhf.tuning.training.prefetch import one_ahead

Forward = Callable[[Any, dict[str, Any]], jax.Array]
"""A compiled (parameters, batch) -> an array whose first axis is C."""


def run_pass(
    program: Forward,
    weights: Any,
    steps: Iterable[list[Packed]],
    take: Callable[[np.ndarray, np.ndarray], None],
    mesh: Mesh | None,
) -> None:
    """Hands the outputs [C, ...] of a program to `take`, micro-batch by micro-batch, after their completions [C].

    steps: the micro-batches of each step, one of them at least. A slot of number -1 is empty.
    """

    def read(batch: Packed, values: jax.Array) -> None:
        take(batch.ids_C, multihost.to_host(values))

    # The micro-batch that the device may still compute: it is read when the device has the next one.
    under_way: Callable[[], None] | None = None
    for batch in (batch for step in one_ahead(steps) for batch in step):
        with under(mesh):
            values = program(weights, put_batch(batch.arrays(), mesh))
        if under_way is not None:
            under_way()
        under_way = functools.partial(read, batch, values)
    assert under_way is not None
    under_way()


# Kept between rounds: a new function would be compiled again.
@functools.lru_cache(maxsize=8)
def logps_program(model: DecoderConfig, temperature: float, compute: Compute, which: int = 0) -> Forward:
    """Log-probabilities of the tokens of completions, or with `which` 1 entropies at them, [C, T]."""
    graph = decoder_graph(model)
    return jax.jit(lambda params, batch: logps_and_entropy(graph, params, batch, temperature, compute)[which])


@functools.lru_cache(maxsize=8)
def values_program(model: DecoderConfig, compute: Compute) -> Forward:
    """Values of a critic for the tokens of completions and for the state after the last one, [C, T + 1]."""
    graph = scalar_graph(model)
    return jax.jit(lambda params, batch: values_and_last(graph, params, batch, compute))
