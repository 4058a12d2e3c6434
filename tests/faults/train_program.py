"""Runs the SFT stage on artifacts of a store, a checkpoint after each step, and says where it is; used by
`test_checkpoint_kill`.

Usage: train_program.py STORE BASE_KEY DATA_KEY FOLDER
"""

import sys
from pathlib import Path

from rlhf.stages import sft
from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.common.settings import Optimizer
from rlhf.stages.contract.definition import Context
from rlhf.stages.store.artifacts import Store


def main() -> None:
    configure_jax()
    url, base, data, folder = sys.argv[1:]
    store = Store(url)
    artifacts = {"base": store.get("base", base), "data": store.get("prepare", data)}
    work, out = Path(folder, "work"), Path(folder, "out")
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(exist_ok=True)

    def progress(done: int, total: int, unit: str, **metrics: float) -> None:
        print(f"step {done}", flush=True)

    ctx = Context(
        config=sft.Config(epochs=2, examples_per_step=16, checkpoint_every=1, optimizer=Optimizer(learning_rate=1e-3)),
        inputs=artifacts | {"tokenizer": artifacts["base"]},
        out=out,
        work=work,
        seed=5,
        progress=progress,
        log=lambda line: print(line, flush=True),
        memory={},
        saved=lambda: print("saved", flush=True),
    )
    sft.run(ctx)
    print("done", flush=True)


if __name__ == "__main__":
    main()
