"""Generation: W1 (16 prompts, 64 tokens each), W1b (64, lengths that vary), shared prompts, decoding alone, the host.

`host64`, `host256` and `host1024` are the time of the host for a decoding step of the paged engine with so many rows:
CPU seconds of its thread for Python, the transfer of arguments and the dispatch. In place of the engine's programs run
programs with the same arguments and results, which compute nothing: they give the same pages back, and tokens that
follow from the rows. The model has 32 layers, and so as many arrays as one of 8 billion parameters; a sequence has a
table of 128 pages. `mixed_s` is that of a mixed step, which makes one token of each row.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from rlhf.tuning.device import choose
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.paged import engine as paged
from rlhf.tuning.rollout.engine.paged.attention import page_bytes
from rlhf.tuning.rollout.engine.rows import Decoded, Rows
from rlhf.tuning.rollout.requests import Request
from rlhf.tuning.shapes import bucket
from tests.bench import inputs
from tests.bench.measure import emit, memory_bandwidth, peak_memory_mb, timed
from tests.bench.training import config_of


def requests_of(work: str, vocabulary: int) -> list[Request]:
    """The requests of each measurement. Lengths are forced: no end token stops a completion."""
    if work == "W1":
        return [Request(p, 64, counter=i) for i, p in enumerate(inputs.prompts(16, 16, 64, vocabulary))]
    if work == "W1b":
        prompts = inputs.prompts(64, 16, 64, vocabulary, seed=3)
        lengths = inputs.stop_lengths(64, 64, 256).tolist()
        return [Request(p, n, counter=i) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
    if work == "shared":
        prompts = inputs.prompts(8, 256, 256, vocabulary)
        return [Request(p, 32, counter=i, samples=8) for i, p in enumerate(prompts)]
    rows = int(work.removeprefix("decode"))
    return [Request(p, 64, counter=i) for i, p in enumerate(inputs.prompts(rows, 2, 2, vocabulary))]


def run(work: str, model: str, repeats: int, dtype: str = "auto") -> None:
    """dtype: of activations; `fast` with products as `precision.use` has set them."""
    if work.startswith("host"):
        host(int(work.removeprefix("host")), max(repeats, 3))
        return
    config = config_of(model)
    requests = requests_of(work, config.vocab_size)
    kind = choose(dtype).compute.dtype
    slots = 32 if work == "W1b" else min(64, sum(r.samples for r in requests))
    # As in the rollout stage, which knows all prompts of its round.
    context = bucket(max(len(r.prompt) + r.max_tokens for r in requests), 64)
    engine = Engine(config, kind, Limits(slots=slots, context=context))
    engine.load(random_params(config, 0))

    def once() -> Any:
        return sum(len(c.tokens) for _, found in engine.run(requests) for c in found)

    found = timed(once, repeats)
    tokens = once()
    seconds = found["median_s"]
    extra: dict[str, Any] = {}
    if work.startswith("decode"):
        steps = tokens / len(requests)
        extra["share_of_bandwidth"] = round(engine.weights.nbytes * steps / seconds / memory_bandwidth(), 3)
    emit(
        work, model, **found, dtype=dtype, tokens=tokens, tokens_per_s=round(tokens / seconds, 1),
        peak_memory_mb=round(peak_memory_mb()),
        cache_mb=round(engine.cache_bytes / 2**20), programs=engine.programs, **extra,
    )  # fmt: skip


HOST_MODEL = dataclasses.replace(tiny(97), num_layers=32, num_kv_heads=1, head_dim=8, max_positions=8192)
PAGES = 6
"""Of a sequence of the measurement of the host."""


def host(rows: int, repeats: int) -> None:
    """Emit the host's median seconds for a decoding step and for a mixed step."""
    limits = Limits(slots=rows, context=8192, chunks=(1024,))
    room = (1 + rows * PAGES) * page_bytes(HOST_MODEL, limits.page_tokens, "float32", None)
    engine = paged.PagedEngine(HOST_MODEL, limits=dataclasses.replace(limits, cache_bytes=room))
    engine.load(random_params(HOST_MODEL, 0))
    programs = paged.mixed, paged.decode
    paged.mixed, paged.decode = (jax.jit(f, static_argnames=_STATIC, donate_argnums=2) for f in (_mixed, _decode))
    try:
        prompts = inputs.prompts(rows, 16, 16, HOST_MODEL.vocab_size)
        for i, prompt in enumerate(prompts[1:]):
            engine.submit(Request(prompt, 1000, stop_ids=(1, 2), seed=5, counter=i))
        while any(seat.pending > 1 for seat in engine._seats.seats) or not engine.steps:
            engine.step()
        decoding, mixing = [_seconds(engine) for _ in range(3 + repeats)][3:], []
        for i in range(1 + repeats):
            number = engine.submit(Request(prompts[0], 1000, seed=6, counter=i))
            mixing.append(_seconds(engine))
            engine.cancel(number)
            engine.step()
    finally:
        paged.mixed, paged.decode = programs
    step = statistics.median(decoding) / limits.steps
    mixed = statistics.median(mixing[1:])
    emit(f"host{rows}", "tiny", median_s=round(step, 6), mixed_s=round(mixed, 6), run_s=[round(s, 5) for s in decoding])


def _seconds(engine: Engine) -> float:
    start = time.thread_time()
    engine.step()
    return time.thread_time() - start


_STATIC = ("graph", "steps", "top", "dtype", "kernel", "mesh")


def _mixed(graph: Any, weights: Any, pages: Any, fed: Any, rows: Rows[jax.Array], **_: Any) -> Any:
    return pages, _decoded(rows, 1)


def _decode(
    graph: Any, weights: Any, pages: Any, table_RW: Any, rows: Rows[jax.Array], *_: Any, steps: int, **__: Any
) -> Any:
    return pages, _decoded(rows, steps)


def _decoded(rows: Rows[jax.Array], steps: int) -> Decoded[jax.Array]:
    tokens_RT = (rows.token_R[:, None] + jnp.arange(steps, dtype=jnp.int32)) % 7 + 50
    nothing = jnp.zeros((*tokens_RT.shape, 0))
    made_R = jnp.where(rows.live_R, jnp.minimum(steps, rows.left_R), 0)
    logps_RT = -0.1 * tokens_RT.astype(jnp.float32)
    return Decoded(
        tokens_RT, logps_RT, nothing.astype(jnp.int32), nothing, made_R, rows.live_R & (made_R < rows.left_R)
    )
