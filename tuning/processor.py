"""Types that this machine's processor multiplies fast, found without loading JAX."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""Linux's names of the instructions. Products of bfloat16 take half the time of float32 with the first, and an eighth
with the second."""


def multiplies_bfloat16() -> bool:
    """Whether it has products of bfloat16 that XLA and this project's kernels use. Elsewhere than on Linux: no."""
    return any(FLAGS & of_one for of_one in _flags())


def instructions() -> str:
    """A short digest of the instructions that the processor has; empty where the system does not list them."""
    text = "\n".join(sorted(" ".join(sorted(of_one)) for of_one in _flags()))
    return hashlib.sha256(text.encode()).hexdigest()[:8] if text else ""


@functools.cache
def _flags() -> tuple[frozenset[str], ...]:
    """The instructions of each kind of core."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ()
    return tuple({frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")})
