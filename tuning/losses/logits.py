"""Log-probabilities and entropies from logits that fit in memory.

For training use the chunked head, which never holds the logits; these are for small vocabularies, teachers'
logits and tests. Axes: ... leading, V vocabulary. The temperature divides the logits, never a log-probability.
"""

import jax
import jax.numpy as jnp


def token_logps(logits: jax.Array, token_ids: jax.Array, temperature: float = 1.0) -> jax.Array:
    """log softmax(logits / temperature) of the given tokens: [..., V] and [...] give [...]."""
    logps = jax.nn.log_softmax(logits / temperature, axis=-1)
    return jnp.take_along_axis(logps, token_ids[..., None], axis=-1)[..., 0]


def entropy(logits: jax.Array, temperature: float = 1.0) -> jax.Array:
    """Entropy of softmax(logits / temperature) in nats, [...]; logits of -inf count as probability 0."""
    logps = jax.nn.log_softmax(logits / temperature, axis=-1)
    p = jnp.exp(logps)
    return -jnp.where(p > 0, p * jnp.where(p > 0, logps, 0), 0).sum(-1)


def sum_squared_probs(logits: jax.Array, temperature: float = 1.0) -> jax.Array:
    """sum_v pi_v^2, [...]; the chance that two samples agree."""
    return (jax.nn.softmax(logits / temperature, axis=-1) ** 2).sum(-1)


def mean_logps(logits: jax.Array, temperature: float = 1.0) -> jax.Array:
    """Mean over the vocabulary of the log-probabilities, [...]; what label smoothing needs."""
    return jax.nn.log_softmax(logits / temperature, axis=-1).mean(-1)
