"""Scores of a learned reward model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tuning.device import choose
from tuning.models.config import DecoderConfig
from tuning.training.batch import Group, bucket, choose_rows, micro_batches
from tuning.training.forward import Compute, scalar_graph, scores


@functools.lru_cache(maxsize=8)
def _scorer(config: DecoderConfig, compute: Compute) -> Any:
    graph = scalar_graph(config)
    return jax.jit(lambda params, batch: scores(graph, params, batch, compute))


def score_groups(
    config: DecoderConfig, params: Any, groups: Sequence[Group], *, dtype: str = "auto", budget: int = 0
) -> np.ndarray:
    """Score of every completion, [max id + 1] float32, in the order of the groups' ids.

    A score does not depend on what else is in the batch (R12).
    """
    device = choose(dtype)
    layout = choose_rows([groups[:64]], budget or device.row_tokens_per_step)
    width = bucket(max(len(c) for g in groups for c in g.completions))
    out = np.zeros(max(i for g in groups for i in g.ids) + 1, np.float32)
    longest = max(g.size for g in groups)
    if longest > layout.row_tokens:
        layout = choose_rows([groups], budget or device.row_tokens_per_step)
    for batch in micro_batches(groups, layout=layout, completion_tokens=width):
        found = np.asarray(_scorer(config, device.compute)(params, batch.arrays()))
        filled = batch.ids_C >= 0
        out[batch.ids_C[filled]] = found[filled]
    return out
