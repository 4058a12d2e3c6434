"""C kernels, built by the machine's own compiler and registered with XLA."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jaxlib

from rlhf.tuning.atomic import whole_file

_HERE = Path(__file__).parent
MODULES = ("models/matmul", "models/fused", "rollout/engine/cpu/attention", "rollout/engine/cpu/products")
"""Each has its kernel next to it, under its own name: keys contain files of a module's name with the module."""
SOURCES = (
    _HERE / "kernels.h",
    _HERE.parent / "models/fused.h",
    _HERE.parent / "rollout/engine/cpu/products.h",
    *(_HERE.parent / f"{module}.c" for module in MODULES),
)
_NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
OPTIONS = ("-O3", _NATIVE, "-std=gnu11", "-fPIC")
KV_TYPES = {"float32": "FLOAT", "bfloat16": "BFLOAT", "int8": "INT8"}
"""Types of keys and values that the kernels support, with their names in C."""
_LOCK = threading.Lock()
_REGISTERED: set[str] = set()
_log = logging.getLogger(__name__)


SECONDS = 600.0
"""Limit of one call of the compiler."""
WAIT_SECONDS = 0.2


class Kernels(NamedTuple):
    """The name under which each kernel is registered with XLA; None if XLA does that work."""

    attention: str | None = None
    products: str | None = None
    matmul: str | None = None
    """Of factors rounded to bfloat16, if the processor multiplies those."""
    fused_forward: str | None = None
    fused_backward: str | None = None
    """Attention of packed rows, and its gradient, on processors with AVX-512."""


def build(kv: str = "float32", compiler: str | None = None) -> Kernels:
    """All kernels; none, with a warning that says why, if they cannot be built.

    A build supports one type `kv` of keys and values, of `KV_TYPES`. `compiler` is a command, by default that of the
    environment variable CC, or `cc`. A persistent compilation cache of JAX also stores libraries, by sources, type,
    compiler, processor and version of jaxlib; without one that takes files, each process builds its own.
    """
    with _LOCK:
        return _build(kv, compiler or _default())


def has_compiler() -> bool:
    """Whether the default compiler of `build` exists. It may still fail."""
    return shutil.which(_default()) is not None


def _default() -> str:
    return os.environ.get("CC") or "cc"


@functools.cache
def _build(kv: str, compiler: str) -> Kernels:
    try:
        name, library = built(kv, compiler)
    except (OSError, subprocess.SubprocessError) as e:
        # Of a compiler that was ended for its time, warnings would hide the reason.
        said = (isinstance(e, subprocess.CalledProcessError) and e.stderr) or e
        _log.warning("`%s` built no kernels, so XLA does their work, slower: %s", compiler, said)
        return Kernels()
    # Programs in the compilation cache call a kernel by name, so another build must have another name.
    names = {kernel: f"rlhf_{kernel}_{name}" for kernel in Kernels._fields if hasattr(library, kernel)}
    # The kernel of the system has to allow a matrix unit.
    if hasattr(library, "matmul_unit") and not library.matmul_unit():
        _log.warning("Linux denies the matrix unit (AMX) to this process: products of bfloat16 are slower without it")
    for kernel, target in names.items():
        if target not in _REGISTERED:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, kernel)), platform="cpu")
            _REGISTERED.add(target)
    return Kernels(**names)


def built(kv: str, compiler: str) -> tuple[str, ctypes.CDLL]:
    """(hash of everything that the build depends on, library). Raises OSError or SubprocessError."""
    version = _run([compiler, "--version"])
    texts = (source.read_text() for source in SOURCES)
    options = (*OPTIONS, f"-DKV={KV_TYPES[kv]}")
    parts = (*texts, *options, version, jaxlib.__version__, _processor())
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    # A compilation cache at a URL cannot hold a file to load.
    kept = Path(cache) / "kernels" / f"{name}.so" if cache and "://" not in cache else None
    # A file that cannot be read, or is not a library, is built again.
    if kept is not None:
        with contextlib.suppress(OSError):
            return name, ctypes.CDLL(str(kept))
    # A library stays loaded after its file is deleted.
    with tempfile.TemporaryDirectory() as own:
        built = Path(own) / f"{name}.so"
        sources = [source for source in SOURCES if source.suffix == ".c"]
        command = [compiler, *options, f"-I{jax.ffi.include_dir()}", f"-I{_HERE}"]
        objects = [str(Path(own) / f"{source.stem}.o") for source in sources]
        # In parallel: a first start waits for them.
        over = threading.Event()
        with concurrent.futures.ThreadPoolExecutor() as threads:
            try:
                list(threads.map(lambda s, o: _run([*command, "-c", str(s), "-o", o], over), sources, objects))
            except BaseException:
                # Ctrl-C reaches this thread alone.
                over.set()
                raise
        _run([*command, "-shared", *objects, "-o", str(built), "-lm"])
        if kept is not None:
            # A disk may be full. The loader crashes on a library that a lost machine has cut short.
            with contextlib.suppress(OSError), whole_file(kept) as partial:
                shutil.copy(built, partial)
        return name, ctypes.CDLL(str(built))


def _run(command: list[str], over: threading.Event | None = None) -> str:
    """Run a compiler and return its output; its own processes end with it, and when `over` is set.

    Raises OSError or SubprocessError.
    """
    pipe, deadline = subprocess.PIPE, time.monotonic() + SECONDS
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace", process_group=0) as process:
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=WAIT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline or (over is not None and over.is_set()):
                        raise subprocess.TimeoutExpired(command, SECONDS) from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return out


def _processor() -> str:
    """Identifies the processor that `_NATIVE` compiles for: different machines may share a folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
