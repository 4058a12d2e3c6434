"""The LM head in chunks: log-probabilities and entropies without ever holding [tokens, vocabulary].

Axes: M positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 256


def token_logps(
    hidden_MD: jax.Array, targets_M: jax.Array, weight_VD: jax.Array, *, temperature: float = 1.0, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """log softmax(z / T) of the targets and the entropy of that distribution, both [M] in float32.

    z = hidden @ weight.T accumulates in float32. Positions are taken `chunk` at a time and
    recomputed in the backward pass, so memory is chunk * V for any M. A temperature of 0 is greedy
    decoding and leaves logits unscaled.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    size = min(chunk, hidden_MD.shape[0])
    padding = -hidden_MD.shape[0] % size
    hidden = jnp.pad(hidden_MD, ((0, padding), (0, 0))).reshape(-1, size, hidden_MD.shape[1])
    targets = jnp.pad(targets_M, (0, padding)).reshape(-1, size)

    @jax.checkpoint
    def one(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, t = args
        logits = jnp.einsum("md,vd->mv", h, weight_VD.astype(h.dtype), preferred_element_type=jnp.float32) * scale
        logz = jax.nn.logsumexp(logits, axis=-1)
        logp = jnp.take_along_axis(logits, t[:, None], axis=-1)[:, 0] - logz
        entropy = logz - jnp.sum(jnp.exp(logits - logz[:, None]) * logits, axis=-1)
        return logp, entropy

    if hidden.shape[0] == 1:
        logps, entropies = one((hidden[0], targets[0]))
    else:
        logps, entropies = jax.lax.map(one, (hidden, targets))
    return logps.reshape(-1)[: targets_M.shape[0]], entropies.reshape(-1)[: targets_M.shape[0]]
