"""What `tests.bench.growth` measures, of one size in a process of its own: figures by name.

Each piece of work is called once, which compiles; seconds and memory are those of further calls. Models have one layer
of 64 units, and 512 tokens where the vocabulary is not what grows.
"""

import ctypes
import dataclasses
import gc
import os
import shutil
import statistics
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPEATS = 3
LEAST_SECONDS = 0.2
"""Of a measurement: what is shorter is called several times."""
ROW, VOCABULARY = 128, 512
"""Tokens of a row, and of a vocabulary that does not grow."""
SHARD = 512
"""Completions of a file of a round."""
Figures = dict[str, Any]


def resident(name: str) -> float:
    """`VmRSS` or its peak `VmHWM` of this process in MB (Linux)."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(name)) / 1024


def seconds(call: Callable[[], Any]) -> float:
    """Processor seconds of a call, in all threads and in processes that have ended."""
    before = sum(os.times()[:4])
    call()
    return sum(os.times()[:4]) - before


def again(call: Callable[[], Any], repeats: int = REPEATS, times: int = 0) -> tuple[float, float]:
    """Processor seconds of a call that has been made before, a median, and its peak of memory in MB above the idle
    process. times: calls of a measurement, 0 for as many as take long enough."""
    gc.collect()
    # What the first call has given back is not the idle process's.
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    once = seconds(call)
    above = resident("VmHWM") - before
    times = times or max(1, round(LEAST_SECONDS / max(once, 0.01)))
    found = [seconds(lambda: [call() for _ in range(times)]) / times for _ in range(repeats)]
    return statistics.median([*found, once] if times == 1 else found), max(0.0, above)


def measured(call: Callable[[], Any], name: str = "", repeats: int = REPEATS) -> Figures:
    """Seconds, memory and programs of a call, behind a name."""
    from tests.bench.measure import Compiled

    programs = Compiled()
    call()
    compiled = programs.count
    taken, above = again(call, repeats)
    found = {"seconds": taken, "memory_mb": round(above, 1), "programs": compiled}
    return {f"{name}_{key}" if name else key: value for key, value in found.items()}


def model_of(vocabulary: int = VOCABULARY) -> Any:
    """A model that is small beside its inputs."""
    from rlhf.tuning.models.config import tiny

    sizes = {"num_layers": 1, "hidden_size": 64, "intermediate_size": 128, "max_positions": 16384}
    return dataclasses.replace(tiny(vocabulary), **sizes, num_heads=2, num_kv_heads=2, head_dim=32)


def sft(rows: int, length: int, vocabulary: int = VOCABULARY) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """An SFT step of rows of so many tokens, packing included, and the log-probabilities of the same rows."""
    import jax
    import jax.numpy as jnp

    from rlhf.tuning.device import choose
    from rlhf.tuning.models.decoder import decoder_graph
    from rlhf.tuning.models.huggingface import random_params
    from rlhf.tuning.training.batch import Group
    from rlhf.tuning.training.forward import logps_and_entropy
    from tests.bench import inputs
    from tests.bench.training import batches_of, stepper

    model, compute = model_of(vocabulary), choose().compute
    graph, params = decoder_graph(model), random_params(model, 0)
    ids = inputs.tokens(rows, length, vocabulary)
    groups = [Group(row[:1].tolist(), [row[1:].tolist()], [i]) for i, row in enumerate(ids)]

    def loss(params: Any, batch: Any, frozen: Any) -> Any:
        logps, _ = logps_and_entropy(graph, params, batch, 1.0, compute)
        return -jnp.sum(logps) / batch["n_tokens"], {}

    program = jax.jit(lambda p, b: logps_and_entropy(graph, p, b, 1.0, compute)[0])
    forward = lambda: [jax.block_until_ready(program(params, b)) for b in batches_of(groups)]  # noqa: E731
    # The step donates what it gets.
    step = stepper(loss, jax.tree.map(jnp.copy, params), None)
    return lambda: step(batches_of(groups)), forward


def tokens(rows: int) -> Figures:
    """An SFT step of so many rows of 128 tokens."""
    return {"tokens": rows * ROW} | measured(sft(rows, ROW)[0], "step")


def packing(examples: int) -> Figures:
    """Laying out a step of so many examples of 30 to 128 tokens in rows, without a model."""
    import numpy as np

    from rlhf.tuning.training.batch import Group
    from tests.bench.training import batches_of

    lengths = np.random.default_rng(0).integers(30, ROW + 1, examples)
    groups = [Group([1], [list(range(length - 1))], [i]) for i, length in enumerate(lengths.tolist())]
    found = measured(lambda: batches_of(groups), "packing")
    return {"tokens": int(lengths.sum())} | {name: found[name] for name in ("packing_seconds", "packing_memory_mb")}


def length(tokens: int) -> Figures:
    """One sequence of so many tokens."""
    step, forward = sft(1, tokens)
    return measured(forward, "logps") | measured(step, "step")


def completions(count: int) -> Figures:
    """A round of so many completions, 16 of a prompt: scored and updated by the real stages, and its files."""
    from tests.bench import rounds

    found: Figures = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        table = rounds.make(folder, count)
        number = iter(range(100))

        def one(stage: str) -> Callable[[], Any]:
            memory: dict[str, Any] = {}
            return lambda: rounds.perform(folder, stage, memory, f"-{next(number)}")

        for stage in ("score", "update"):
            found |= measured(one(stage), stage, repeats=1)
            if stage == "score":
                # The update reads it under the name without a number.
                rounds.perform(folder, stage, {})
        return found | _stored(folder, table)


def _stored(folder: Path, table: Any) -> Figures:
    """Requests and bytes of a round's table in files, written to a store and read back."""
    from rlhf.stages.store.artifacts import Store
    from rlhf.tuning.rows import write_arrow
    from tests.stages.store.distant import Distant

    place = folder / "shards"
    for number, start in enumerate(range(0, len(table), SHARD)):
        write_arrow(place / "rollouts" / f"part-{number:05d}.parquet", table.slice(start, SHARD))
    store = Store(f"distant://{uuid.uuid4().hex}")
    Distant.begin()
    manifest = {"stage": "rollout", "key": "k", "config": {}, "inputs": {}, "seed": 0, "metrics": {}, "device": "cpu"}
    artifact = store.commit(place, manifest | {"versions": {}})
    found = {"stored_mb": Distant.bytes_written / 1e6, "stored_requests": Distant.requests}
    artifact.local("rollouts/")
    shutil.rmtree(place, ignore_errors=True)
    return found | {"requests": Distant.requests}


