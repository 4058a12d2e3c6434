"""Rotary positions: the frequencies of each layer, as numpy, and the rotation.

Axes as in `decoder`; U is the number of distinct sets of frequencies among the layers.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of a longer context come from the original ones."""

    kind: str
    """`linear`: all divided by `factor`. `llama3`: the slow ones divided, the fast ones kept, smooth between."""
    factor: float
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_positions / low_freq_factor are divided."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_positions / high_freq_factor are kept."""
    original_positions: int = 8192
    """llama3: the context length before it was extended."""


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians a position for each pair of a head, [H/2] float64 (Su et al., 2021).

    `linear` is position interpolation (Chen et al., 2023), `llama3` the scaling that Llama 3.1 released.
    """
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    # Turns of each pair within the original context, and from them the weight of the unscaled frequency.
    turns = scaling.original_positions * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return plain * (kept + (1 - kept) / scaling.factor)


def rope_tables(positions_BL: jax.Array, frequencies_UH: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, [U, B, L, 1, H/2]; float32, or float64 where the caller has enabled it."""
    # Angles grow with the position, so bfloat16 would not resolve neighbours.
    rates = jnp.asarray(frequencies_UH, dtype=float)[:, None, None, None]
    angles = positions_BL[..., None, None].astype(rates.dtype) * rates
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BLNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of each head (the Hugging Face convention: pairs are i and i + H/2)."""
    x32 = x_BLNH.astype(jnp.promote_types(x_BLNH.dtype, jnp.float32))
    left, right = jnp.split(x32, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BLNH.dtype)
