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
    """`linear`: all divided by `factor`. `llama3`, `yarn`: the slow ones divided, the fast ones kept, smooth between,
    by wavelength or by number. `longrope`: each divided by a number of its own."""
    factor: float
    low_freq_factor: float = 1.0
    """Wavelengths above original_positions / low_freq_factor are divided; yarn's `beta_slow`."""
    high_freq_factor: float = 4.0
    """Wavelengths below original_positions / high_freq_factor are kept; yarn's `beta_fast`."""
    original_positions: int = 8192
    """llama3, yarn, longrope: the context length before it was extended."""
    amplitude: float = 1.0
    """yarn, longrope: factor of rotated queries and keys, `attention_factor`."""
    whole: bool = True
    """yarn: whether the smooth range ends at whole numbers of pairs, `truncate`."""
    short: tuple[float, ...] = ()
    """longrope: divisors of frequencies within the original context."""
    long: tuple[float, ...] = ()
    """longrope: those of longer sequences, which are not computed; for exports."""


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians a position for each pair of a head, [H/2] float64 (Su et al., 2021).

    `linear` is position interpolation (Chen et al., 2023), `llama3` the scaling that Llama 3.1 released, `yarn` that of
    Peng et al. (arXiv:2309.00071), `longrope` that of Ding et al. (arXiv:2402.13753).
    """
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "longrope":
        return plain / np.asarray(scaling.short)
    if scaling.kind == "yarn":
        turns = np.array([scaling.high_freq_factor, scaling.low_freq_factor]) * 2 * math.pi
        # The pairs that turn so often within the original context.
        first, last = head_dim * np.log(scaling.original_positions / turns) / (2 * math.log(theta))
        if scaling.whole:
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0.0), min(last, head_dim - 1.0)
        divided = np.clip((np.arange(head_dim // 2) - first) / (last - first or 0.001), 0.0, 1.0)
        return np.asarray(plain * (1 - divided + divided / scaling.factor))
    # Turns of each pair within the original context, and from them the weight of the unscaled frequency.
    turns = scaling.original_positions * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return plain * (kept + (1 - kept) / scaling.factor)


def rope_tables(
    positions_BL: jax.Array, frequencies_UH: np.ndarray, amplitudes_U: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, [U, B, L, 1, H/2]; float32, or float64 where the caller has enabled it."""
    # Angles grow with the position, so bfloat16 would not resolve neighbours.
    rates = jnp.asarray(frequencies_UH, dtype=float)[:, None, None, None]
    angles = positions_BL[..., None, None].astype(rates.dtype) * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if (amplitudes_U == 1).all():
        return cos, sin
    factors = jnp.asarray(amplitudes_U, rates.dtype)[:, None, None, None, None]
    return cos * factors, sin * factors


def rotate(x_BLNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of each head, or of its beginning for which there are angles (the Hugging Face convention:
    pairs are i and i + H/2)."""
    x32 = x_BLNH.astype(jnp.promote_types(x_BLNH.dtype, jnp.float32))
    half = cos.shape[-1]
    left, right, rest = jnp.split(x32, (half, 2 * half), axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1).astype(x_BLNH.dtype)
