"""Runs the SFT stage on artifacts of a store, a checkpoint after each step, and says where it is; used by
`test_checkpoint_kill`.

Usage: train_program.py STORE BASE_KEY DATA_KEY FOLDER
"""

import sys
from pathlib import Path

from rlhf.stages import sft
from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.common.settings import Optimizer
from rlhf.stages.store.artifacts import Store
from tests.stages.support import context


def main() -> None:
    configure_jax()
    url, base, data, folder = sys.argv[1:]
    store = Store(url)
    artifacts = {"base": store.get("base", base), "data": store.get("prepare", data)}
    config = sft.Config(epochs=2, examples_per_step=16, checkpoint_every=1, optimizer=Optimizer(learning_rate=1e-3))
    ctx = context(
        config,
        Path(folder, "out"),
        Path(folder, "work"),
        inputs=artifacts | {"tokenizer": artifacts["base"]},
        seed=5,
        progress=lambda done, *_, **metrics: print(f"step {done}", flush=True),
        log=lambda line: print(line, flush=True),
    )
    sft.run(ctx)


if __name__ == "__main__":
    main()
