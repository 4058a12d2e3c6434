"""Distillation from a teacher's next-token distributions, on given completions or on the student's own (GKD).

GKD: Agarwal et al., arXiv:2306.13649. Axes: C completions of a micro-batch, T completion tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlhf.tuning.device import Compute
from rlhf.tuning.losses.aggregate import aggregate
from rlhf.tuning.losses.distillation_head import token_divergences
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.training.forward import by_completion, response_hidden
from rlhf.tuning.training.step import Batch, LossFn, Tree


def divergences(
    graphs: tuple[Any, Any], student: Any, teacher: Any, batch: Any, beta: float, temperature: float, compute: Compute
) -> jax.Array:
    """Divergence at every completion token, [C, T]; 0 where masked. `graphs`: of student and teacher."""
    both = zip(graphs, (student, jax.lax.stop_gradient(teacher)), strict=True)
    decoders, hidden = zip(*(response_hidden(*one, batch, compute) for one in both), strict=True)
    heads, softcaps = [d.head_weight() for d in decoders], tuple(d.config.final_softcap for d in decoders)
    values = token_divergences(
        hidden[0], heads[0], hidden[1], heads[1], beta=beta, temperature=temperature, softcaps=softcaps
    )
    return by_completion(batch, values)


def distillation_loss(graphs: tuple[Any, Any], beta: float, temperature: float, compute: Compute) -> LossFn:
    """Mean divergence over the step's tokens; the teacher's parameters are the frozen ones."""

    def loss(params: Tree, batch: Batch, frozen: Tree) -> tuple[jax.Array, Batch]:
        values = divergences(graphs, params, frozen, batch, beta, temperature, compute)
        mask = batch["mask_CT"]
        # A token mean reads no number of sequences.
        value = aggregate(values, mask, "token-mean", n_tokens=batch["n_tokens"], n_sequences=jnp.ones(()))
        return value, {"divergence": jnp.sum(values), "tokens": jnp.sum(mask)}

    return loss


@functools.lru_cache(maxsize=8)
def summed_divergence(
    student: DecoderConfig, teacher: DecoderConfig, beta: float, temperature: float, compute: Compute
) -> Any:
    """A compiled (student parameters, teacher parameters, batch) -> divergence summed over each completion, [C]."""
    graphs = decoder_graph(student), decoder_graph(teacher)
    return jax.jit(lambda p, t, batch: jnp.sum(divergences(graphs, p, t, batch, beta, temperature, compute), axis=1))
