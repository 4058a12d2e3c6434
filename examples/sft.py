"""Supervised fine-tuning in one file: examples as packed groups, one compiled step, a loss that falls.

Objective: the mean of -log p over completion tokens. The task: after a letter of a ring of twelve,
say the two that follow it, then EOS.

Simplifications: the model is random and tiny, examples are token ids in memory, each step takes a new random batch,
and there are no checkpoints. A real run reads a model by `rlhf.tuning.models.huggingface.load_decoder(folder)` and its
examples by `rlhf.tuning.data.reading`.

    python examples/sft.py

takes about fifteen seconds on two CPU cores, and the loss goes from 2.69 to 0.01.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from rlhf.tuning.algorithms.supervised import sft_loss, sft_summary
from rlhf.tuning.device import choose
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.batch import Group, choose_rows, micro_batches
from rlhf.tuning.training.optimizers import optimizer_of
from rlhf.tuning.training.step import counted, make_step

EOS, LETTERS = 1, range(2, 14)
STEPS, EXAMPLES = 40, 32

MODEL = tiny(len(LETTERS) + 2)
OPTIMIZER = OptimizerSettings(learning_rate=0.01, schedule="linear", warmup_steps=5)


def after(letter: int, distance: int) -> int:
    """The letter so far behind another one in the ring."""
    return LETTERS[(LETTERS.index(letter) + distance) % len(LETTERS)]


def batches(steps: int, seed: int) -> Iterator[list[Group]]:
    """The examples of each step: a group is a prompt with one completion."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        prompts = rng.choice(LETTERS, (EXAMPLES, 1)).tolist()
        yield [Group([x], [[after(x, 1), after(x, 2), EOS]], [i]) for i, (x,) in enumerate(prompts)]


def main(steps: int = STEPS, seed: int = 0) -> list[float]:
    """Trains for some steps; the loss of each."""
    device = choose()
    optimizer = optimizer_of(OPTIMIZER, steps)
    params = random_params(MODEL, seed)
    opt_state = jax.jit(optimizer.init)(params)
    step = make_step(sft_loss(decoder_graph(MODEL), device.compute), optimizer, OPTIMIZER.max_skipped)

    losses = []
    for number, groups in enumerate(batches(steps, seed)):
        budget, undivided = device.micro_batch(0)
        layout = choose_rows([groups], budget, undivided=undivided)
        packed = micro_batches(groups, layout=layout, completion_tokens=8)
        params, opt_state, sums = step(params, opt_state, counted(groups, packed))
        losses.append(sft_summary(sums)["loss"])
        if number % 10 == 0 or number == steps - 1:
            print(f"step {number:2}  loss {losses[-1]:.3f}  gradient norm {sums['grad_norm']:.2f}")
    return losses


if __name__ == "__main__":
    main()