def requests(count: int) -> Figures:
    """So many requests of 8 tokens to the engine, 4 to 8 new tokens each."""
    from rlhf.tuning.models.huggingface import random_params
    from rlhf.tuning.rollout.engine.engine import Engine
    from rlhf.tuning.rollout.engine.limits import Limits
    from rlhf.tuning.rollout.requests import Request
    from tests.bench import inputs

    model = model_of()
    prompts = inputs.prompts(count, 8, 8, VOCABULARY)
    asked = [Request(p, 4 + i % 5, counter=i) for i, p in enumerate(prompts)]
    engine = Engine(model, "float32", Limits(slots=64, context=64))
    engine.load(random_params(model, 0))
    return measured(lambda: sum(1 for _ in engine.run(asked)), "rollout")


def vocabulary(size: int) -> Figures:
    """An SFT step of 8 rows of 128 tokens, and decoding 8 rows, with so many tokens in the vocabulary."""
    from rlhf.tuning.models.huggingface import random_params
    from rlhf.tuning.rollout.engine.engine import Engine
    from rlhf.tuning.rollout.engine.limits import Limits
    from rlhf.tuning.rollout.requests import Request
    from tests.bench import inputs

    model, rows, new = model_of(size), 8, 64
    found = measured(sft(rows, ROW, size)[0], "step")
    asked = [Request(p, new, counter=i) for i, p in enumerate(inputs.prompts(rows, 2, 2, min(size, VOCABULARY)))]
    engine = Engine(model, "float32", Limits(slots=rows, context=128))
    engine.load(random_params(model, 0))
    decoding = measured(lambda: sum(1 for _ in engine.run(asked)), "token")
    return found | decoding | {"token_seconds": decoding["token_seconds"] / (rows * new)}


WORK: dict[str, Callable[[int], Figures]] = {
    "tokens": tokens, "packing": packing, "length": length, "completions": completions, "requests": requests,
    "vocabulary": vocabulary,
}  # fmt: skip


def run(series: str, size: int) -> Figures:
    """The figures of one size."""
    from rlhf.stages.common.compilation import configure_jax

    configure_jax()
    return WORK[series](size)
