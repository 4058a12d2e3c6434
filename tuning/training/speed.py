"""The speed of training: tokens a second, and the model's FLOPs as a share of this device's peak (MFU).

The count is of the mathematics alone, as in Chowdhery et al. (arXiv:2204.02311, appendix B): real tokens, not padding;
the causal half of attention, and of windowed layers the window; no recomputation.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlhf.tuning.device import peak_memory_bytes
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.matmul import matmul
from rlhf.tuning.precision import of_gradients, rounds_products
from rlhf.tuning.training.batch import Group

FULL = 3
"""Forward passes that a step costs: the backward pass computes gradients of activations and of weights."""
ADAPTER = 2
"""The same where the large matrices are frozen and get no gradient."""


def forward_flops(config: DecoderConfig, groups: Sequence[Group], *, head: bool = True) -> float:
    """FLOPs of a forward pass over groups; with `head` the LM head sees the tokens that count."""
    c = config
    # Weights of a layer that a token meets: q and o, k and v, and three matrices of the MLP, or of each of its experts
    # with the router. Each costs 2 FLOPs a token, the factor below.
    forward = 3 * (c.intermediate_size * max(1, c.experts_per_token) + c.shared_size) + c.num_experts
    kernels = c.hidden_size * (c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + forward)
    tokens = sum(g.size for g in groups)
    windows = [c.sliding_window if c.slides(layer) else None for layer in range(c.num_layers)]
    pairs = {w: sum(map(functools.partial(_pairs, window=w), groups)) for w in set(windows)}
    # A pair of positions is a product for its logit, and one for its value.
    attention = 2 * c.num_heads * c.head_dim * sum(pairs[w] for w in windows)
    trained = sum(g.trained for g in groups) if head else 0
    return 2.0 * (c.num_layers * kernels * tokens + attention + c.hidden_size * c.vocab_size * trained)


def _pairs(group: Group, window: int | None) -> int:
    """Pairs of a position and one that it sees; the prompt's own are counted once."""

    def until(length: int) -> int:
        full = min(length, window or length)
        return full * (full + 1) // 2 + (length - full) * full

    prompt = until(len(group.prompt))
    return prompt + sum(until(len(group.prompt) + len(c)) - prompt for c in group.completions)


def rate(function: Callable[..., Any], *args: Any, work: float, repeats: int = 7) -> list[float]:
    """`work` a second of each of some calls of a jitted function, slowest first."""
    program = jax.jit(function)
    # The first call compiles, and is not timed.
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - start)
    return sorted(work / t for t in times)


def measured_peak(dtype: str) -> float:
    """FLOP/s of all devices of this process at a large square product of activations of a type, as models make it: the
    best of some, measured once."""
    with of_gradients():
        # Where gradients are rounded alone, the faster of both.
        return _peak(dtype, rounds_products())


@functools.lru_cache
def _peak(dtype: str, rounded: bool) -> float:
    on_cpu = jax.devices()[0].platform == "cpu"
    size = 1024 if on_cpu else 8192
    # Of random numbers: a chip that turns less of its wires over keeps a higher clock.
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
    # Virtual CPU devices share one processor: the product already runs on all of its cores.
    return rate(matmul, x, x, work=2.0 * size**3)[-1] * (1 if on_cpu else jax.device_count())


class Meter:
    """The clock of a training loop."""

    def __init__(self, dtype: str):
        self._peak = measured_peak(dtype)
        self._last = time.monotonic()
        self._steps: list[dict[str, float]] = []

    def step(self, tokens: float, flops: float) -> dict[str, float]:
        """Seconds and rates of the step that ends now, which processed `tokens` with `flops`."""
        now = time.monotonic()
        seconds, self._last = max(now - self._last, 1e-9), now
        # The peak was measured in a moment, in which other work may have had a part of the device.
        self._peak = max(self._peak, flops / seconds)
        rates = {"tokens_per_second": round(tokens / seconds, 1), "mfu": round(flops / seconds / self._peak, 4)}
        self._steps.append(rates)
        return {"seconds": seconds} | rates

    def skip(self) -> None:
        """Leave the time since the last step, such as that of a measurement, out of the next one."""
        self._last = time.monotonic()

    def rates(self) -> dict[str, float]:
        """Medians of the steps so far, so that steps that compile do not count."""
        return {n: statistics.median_high(s[n] for s in self._steps) for n in (self._steps or [{}])[0]}

    def whole(self) -> dict[str, float]:
        """`rates`, and the peak memory of this process in MB."""
        return self.rates() | {"peak_memory_mb": round(peak_memory_bytes() / 2**20)}
