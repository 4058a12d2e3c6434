"""The first six minutes of a lent GPU: correctness, decoding and attention, next to the figures expected of an H100.

`python -m tests.bench.gpu_first [E2 ...]`: each experiment in a process of its own with a limit of seconds, a line for
each figure. With `--tiny` and JAX_PLATFORMS=cpu all of it runs on small shapes, which shows that it can run and nothing
more. `gpu_second` has E6 to E9.
"""

import argparse
import functools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.stages.worker.client import worker_environment
from rlhf.tuning.cpu.kernels import Kernels
from rlhf.tuning.models.blocked import Segments, plain_attention, visible
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import AttentionSpec, decoder_graph
from rlhf.tuning.models.triton import triton_attention
from rlhf.tuning.rollout.engine import cache, programs
from rlhf.tuning.rollout.engine.engine import abstract_weights
from rlhf.tuning.rollout.engine.paged import attention
from rlhf.tuning.rollout.engine.paged import programs as paged
from rlhf.tuning.rollout.engine.rows import blank_rows
from tests.bench.measure import memory_bandwidth

STEPS, PAGE, DTYPE = 16, 64, "bfloat16"


class Experiment(NamedTuple):
    """An experiment, run once for each of `variants`: variables of its process by name."""

    run: Callable[[bool], None]
    """Called with whether shapes are tiny; prints its figures."""
    seconds: int
    """Most that a variant may take."""
    expected: str
    variants: Mapping[str, Mapping[str, str]] = {"": {}}


def main(module: str, experiments: Mapping[str, Experiment]) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("names", nargs="*", choices=[*experiments, []], default=[], help="all by default")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--here", action="store_true", help="in this process")
    args = parser.parse_args()
    if args.here:
        for name in args.names:
            experiments[name].run(args.tiny)
        return
    failed = []
    tiny = ["--tiny"] if args.tiny else []
    for name in args.names or experiments:
        found = experiments[name]
        for variant, variables in found.variants.items():
            print(f"{name} {variant or 'as stages run'}; expected: {found.expected}", flush=True)
            env, begin = worker_environment(), time.perf_counter()
            env |= {k: f"{env.get(k, '')} {v}" if k == "XLA_FLAGS" else v for k, v in variables.items()}
            command = [sys.executable, "-m", module, name, "--here", *tiny]
            process = subprocess.Popen(command, env=env, start_new_session=True)
            try:
                code = process.wait(600 if args.tiny else found.seconds)
            except subprocess.TimeoutExpired:
                # With its own processes, which would keep the device.
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            end = f"{time.perf_counter() - begin:.0f} of {found.seconds} s"
            print(f"{name} {'ended in' if code == 0 else 'FAILED after'} {end}", flush=True)
            failed += [name] * (code != 0)
    sys.exit(len(failed))


def say(**figures: Any) -> None:
    print("   ", *(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items()), flush=True)


def seconds_of(function: Callable[[], Any], repeats: int = 3) -> tuple[float, float]:
    """(seconds until the call returns, until its result is there): medians, after a first call."""
    jax.block_until_ready(function())
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = function()
        returned = time.perf_counter() - begin
        jax.block_until_ready(result)
        found.append((returned, time.perf_counter() - begin))
    returned_s, ready_s = zip(*found, strict=True)
    return statistics.median(returned_s), statistics.median(ready_s)


def model(tiny: bool, layers: int = 8) -> DecoderConfig:
    """Llama-3-8B's widths with some of its layers."""
    sizes = (512, 256, 512, 2, 4, 2, 32) if tiny else (128256, 4096, 14336, layers, 32, 8, 128)
    names = "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"
    rest: dict[str, Any] = {"rope_theta": 5e5, "norm_eps": 1e-5, "tie_embeddings": False, "max_positions": 16384}
    return DecoderConfig(**dict(zip(names, sizes, strict=True)), **rest)


