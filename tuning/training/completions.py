"""Forward passes over packed groups: numbers of each completion, or of each of its tokens.

Axes: C completions of a micro-batch, T completion tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf.tuning import multihost
from rlhf.tuning.compile_target import few_shapes
from rlhf.tuning.device import Compute
from rlhf.tuning.mesh import put_batch, row_shards, under
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import decoder_graph, scalar_graph
from rlhf.tuning.precision import real
from rlhf.tuning.shapes import bucket
from rlhf.tuning.training.batch import Bounds, Group, Packed, choose_rows, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy, values_and_last
from rlhf.tuning.training.prefetch import one_ahead, one_behind

AT_ONCE = 4096
"""Groups that are packed together: those of a large table would not all fit memory."""
Batch = dict[str, Any]


def run_pass(
    forward: Callable[[Batch], jax.Array], steps: Iterable[list[Packed]], mesh: Mesh | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the completions [C] of each micro-batch and the outputs [C, ...] of `forward`; number -1: an empty slot."""

    def outputs() -> Iterator[tuple[np.ndarray, jax.Array]]:
        for batch in (batch for step in one_ahead(steps) for batch in step):
            with under(mesh):
                values = forward(put_batch(batch.arrays(), mesh))
            yield batch.ids_C, values

    return ((ids_C, multihost.to_host(values)) for ids_C, values in one_behind(outputs()))


# Kept between calls: a new function would be compiled again.
@functools.lru_cache(maxsize=8)
def logps_program(model: DecoderConfig, temperature: float, compute: Compute, which: int = 0) -> Any:
    """A compiled (parameters, batch) -> log-probabilities of completion tokens, or with `which` 1 entropies, [C, T]."""
    graph = decoder_graph(model)
    return jax.jit(lambda params, batch: logps_and_entropy(graph, params, batch, temperature, compute)[which])


@functools.lru_cache(maxsize=8)
def values_program(model: DecoderConfig, compute: Compute) -> Any:
    """A compiled (parameters, batch) -> values of a critic for each token and the state after the last, [C, T + 1]."""
    graph = scalar_graph(model)
    return jax.jit(lambda params, batch: values_and_last(graph, params, batch, compute))


def per_completion(
    forward: Callable[[Batch], Any],
    groups: Sequence[Group],
    budget: int,
    *,
    like: Sequence[Group] | None = None,
    whole: bool = False,
    mesh: Mesh | None,
) -> np.ndarray:
    """`forward(batch)` [C] of every completion as [max id + 1], in the order of the groups' ids.

    budget: row tokens of a micro-batch. like: all groups of which `groups` are some, so that few shapes are compiled.
    whole: no group is split, so its completions are in neighbouring slots. mesh: where the model is; its devices
    divide the rows.
    """
    like = like or groups
    largest = max(g.size if whole else len(g.prompt) + max(len(c) for c in g.completions) for g in like)
    # A part of the groups is enough to choose the padding; `largest`, over all, makes sure that each fits.
    bounds = Bounds(sum(len(g.completions) for g in like)) if few_shapes() else None
    layout = choose_rows([like[:64]], budget, largest, whole, bounds=bounds)
    # The last part may be smaller, but layout and width are those of all: few shapes.
    width = bucket(max(len(c) for g in like for c in g.completions))
    out = np.zeros(max(i for g in groups for i in g.ids) + 1, real())
    steps = (
        micro_batches(groups[start : start + AT_ONCE], layout=layout, completion_tokens=width, shards=row_shards(mesh))
        for start in range(0, len(groups), AT_ONCE)
    )
    for ids_C, values_C in run_pass(forward, steps, mesh):
        out[ids_C[ids_C >= 0]] = values_C[ids_C >= 0]
    return out


def token_logps(
    model: DecoderConfig,
    params: Any,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    temperature: float,
    compute: Compute,
    budget: int,
) -> list[list[float]]:
    """Log-probabilities of each token of (prompt, completion) pairs, as training computes them (R14).

    budget: row tokens of a micro-batch.
    """
    groups = [Group(list(prompt), [list(tokens)], [i]) for i, (prompt, tokens) in enumerate(pairs)]
    layout, width = choose_rows([groups], budget), bucket(max(len(tokens) for _, tokens in pairs))
    steps = [micro_batches(groups, layout=layout, completion_tokens=width)]
    program = functools.partial(logps_program(model, temperature, compute), params)
    rows = {
        i: row for ids_C, logps_CT in run_pass(program, steps, None) for i, row in zip(ids_C, logps_CT, strict=True)
    }
    return [rows[i][: len(tokens)].tolist() for i, (_, tokens) in enumerate(pairs)]
