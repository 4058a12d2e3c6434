"""Choices by device: dtype, rematerialisation, sizes. The same recipe runs on CPU, GPU and TPU."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
from typing import Any

import jax

from rlhf.tuning import multihost
from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.precision import real, resolved

HOST_MEMORY = "pinned_host"
"""JAX's name of the host memory that a device's programs read and write."""

CACHE_SHARE = 0.25
"""Share of a device's memory for the keys and values that sampling caches."""

GPU_SHARE = 0.9
"""Share of a GPU's memory for JAX where its allocator has no limit; CUDA and its libraries need the rest."""


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a model is computed."""

    dtype: str = "float32"
    """Type of activations."""
    remat: str = "products"
    """Results of a layer that the backward pass keeps: a name of `rlhf.tuning.models.remat`."""


@dataclasses.dataclass(frozen=True)
class Device:
    """The device in use and the choices made for it."""

    platform: str
    kind: str
    count: int
    memory_bytes: int
    compute: Compute
    row_tokens_per_step: int
    """Tokens of one micro-batch in training, for each device that has rows of it."""
    row_tokens_undivided: int
    """The same where it is all of a step: then only one sum of gradients is held."""
    rollout_rows: int
    """Completions decoded side by side."""
    cache_bytes: int
    """Memory for their keys and values."""
    chunk_tokens: tuple[int, ...]
    """Sizes of prefill chunks: large ones reach the device's rate, small ones pad less."""

    def micro_batch(self, asked: int, shards: int = 1, adapter: bool = False) -> tuple[int, int]:
        """Row tokens of a micro-batch over `shards`: if a step has several, and if it has one.

        asked: `compute.tokens_per_micro_batch`, which is both where it is not 0. adapter: whether gradients are small.
        """
        if asked:
            return asked, asked
        undivided = self.row_tokens_per_step if adapter else self.row_tokens_undivided
        return self.row_tokens_per_step * shards, undivided * shards


def memory_bytes() -> int:
    """Return the memory of one device, the least that any process of the group has. On CPU it is that of the host, or
    of its control group if that is less, over the devices there."""
    return _memory_here() if multihost.process_count() == 1 else _least_memory()


@functools.cache
def _least_memory() -> int:
    # Asked once: what is kept in memory, and how much is sampled at a time, must be the same on all processes.
    return min(multihost.gather(_memory_here()))


def _memory_here() -> int:
    device = jax.local_devices()[0]
    if limit := (device.memory_stats() or {}).get("bytes_limit"):
        return int(limit)
    if device.platform == "gpu":
        return int(GPU_SHARE * _of_gpu("cuDeviceTotalMem_v2", device, ctypes.c_size_t()).value)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A container's limit (cgroup v2), or the word `max`.
    with contextlib.suppress(OSError), open("/sys/fs/cgroup/memory.max") as f:
        limit = f.read().strip()
        total = min(total, int(limit)) if limit.isdigit() else total
    # A CPU that stands for several devices has one memory for them all.
    return total // jax.local_device_count()


def return_memory() -> None:
    """Give the memory of GPUs that no array uses any more to other processes.

    Of JAX's allocators only `platform` and, without preallocation, `cuda_async` return memory; the latter at some later
    synchronisation. Here its pool is emptied: XLA's `GpuCudaMallocAsyncAllocator` uses the device's default pool.
    """
    for device in jax.local_devices():
        if device.platform != "gpu":
            return
        # Memory is freed in the order of the stream that computes.
        (jax.device_put(0, device) + 1).block_until_ready()
        pool = _of_gpu("cuDeviceGetDefaultMemPool", device, ctypes.c_void_p())
        _cuda("cuMemPoolTrimTo", pool, ctypes.c_size_t(0))


def _of_gpu(name: str, device: jax.Device, value: Any) -> Any:
    """Return what a function of CUDA's driver writes to `value` for a GPU."""
    number = ctypes.c_int()
    _cuda("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device.local_hardware_id))
    _cuda(name, ctypes.byref(value), number)
    return value


def _cuda(name: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver, which JAX has initialised. Raises RuntimeError with the code of an error."""
    if code := getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments):
        raise RuntimeError(f"{name} of CUDA's driver failed with error {code}")


def peak_memory_bytes() -> int:
    """The device's peak where the device reports it, else the highest resident size of this process so far."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    try:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) * 1024
    except OSError:
        import resource

        # Without /proc this is a Mac, where the unit is a byte.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_kinds() -> tuple[str, ...]:
    """JAX's names of the memories that programs can use."""
    if target_platform() != jax.default_backend():
        # Compiled ahead of time, for a TPU or a GPU: both have these.
        return ("device", HOST_MEMORY)
    return tuple(memory.kind for memory in jax.local_devices()[0].addressable_memories())


def check_host_memory(setting: str, kinds: tuple[str, ...]) -> None:
    """Raises ValueError, naming the setting that asks for it, where the host's memory is not among `kinds`."""
    if HOST_MEMORY not in kinds:
        raise ValueError(f"{setting} needs memory of the kind {HOST_MEMORY}; this device has {', '.join(kinds)}")


def choose(dtype: str = "auto", remat: str = "auto") -> Device:
    """The choices for this process's devices. `dtype` overrides `auto` (float32 on CPU, bfloat16 elsewhere), as does
    `remat` (`products` on CPU, `full` elsewhere).

    Raises ValueError for float64 where JAX is not set up for it, and for `offload` where no host memory is in reach.
    """
    device = jax.local_devices()[0]
    dtype = resolved(dtype)
    if dtype == "float64" and real() != dtype:
        raise ValueError(
            "compute dtype float64 needs JAX set up for it: call `rlhf.tuning.precision.use` before arrays are made"
        )
    return choices(device.platform, device.device_kind, jax.device_count(), memory_bytes(), dtype, remat)


def choices(platform: str, kind: str, count: int, memory: int, dtype: str, remat: str = "auto") -> Device:
    """The choices for devices of a kind, which need not be here; `memory` is bytes of one, `dtype` no `auto`."""
    on_cpu = platform == "cpu"
    if remat == "auto":
        # On CPU memory is plentiful and products are slow: recomputing them costs more than it saves.
        remat = "products" if on_cpu else "full"
    if remat == "offload":
        check_host_memory("compute.remat offload", memory_kinds())
    return Device(
        platform=platform,
        kind=kind,
        count=count,
        memory_bytes=memory,
        compute=Compute(dtype="float32" if dtype == "fast" else dtype, remat=remat),
        row_tokens_per_step=1024 if on_cpu else 16384,
        # SmolLM2-135M: 4.4 GB either way, and a step of 2048 tokens is a tenth shorter than in two parts.
        row_tokens_undivided=2048 if on_cpu else 16384,
        rollout_rows=64 if on_cpu else 1024,
        cache_bytes=int(CACHE_SHARE * memory),
        chunk_tokens=(64, 192, 320) if on_cpu else (128, 1024),
    )
