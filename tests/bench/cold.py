"""A cold start: from a new process to the first tokens of W1's 16 prompts, with nothing compiled before.

Measures import, reading a model folder (from the page cache), the kernel's build, compilation and prefill. Programs
compile while weights are read. The measured process is `python -m tests.bench.cold FOLDER STARTED`.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(work: str, model: str, repeats: int) -> None:
    from tests.bench.measure import emit

    environment = {n: v for n, v in os.environ.items() if n != "JAX_COMPILATION_CACHE_DIR"}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        # In a separate process: on a GPU, a process that has used JAX keeps most of the memory.
        write = multiprocessing.get_context("spawn").Process(target=write_model, args=(model, folder))
        write.start()
        write.join()
        for _ in range(repeats):
            started = time.time()
            command = [sys.executable, "-m", "tests.bench.cold", folder, str(started)]
            found.append(
                json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
            )
    seconds = [f["seconds"] for f in found]
    emit(
        work,
        model,
        median_s=round(statistics.median(seconds), 2),
        min_s=round(min(seconds), 2),
        max_s=round(max(seconds), 2),
        cpu_s=round(statistics.median(f["cpu_s"] for f in found), 2),
        **{n: round(statistics.median(f["parts"][n] for f in found), 2) for n in found[0]["parts"]},
    )


def write_model(model: str, folder: str) -> None:
    """A model folder of random weights."""
    from rlhf.tuning.models.huggingface import random_params, save_decoder
    from tests.bench.training import config_of

    config = config_of(model)
    save_decoder(Path(folder), config, random_params(config, 0), {})


def first_tokens(folder: Path, started: float) -> None:
    """The measured process. Prints one JSON line: `seconds` since its start, `parts` of them, and its `cpu_s`."""
    from rlhf.tuning.device import choose
    from rlhf.tuning.models.huggingface import read_config
    from rlhf.tuning.rollout.engine.engine import Engine
    from rlhf.tuning.rollout.engine.folder import load_folder
    from rlhf.tuning.rollout.engine.limits import Limits
    from rlhf.tuning.rollout.requests import Request
    from tests.bench import inputs

    marks = [started, time.time()]
    config = read_config(folder)
    requests = [Request(p, 64, counter=i) for i, p in enumerate(inputs.prompts(16, 16, 64, config.vocab_size))]
    engine = Engine(config, choose().compute.dtype, Limits(slots=16, context=128))
    engine.prepare(requests)
    marks.append(time.time())
    load_folder(engine, folder)
    marks.append(time.time())
    for request in requests:
        engine.submit(request)
    while not any(update.tokens for update in engine.step()):
        pass
    marks.append(time.time())
    names = ("import_s", "trace_s", "read_s", "rest_s")
    parts = {name: after - before for name, (before, after) in zip(names, itertools.pairwise(marks), strict=True)}
    print(json.dumps({"seconds": marks[-1] - started, "cpu_s": time.process_time(), "parts": parts}), flush=True)


if __name__ == "__main__":
    first_tokens(Path(sys.argv[1]), float(sys.argv[2]))
