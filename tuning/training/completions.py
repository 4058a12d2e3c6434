"""One number for each completion, or for each of its tokens, by a forward pass over packed groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf.tuning import multihost
from rlhf.tuning.device import Compute
from rlhf.tuning.mesh import put_batch, row_shards, under
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.precision import real
from rlhf.tuning.shapes import bucket
from rlhf.tuning.training.batch import Group, choose_rows, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy

AT_ONCE = 4096
"""Groups that are packed together: those of a large table would not all fit memory."""


def per_completion(
    forward: Callable[[dict[str, Any]], Any],
    groups: Sequence[Group],
    budget: int,
    *,
    like: Sequence[Group] | None = None,
    whole: bool = False,
    mesh: Mesh | None = None,
) -> np.ndarray:
    """`forward(batch)` [C] of every completion as [max id + 1], in the order of the groups' ids.

    budget: row tokens of a micro-batch. like: all groups of which `groups` are some, so that few shapes are compiled.
    whole: no group is split, so its completions are in neighbouring slots. mesh: where the model is; its devices
    divide the rows.
    """
    like = like or groups
    largest = max(g.size if whole else len(g.prompt) + max(len(c) for c in g.completions) for g in like)
    # A part of the groups is enough to choose the padding; `largest`, over all, makes sure that each fits.
    layout = choose_rows([like[:64]], budget, largest, whole)
    width = bucket(max(len(c) for g in like for c in g.completions))
    out = np.zeros(max(i for g in groups for i in g.ids) + 1, real())
    # The last part may be smaller, but layout and width are those of all: few shapes.
    for start in range(0, len(groups), AT_ONCE):
        part = [groups[i] for i in range(start, min(start + AT_ONCE, len(groups)))]
        for batch in micro_batches(part, layout=layout, completion_tokens=width, shards=row_shards(mesh)):
            with under(mesh):
                values_C = multihost.to_host(forward(put_batch(batch.arrays(), mesh)))
            filled = batch.ids_C >= 0
            out[batch.ids_C[filled]] = values_C[filled]
    return out


@functools.lru_cache(maxsize=8)
def _forward(model: DecoderConfig, temperature: float, compute: Compute) -> Any:
    graph = decoder_graph(model)
    return jax.jit(lambda params, batch: logps_and_entropy(graph, params, batch, temperature, compute)[0])


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
    logps: dict[int, list[float]] = {}
    for batch in micro_batches(groups, layout=layout, completion_tokens=width):
        logps_CT = multihost.to_host(_forward(model, temperature, compute)(params, batch.arrays()))
        for i, row in zip(batch.ids_C.tolist(), logps_CT, strict=True):
            if i >= 0:
                logps[i] = row[: len(pairs[i][1])].tolist()
    return [logps[i] for i in range(len(pairs))]
