"""Scores of a learned reward model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlhf.tuning.chat.template import Template
from rlhf.tuning.device import Compute, choose
from rlhf.tuning.mesh import mesh_of
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import scalar_graph
from rlhf.tuning.training.batch import Group
from rlhf.tuning.training.completions import per_completion
from rlhf.tuning.training.forward import scores


@functools.lru_cache(maxsize=8)
def _scorer(config: DecoderConfig, compute: Compute) -> Any:
    # Cached: a new jitted function would compile again for every call.
    graph = scalar_graph(config)
    return jax.jit(lambda params, batch: scores(graph, params, batch, compute))


def ended_by(end: int | None, token_ids: Sequence[int]) -> np.ndarray:
    """The tokens of a completion that has ended, int32, with `end`, the end of a turn, as the last one.

    A policy may stop at another id of its generation config. The model was trained on completions that all end with the
    same token, at which it is read, and knows nothing of its score at others (R23). None: there is no such token.
    """
    tokens = np.asarray(token_ids, np.int32)
    return tokens if end is None else np.append(tokens[:-1], np.int32(end))


def rendered(template: Template, messages: Sequence[Mapping[str, Any]], pad: int | None) -> list[int]:
    """Token ids of a conversation as a sequence classifier with this template reads it.

    The last token is the one at which transformers takes the score: the last that is not `pad`. Raises as `plain_ids`.
    """
    ids = template.plain_ids(messages, header=False)
    while len(ids) > 1 and ids[-1] == pad:
        ids.pop()
    return ids


def score_groups(
    config: DecoderConfig, params: Any, groups: Sequence[Group], *, dtype: str, budget: int = 0
) -> np.ndarray:
    """Score of every completion, [max id + 1] float32, indexed by the ids in `groups`.

    budget: row tokens of a micro-batch, 0 for the device's default. A score does not depend on the rest of the batch
    (R12).
    """
    device = choose(dtype)
    forward = functools.partial(_scorer(config, device.compute), params)
    return per_completion(forward, groups, budget or device.row_tokens_per_step, mesh=mesh_of(params))
