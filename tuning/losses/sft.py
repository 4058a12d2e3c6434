"""The loss of supervised fine-tuning: -log p of every target token.

Axes: B rows, T target tokens. Aggregate with "token-mean" and the target count of the whole optimizer step.
"""

import jax


def nll(logps: jax.Array) -> jax.Array:
    """Negative log-likelihood in nats; same shape as the log-probabilities."""
    return -logps
