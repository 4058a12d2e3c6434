"""What a gradient keeps of a layer: results of products and of attention. The rest is cheap and recomputed."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept"


def keep(x: jax.Array) -> jax.Array:
    """Marks an array to be kept for the backward pass."""
    return checkpoint_name(x, KEPT)
