"""Rematerialisation: the backward pass keeps results of products and of attention, and recomputes the cheap rest."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept"


def keep(x: jax.Array) -> jax.Array:
    """Marks an array to be kept for the backward pass."""
    return checkpoint_name(x, KEPT)
