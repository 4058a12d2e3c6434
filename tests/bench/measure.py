"""Timing, memory and the machine's peak rates, measured inside the benchmarked process."""

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf.tuning import precision
from rlhf.tuning.device import choose, peak_memory_bytes
from rlhf.tuning.models.matmul import matmul
from rlhf.tuning.training.speed import measured_peak, rate


def peak_memory_mb() -> float:
    """The device's peak where JAX reports it, else the peak resident size of this process."""
    return peak_memory_bytes() / 2**20


class Compiled:
    """How many programs XLA has compiled, or read from its cache, since this object exists."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, *_: Any, **named: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


def timed(function: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Seconds of the first call (compilation included), then medians of the rest, wall and CPU, and the load."""

    def once() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(function())
        return time.perf_counter() - wall, time.process_time() - cpu

    first = once()[0]
    rest = [once() for _ in range(repeats)]
    return {
        "first_s": round(first, 3),
        "median_s": round(statistics.median(w for w, _ in rest), 4),
        "min_s": round(min(w for w, _ in rest), 4),
        "max_s": round(max(w for w, _ in rest), 4),
        "cpu_s": round(statistics.median(c for _, c in rest), 4),
        "load": round(os.getloadavg()[0], 2),
    }


def gemm_flops(hidden: int, inner: int, dtype: str = "float32") -> float:
    """FLOP/s of a matrix product of the model's size, [2048, hidden] x [hidden, inner], in a compute dtype; on an
    accelerator of a large square one, since a small one is over before the next is launched."""
    if jax.default_backend() != "cpu":
        return measured_peak(choose(dtype).compute.dtype)
    with precision.using(dtype):
        kind = choose(dtype).compute.dtype
        a, b = jnp.ones((2048, hidden), kind), jnp.ones((hidden, inner), kind)
        return statistics.median(rate(matmul, a, b, work=2.0 * a.size * inner))


def memory_bandwidth() -> float:
    """Bytes/s of reading 512 MiB once, as decoding one token at a time reads the weights; 8 GiB on an accelerator."""
    a = jnp.ones(2**27 if jax.default_backend() == "cpu" else 2**31, jnp.float32)
    return statistics.median(rate(lambda x: jnp.sum(x), a, work=float(a.nbytes)))


def emit(work: str, model: str, **values: Any) -> None:
    """One JSON line."""
    device = jax.devices()[0]
    head = {"work": work, "model": model, "device": f"{device.platform} {device.device_kind}", "jax": jax.__version__}
    print(json.dumps(head | values), flush=True)
