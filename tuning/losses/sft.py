"""Losses of supervised fine-tuning, of every target token: -log p, and DFT.

Axes: B rows, T target tokens. Aggregate with "token-mean" and the target count of the whole optimizer step.
"""

import jax
import jax.numpy as jnp


def nll(logps: jax.Array) -> jax.Array:
    """Negative log-likelihood in nats; same shape as the log-probabilities."""
    return -logps


def dft(logps: jax.Array) -> jax.Array:
    """Dynamic fine-tuning (Wu et al., 2025, arXiv:2508.05629): -stop_gradient(p) log p."""
    return -jax.lax.stop_gradient(jnp.exp(logps)) * logps
