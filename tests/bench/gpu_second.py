"""The second six minutes of a lent GPU: CUDA graphs, steps of training, compilation and the policy's way to servers.

`python -m tests.bench.gpu_second [E6 ...]`, as `gpu_first`.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.cpu.kernels import Kernels
from rlhf.tuning.device import choose
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params, save_decoder
from rlhf.tuning.rollout.engine import cache, programs
from rlhf.tuning.training.batch import Group, choose_rows, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from rlhf.tuning.training.speed import FULL, forward_flops
from tests.bench import inputs, rollouts
from tests.bench.gpu_first import DTYPE, STEPS, Experiment, laid_out, live, main, model, say, seconds_of
from tests.bench.measure import peak_memory_mb
from tests.bench.training import config_of, stepper

PEAK = 989e12
"""FLOP/s of an H100 in bfloat16, of which E7 gives the share."""


def small_steps(tiny: bool) -> None:
    """E6."""
    rollouts.run("decode8", "tiny" if tiny else "smol135", 1 if tiny else 5)


def training(tiny: bool) -> None:
    """E7."""
    config = config_of("tiny" if tiny else "llama1b")
    graph, total = decoder_graph(config), 256 if tiny else 16384
    shapes = [(128, "full")] if tiny else [(2048, "full"), (8192, "full"), (8192, "attention")]
    for length, remat in shapes:
        compute = choose("auto", remat).compute
        ids = inputs.tokens(total // length, length, config.vocab_size)
        groups = [Group(row[:1].tolist(), [row[1:].tolist()], [i]) for i, row in enumerate(ids)]
        layout = choose_rows([groups], total, undivided=total)
        count = {"n_tokens": np.float32(sum(len(c) for g in groups for c in g.completions))}
        batches = [b.arrays() | count for b in micro_batches(groups, layout=layout, completion_tokens=length - 1)]

        def loss(params: Any, batch: Any, frozen: Any, compute: Any = compute) -> Any:
            logps, _ = logps_and_entropy(graph, params, batch, 1.0, compute)
            return -jnp.sum(logps) / batch["n_tokens"], {}

        step = stepper(loss, random_params(config, 0), batches)
        begin = time.perf_counter()
        jax.block_until_ready(step())
        first = time.perf_counter() - begin
        seconds = seconds_of(step)[1]
        mfu = FULL * forward_flops(config, groups) / seconds / PEAK
        say(tokens=length, remat=remat, first_s=first, ms=seconds * 1e3, mfu=mfu, peak_gb=peak_memory_mb() / 1e3)
        del step


def compilation(tiny: bool) -> None:
    """E8."""
    for layers in (2,) if tiny else (4, 16):
        config = model(tiny, layers)
        graph, weights = laid_out(config)
        rows, capacity = (4, 128) if tiny else (64, 2048)
        held = jax.eval_shape(lambda c=config, r=rows, s=capacity: cache.make(c, r, s, DTYPE, rolled=False))
        options: dict[str, Any] = {"steps": STEPS, "top": 0, "kv": DTYPE, "dtype": DTYPE, "kernels": Kernels()}
        lowered = programs.decode.lower(graph, weights, held, live(rows, 0), np.int32(rows), np.int32(STEPS), **options)
        begin = time.perf_counter()
        lowered.compile()
        say(layers=config.num_layers, seconds=time.perf_counter() - begin)


def files(tiny: bool) -> None:
    """E9."""
    config = config_of("tiny" if tiny else "llama1b")
    params = random_params(config, 0)
    jax.block_until_ready(params)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        save_decoder(Path(folder), config, params, {}, dtype=DTYPE)
        seconds = time.perf_counter() - begin
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    say(gb=size / 1e9, seconds=seconds, gb_per_s=size / 1e9 / seconds)


GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+CONDITIONAL,+WHILE"}
NO_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
UNTUNED = NO_CACHE | {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
EXPERIMENTS = {
    "E6": Experiment(small_steps, 40, "64 tokens in 0.12 s; with graphs 0.10", {"": {}, "graphs": GRAPHS}),
    "E7": Experiment(training, 150, "2,048 tokens: mfu 0.38 to 0.42; 8,192: 0.40 to 0.48"),
    "E8": Experiment(compilation, 45, "9 s, half of it autotuning", {"tuned": NO_CACHE, "untuned": UNTUNED}),
    "E9": Experiment(files, 30, "1 GB/s or more; a server then reads the same bytes. By CUDA IPC 2 GB take 0.06 s"),
}

if __name__ == "__main__":
    main("tests.bench.gpu_second", EXPERIMENTS)
