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
        packed_attention(batch["group_BL"], batch["branch_BL"]),
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
    where, shape = batch["where_M"], batch["mask_CT"].shape
    # Past the end a gather reads anything and a scatter writes nothing.
    at, targets = (jnp.take(batch[name], where, mode="clip") for name in ("at_CT", "targets_CT"))
    logps, entropy = token_logps(
        hidden[at], targets, decoder.head_weight(), temperature=temperature, softcap=decoder.config.final_softcap
    )

    # Only the M tokens with a mask of 1 went through the head; back to [C, T].
    def by_completion(values_M: jax.Array) -> jax.Array:
        return jnp.zeros(shape[0] * shape[1], values_M.dtype).at[where].set(values_M, mode="drop").reshape(shape)

    return by_completion(logps), by_completion(entropy)


def response_hidden(
    graph: Any, params: Any, batch: Batch, compute: Compute
) -> tuple[jax.Array, jax.Array, float | None]:
    """Hidden states that predict the completion tokens [C, T, D], and the head: its weight [V, D] and softcap."""
    decoder = assemble(graph, params)
    return _hidden(decoder, batch, compute)[batch["at_CT"]], decoder.head_weight(), decoder.config.final_softcap


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