def laid_out(config: DecoderConfig) -> tuple[Any, Any]:
    """(graph, shapes) of weights as the engine has them on one GPU."""
    options: dict[str, Any] = {"join": True, "rolled": False, "quantization": "none", "dtype": DTYPE}
    return abstract_weights(decoder_graph(config), config, **options)


def live(rows: int, lengths: Any) -> Any:
    """Rows that decode for a whole run, after `lengths` cached tokens."""
    return blank_rows(rows)._replace(
        live_R=np.ones(rows, bool), left_R=np.full(rows, 10**6, np.int32),
        length_R=np.broadcast_to(lengths, rows).astype(np.int32),
        origin_R3=np.arange(3 * rows, dtype=np.uint32).reshape(-1, 3),
    )  # fmt: skip


def decoding(config: DecoderConfig, rows: int, capacity: int, filled: int) -> tuple[Callable[[], Any], float]:
    """A run of decoding in slots, and the bytes of weights and slots that a step reads."""
    graph, shapes = laid_out(config)
    weights = jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), shapes)
    held = [cache.make(config, rows, capacity, DTYPE, rolled=False)]
    bytes_read = sum(x.nbytes for x in jax.tree.leaves((weights, held)))
    some = live(rows, filled)
    wake, most = np.int32(rows), np.int32(STEPS)
    options: dict[str, Any] = {"steps": STEPS, "top": 0, "kv": DTYPE, "dtype": DTYPE, "kernels": Kernels()}

    def run() -> Any:
        held[0], decoded = programs.decode(graph, weights, held[0], some, wake, most, **options)
        return decoded

    return run, float(bytes_read)


def device_tests(tiny: bool) -> None:
    """E1."""
    command = [sys.executable, "-m", "pytest", "-m", "device", "--numprocesses=0", "-s", "tests/device"]
    done = subprocess.run([*command, *(["--collect-only"] if tiny else [])])
    say(exit=done.returncode)
    sys.exit(done.returncode)


def return_time(tiny: bool) -> None:
    """E2."""
    run, _ = decoding(model(tiny), 8 if tiny else 64, 128 if tiny else 2048, 64)
    returned, ready = seconds_of(run)
    say(return_ms=returned * 1e3, ready_ms=ready * 1e3)


def slots(tiny: bool) -> None:
    """E3."""
    rate = memory_bandwidth() if not tiny else 1e10
    for rows, capacity in [(4, 64), (8, 128)] if tiny else [(8, 2048), (64, 8192), (256, 2048)]:
        for filled in (0, capacity - STEPS):
            run, size = decoding(model(tiny), rows, capacity, filled)
            step = seconds_of(run)[1] / STEPS
            say(rows=rows, capacity=capacity, filled=filled, ms=step * 1e3, gb=size / 1e9, share=size / rate / step)
            del run


def trained_attention(tiny: bool) -> None:
    """E4."""

    def inputs(rows: int, length: int, dtype: str) -> tuple[Any, ...]:
        heads, kv_heads, size = (4, 2, 32) if tiny else (32, 8, 128)
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = [(rows, length, n, size) for n in (heads, kv_heads, kv_heads)]
        # Two groups a row; a completion has its prompt to itself, as in rows of more than 1,024 tokens.
        half = jnp.arange(length) >= length // 2
        group = jnp.broadcast_to(1 + half.astype(jnp.int32), (rows, length))
        segments = Segments(group, jnp.zeros_like(group), jnp.broadcast_to(jnp.arange(length), (rows, length)))
        return *(jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True)), segments

    def gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(jax.grad(lambda q, k, v: jnp.sum(jnp.sin(attend(q, k, v).astype(jnp.float32))), (0, 1, 2)))

    q, k, v, segments = inputs(1, 128 if tiny else 1024, "bfloat16")
    scale = q.shape[-1] ** -0.5
    seen = visible(segments, None, 0, q.shape[1], q.shape[1])
    found = gradients(lambda *x: triton_attention(*x, segments, None, scale, None))(q, k, v)
    exact = gradients(lambda *x: plain_attention(*x, seen, scale, None))(*(x.astype(jnp.float32) for x in (q, k, v)))
    for name, a, b in zip("qkv", found, exact, strict=True):
        say(gradient=name, error=float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)))
    q, k, v, segments = inputs(2, 128 if tiny else 8192, "bfloat16")
    # Causal over two halves: a fourth of all pairs; the backward pass is two and a half forward passes.
    flops = 3.5 * 4 * q.size * q.shape[1] / 4
    peer = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=None if tiny else "cudnn")
    by_name = {"triton": lambda *x: triton_attention(*x, segments, None, scale, None), "cudnn, one group": peer}
    for name, attend in by_name.items():
        seconds = seconds_of(functools.partial(gradients(attend), q, k, v))[1]
        say(by=name, ms=seconds * 1e3, tflops=flops * (1 if name == "triton" else 2) / seconds / 1e12)


