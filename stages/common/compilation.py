"""How JAX is set up in every process that computes: the cache of programs that all share, and the types."""

from __future__ import annotations

from typing import Any

from rlhf.tuning.names import cache_folder

COMPILE_CACHE = "RLHF_COMPILE_CACHE"
"""Environment variable with the folder of the cache."""


def configure_jax() -> None:
    """Makes JAX keep every compiled program on disk: a new process loads what an earlier one compiled."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(cache_folder(COMPILE_CACHE, "jax")))
    # JAX by default keeps only programs that took a second to compile; a stage has hundreds of smaller ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def use_precision(config: Any, memory: dict[str, Any]) -> None:
    """Sets JAX up for the `compute.dtype` of a stage's settings, `auto` where they have none.

    If that changes the type of weights, `memory` is emptied, because it holds the other type.
    """
    from rlhf.tuning import precision

    compute = getattr(config, "compute", None)
    before = precision.real()
    precision.use("auto" if compute is None else compute.dtype)
    if precision.real() != before:
        memory.clear()
