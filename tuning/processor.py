"""What this machine's processor multiplies fast, told without loading JAX."""

from __future__ import annotations

import functools
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""Linux's names of the instructions. Products of bfloat16 take half the time of float32 with the first, and an eighth
with the second."""


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether it has products of bfloat16 that XLA and this project's kernels use. Elsewhere than on Linux: no."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return False
    return any(FLAGS & set(line.partition(":")[2].split()) for line in lines if line.startswith("flags"))
