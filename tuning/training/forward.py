"""Packed rows through a model: response log-probabilities, entropies, values and scores.

Axes as in `batch`: C completions, T completion tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tuning.device import Compute
from tuning.losses.head import token_logps
from tuning.models.attention import packed_attention
from tuning.models.decoder import Decoder
from tuning.models.lora import assemble

Batch = dict[str, jax.Array]


def _hidden(decoder: Decoder, batch: Batch, compute: Compute) -> jax.Array:
    hidden, _ = decoder(
        batch["tokens_BL"],
        batch["positions_BL"],
        packed_attention(batch["group_BL"], batch.get("branch_BL")),
        dtype=jnp.dtype(compute.dtype),
        remat=compute.remat,
    )
    return hidden.reshape(-1, hidden.shape[-1])


def logps_and_entropy(
    graph: Any, params: Any, batch: Batch, temperature: float, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each completion token and entropy at its position, both [C, T], 0 where masked, in at least
    float32."""
    decoder = assemble(graph, params)
    hidden = _hidden(decoder, batch, compute)
    at, targets = masked_tokens(batch, "at_CT"), masked_tokens(batch, "targets_CT")
    logps, entropy = token_logps(
        hidden[at], targets, decoder.head_weight(), temperature=temperature, softcap=decoder.config.final_softcap
    )
    return by_completion(batch, logps), by_completion(batch, entropy)


def response_hidden(
    graph: Any, params: Any, batch: Batch, compute: Compute
) -> tuple[jax.Array, jax.Array, float | None]:
    """Hidden states that predict the M tokens with a mask of 1, [M, D], and the head: its weight [V, D] and softcap."""
    decoder = assemble(graph, params)
    hidden = _hidden(decoder, batch, compute)[masked_tokens(batch, "at_CT")]
    return hidden, decoder.head_weight(), decoder.config.final_softcap


def masked_tokens(batch: Batch, name: str) -> jax.Array:
    """An integer array [C, T] of the batch at the M tokens with a mask of 1, which alone reach the LM head, [M]."""
    # Past the end a gather reads anything and a scatter writes nothing.
    return jnp.take(batch[name], batch["where_M"], mode="clip")


def by_completion(batch: Batch, values_M: jax.Array) -> jax.Array:
    """Values of the M tokens with a mask of 1 at their places, [C, T]; 0 where masked."""
    shape = batch["mask_CT"].shape
    flat = jnp.zeros(shape[0] * shape[1], values_M.dtype)
    return flat.at[batch["where_M"]].set(values_M, mode="drop").reshape(shape)


def values(graph: Any, params: Any, batch: Batch, compute: Compute) -> jax.Array:
    """Critic values [C, T] of the states in which each completion token was chosen, 0 where masked."""
    model = assemble(graph, params)
    hidden = _hidden(model.decoder, batch, compute)
    return jnp.where(batch["mask_CT"] > 0, model.scores(hidden[batch["at_CT"]]), 0.0)


def values_and_last(graph: Any, params: Any, batch: Batch, compute: Compute) -> jax.Array:
    """Critic values [C, T + 1]: before each completion token as in `values`, then of the state after the last one."""
    model = assemble(graph, params)
    hidden = _hidden(model.decoder, batch, compute)
    before = jnp.where(batch["mask_CT"] > 0, model.scores(hidden[batch["at_CT"]]), 0.0)
    return jnp.concatenate([before, model.scores(hidden[batch["last_C"]])[:, None]], axis=1)


def scores(graph: Any, params: Any, batch: Batch, compute: Compute) -> jax.Array:
    """Reward-model scores [C], read at the recorded last token (R12)."""
    model = assemble(graph, params)
    hidden = _hidden(model.decoder, batch, compute)
    return model.scores(hidden[batch["last_C"]])
