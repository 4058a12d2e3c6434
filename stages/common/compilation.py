"""XLA's persistent compilation cache, which every process that computes shares."""

from __future__ import annotations

import os
from pathlib import Path

COMPILE_CACHE = "RLHF_COMPILE_CACHE"
"""Environment variable with the folder of the cache."""


def configure_jax() -> None:
    """Makes JAX keep every compiled program on disk: a new process loads what an earlier one compiled."""
    import jax

    folder = os.environ.get(COMPILE_CACHE, str(Path.home() / ".cache" / "rlhf-pipeline" / "jax"))
    jax.config.update("jax_compilation_cache_dir", folder)
    # JAX by default keeps only programs that took a second to compile; a stage has hundreds of smaller ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
