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
from rlhf.tuning.training.step import LossFn


def divergences(
    graphs: tuple[Any, Any], student: Any, teacher: Any, batch: Any, beta: float, temperature: float, compute: Compute
) -> jax.Array:
    """Divergence at every completion token, [C, T]; 0 where masked. `graphs`: of student and teacher."""
    hidden, head, softcap = response_hidden(graphs[0], student, batch, compute)
    teacher_hidden, teacher_head, teacher_softcap = response_hidden(
        graphs[1], jax.lax.stop_gradient(teacher), batch, compute
    )
    values = token_divergences(
        hidden,
        head,
        teacher_hidden,
        teacher_head,
        beta=beta,
        temperature=temperature,
        softcaps=(softcap, teacher_softcap),
    )
    return by_completion(batch, values)


def distillation_loss(graphs: tuple[Any, Any], beta: float, temperature: float, compute: Compute) -> LossFn:
    """Mean divergence over the step's tokens; the teacher's parameters are the frozen ones."""

    def loss(params: Any, batch: dict[str, jax.Array], frozen: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
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
