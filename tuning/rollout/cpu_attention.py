"""Attention of a decoding step on CPU, by a kernel in C (`cpu_attention.c`) that the machine's own compiler builds.

XLA on CPU runs the small products of attention on one core, over every slot to the capacity. The kernel takes all
cores and reads what each row sees. Where no C compiler is found, or for other types, `cache.attend` does the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from tuning.models.decoder import AttentionSpec
from tuning.rollout.cache import Layer

SOURCE = Path(__file__).with_suffix(".c")
LANES = 16
"""The kernel's vectors: a head's size must be a multiple."""
OPTIONS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared")
_LOCK = threading.Lock()
_REGISTERED: set[str] = set()
_log = logging.getLogger(__name__)


def suits(dtype: str, kv: str, head_dim: int) -> bool:
    """Whether the kernel is for this backend, these types and heads."""
    return jax.default_backend() == "cpu" and (dtype, kv) == ("float32", "float32") and head_dim % LANES == 0


def kernel(compiler: str | None = None) -> str | None:
    """The name under which XLA knows the kernel; None, with a warning that says why, where it cannot be built.

    `compiler` is a command, by default that of the environment variable CC, or `cc`. Where JAX keeps what it compiles,
    the kernel stays there too, for this source, compiler, processor and version of jaxlib; else it is this process's.
    """
    with _LOCK:
        return _kernel(compiler or os.environ.get("CC") or "cc")


def attend(
    name: str,
    q_RCNH: jax.Array,
    far: Layer,
    near: Layer,
    live_R: jax.Array,
    length_R: jax.Array,
    t: jax.Array | int,
    spec: AttentionSpec,
) -> jax.Array:
    """Attention of one query a row (C is 1) over the first `length_R` cached tokens and `t` + 1 new ones.

    Layers as in `cache`, float32. The query's position is `length_R` + `t`. Rows that are not live see new tokens only;
    nobody reads what comes of them. Out [R, 1, N, H].
    """
    r, _, n, h = q_RCNH.shape
    heads = far["k"].shape[1]
    end = jnp.where(live_R, length_R, 0)
    first, first_new = jnp.zeros((2, r), jnp.int32)
    if spec.window is not None:
        oldest = length_R + t - spec.window + 1
        first, first_new = jnp.clip(oldest, 0, end), jnp.clip(oldest - length_R, 0, t)
    spans = jnp.stack([first, end, first_new, jnp.full(r, t + 1)], axis=-1).astype(jnp.int32)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((r, heads, n // heads, h), jnp.float32))
    q = (q_RCNH * spec.scale).reshape(r, heads, n // heads, h)
    out = call(q, far["k"], far["v"], near["k"], near["v"], spans, softcap=np.float32(spec.softcap or 0))
    return out.reshape(q_RCNH.shape)


@functools.cache
def _kernel(compiler: str) -> str | None:
    try:
        library, handler = _built(compiler)
    except (OSError, subprocess.SubprocessError) as e:
        said = getattr(e, "stderr", None) or e
        _log.warning("decoding takes XLA's attention, which is slower: `%s` built no kernel: %s", compiler, said)
        return None
    # Programs that JAX keeps call the kernel by name: another kernel needs another.
    name = f"rlhf_decode_attention_{library}"
    if name not in _REGISTERED:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
        _REGISTERED.add(name)
    return name


def _built(compiler: str) -> tuple[str, Any]:
    """(what the build depends on, as a hash; its function). Raises OSError or SubprocessError."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    parts = (SOURCE.read_text(), *OPTIONS, version, jaxlib.__version__, _processor())
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as own:
        folder = Path(cache) / "kernels" if cache and "://" not in cache else Path(own)
        library = folder / f"{name}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            # Under its name it is whole, whoever else builds it at the same time.
            with tempfile.TemporaryDirectory(dir=folder) as place:
                made = Path(place) / library.name
                command = [compiler, *OPTIONS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(made), "-lm"]
                subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
                os.replace(made, library)
        return name, ctypes.CDLL(str(library)).decode_attention


def _processor() -> str:
    """What `-march=native` depends on: machines that share a folder may differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
