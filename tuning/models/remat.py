"""Rematerialisation: which results of a layer's forward pass the backward pass keeps, and which it computes again.

Elements that a layer keeps per token of a row, in addition to its input of D: D hidden, W queries, keys and values,
A outputs of attention, F feed-forward.

    none        all that a gradient reads
    products    W + A + D + 2 F    results of products and of attention; the cheap rest is computed again
    dots        W + D + 2 F        results of products; attention is computed again
    attention   A                  what attention gives; all products are computed again
    full        0                  nothing (Chen et al., arXiv:1604.06174)
    offload     -D                 nothing, and its input is in the host's memory

Attention without blocks, XLA's of short rows, has no name: it is computed again whatever the policy but `none`. Kernels
of CPUs and GPUs give N normalisers in addition to A.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from rlhf.tuning.device import HOST_MEMORY

INPUT, HEADS, ATTENTION, RESIDUAL, MLP = "layer_input", "heads", "attention", "residual", "mlp"
PRODUCTS = (HEADS, ATTENTION, RESIDUAL, MLP)

_policies = jax.checkpoint_policies
POLICIES: dict[str, Callable[..., Any]] = {
    "products": _policies.save_only_these_names(*PRODUCTS),
    # By name: JAX's policy of dots does not see these products, which have a custom gradient (`matmul`).
    "dots": _policies.save_only_these_names(HEADS, RESIDUAL, MLP),
    "attention": _policies.save_only_these_names(ATTENTION),
    "full": _policies.nothing_saveable,
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[INPUT],
        offload_src="device",
        offload_dst=HOST_MEMORY,
    ),
}
"""Values that are kept in addition to a layer's input, by name; `none`, which is not listed, keeps everything."""
NAMES = ("none", *POLICIES)
RECOMPUTED = {name: float(name in ("attention", "full", "offload")) for name in NAMES}
"""Forward passes that a backward pass repeats: of products, which are nearly all of the work."""


def keep(x: jax.Array, name: str) -> jax.Array:
    """Names an array of a layer, for the policies."""
    return checkpoint_name(x, name)


def rematerialised(layer: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The body of a scan over layers, differentiated by the policy of this name."""
    if name == "none":
        return layer
    # Scans keep no common subexpressions across their bodies, so nothing needs to stop XLA from finding them.
    return jax.checkpoint(layer, policy=POLICIES[name], prevent_cse=False)