def pages(tiny: bool) -> None:
    """E5."""
    config, rows, most = model(tiny), 4 if tiny else 64, 4 if tiny else 128
    lengths = np.linspace(PAGE, most * PAGE // 2 - STEPS, rows).astype(np.int32)
    each = -(-(lengths + STEPS) // PAGE)
    table, ends = np.zeros((rows, most), np.int32), np.cumsum(each)
    for row, (end, count) in enumerate(zip(ends, each, strict=True)):
        table[row, :count] = np.arange(end - count, end) + 1
    held = [attention.make(config, int(ends[-1]) + 1, PAGE, DTYPE, "gpu")]
    keys = jax.random.split(jax.random.key(0))
    layer = jax.random.normal(keys[0], held[0][0]["by_head"].shape).astype(DTYPE)
    q = jax.random.normal(keys[1], (rows, config.num_heads, config.head_dim)).astype(DTYPE)
    one = np.arange(rows + 1, dtype=np.int32)
    ragged = attention.Ragged(*map(jnp.asarray, (lengths, lengths, table, one, np.array([rows], np.int32))))
    spec = AttentionSpec(config.head_dim**-0.5, None, None, jnp.asarray(lengths)[None])
    kernel = attention.attend_ragged(q, layer, ragged, spec, single=True, kernel="gpu")
    plain = attention.gathered(q, layer, ragged, spec, single=True, by_head=True)
    say(largest_difference=float(jnp.abs(kernel.astype(jnp.float32) - plain.astype(jnp.float32)).max()))
    graph, shapes = laid_out(config)
    weights = jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), shapes)
    some, wake = live(rows, lengths), np.int32(rows)

    def run() -> Any:
        options: dict[str, Any] = {"steps": STEPS, "top": 0, "dtype": DTYPE, "kernel": "gpu", "mesh": None}
        held[0], decoded = paged.decode(graph, weights, held[0], table, some, wake, **options)
        return decoded

    say(rows=rows, mean_tokens=float(lengths.mean()), ms=seconds_of(run)[1] / STEPS * 1e3)


TFRT = {"threads": {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1"}}
EXPERIMENTS = {
    "E1": Experiment(device_tests, 120, "passes; on the JAX of infra/requirements-gpu.txt it has not run"),
    "E2": Experiment(return_time, 30, "returns when it is ready, 60 ms; with threads below 3 ms", {"": {}} | TFRT),
    "E3": Experiment(slots, 80, "empty as full; 64 x 8192: 6.5 ms a step, 0.9 of the bandwidth"),
    "E4": Experiment(trained_attention, 50, "errors below 0.02; cuDNN 8 to 10 ms, Triton less: it has half the pairs"),
    "E5": Experiment(pages, 50, "difference below 0.02; 2.7 ms a step, against 6.5 in slots of 8192"),
}

if __name__ == "__main__":
    main("tests.bench.gpu_first", EXPERIMENTS)
