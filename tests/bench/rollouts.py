"""Generation: W1 (16 prompts, 64 tokens each), W1b (64, lengths that vary), shared prompts, and decoding alone."""

from typing import Any

from rlhf.tuning.device import choose
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
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
