"""Two optimizer steps on every mesh and without one: the gaps of losses and parameters; run by `test_mesh`.

Usage: axes_program.py LOSS
"""

import dataclasses
import json
import sys

import jax
import numpy as np

from rlhf.tuning.algorithms.algorithm import find
from rlhf.tuning.algorithms.distillation import distillation_loss
from rlhf.tuning.algorithms.objective import policy_loss
from rlhf.tuning.algorithms.preference import preference_loss
from rlhf.tuning.algorithms.settings import Objective, Preference
from rlhf.tuning.algorithms.supervised import sft_loss
from rlhf.tuning.axes import Axes
from rlhf.tuning.device import Compute
from rlhf.tuning.mesh import init_state, make_mesh, own_params, put_params, row_shards
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.precision import use
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.batch import Group, Layout, micro_batches
from rlhf.tuning.training.optimizers import optimizer_of
from rlhf.tuning.training.step import counted, make_step
from tests.tuning.tiny import ragged_groups

DTYPE = "float64"
MESHES = {
    "data": Axes(4, 1, 1), "fsdp": Axes(1, 4, 1), "tensor": Axes(1, 1, 4), "context": Axes(1, 1, 1, 4),
    "data fsdp tensor": Axes(2, 2, 2), "data fsdp context": Axes(2, 2, 1, 2), "fsdp tensor context": Axes(1, 2, 2, 2),
}  # fmt: skip
"""Four key-value heads or fewer: along `tensor` of 4 they are copied."""
# Both heads of Gemma: caps on logits, tied embeddings that are scaled, and windows in some of the layers.
GEMMA = dataclasses.replace(
    tiny(100),
    final_softcap=3.0,
    attention_softcap=5.0,
    embed_scale=8.0,
    sliding_window=16,
    sliding_layers=(True, False),
)
LLAMA = dataclasses.replace(tiny(100), tie_embeddings=False)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, and the rows that it reads."""

    model: object
    loss: object
    layout: Layout
    columns: tuple[str, ...] = ()
    frozen: object = None
    pairs: bool = False

    def batches(self, shards):
        groups = ragged_groups(7, count=24)
        if self.pairs:
            groups = [
                Group(g.prompt, [g.completions[0], g.completions[-1]], [2 * i, 2 * i + 1]) for i, g in enumerate(groups)
            ]
        packed = micro_batches(groups, layout=self.layout, completion_tokens=8, shards=shards)
        rng, count = np.random.default_rng(5), sum(len(g.completions) for g in groups)
        values = {n: -4.6 + 0.3 * rng.normal(size=(count, 8)).astype(DTYPE) for n in self.columns}
        arrays = []
        for batch, p in zip(counted(groups, packed), packed, strict=True):
            batch |= {f"{n}_CT": p.gather(x) for n, x in values.items() if n != "reference"}
            batch |= {f"{n}_C": p.gather(x[:, 0]) for n, x in values.items() if n == "reference"}
            arrays.append(batch)
        return arrays


def cases():
    compute = Compute(DTYPE, remat="full")
    gemma, llama = decoder_graph(GEMMA), decoder_graph(LLAMA)
    objective = Objective(kl_coef=0.1, entropy_coef=0.01)
    sequences = Objective(
        algorithm="gspo", aggregation="constant", constant=8.0, correction="mask", kl_coef=0.1, kl_kind="k3-k2"
    )
    columns = ("mu", "old", "ref", "advantages")
    return {
        # Rows in blocks, a prompt for several completions; one micro-batch.
        "sft": Case(GEMMA, sft_loss(gemma, compute), Layout(320, 64)),
        # Short rows, several micro-batches.
        "grpo": Case(LLAMA, policy_loss(llama, find(objective), objective, compute), Layout(64, 8), columns),
        "gspo": Case(LLAMA, policy_loss(llama, find(sequences), sequences, compute), Layout(64, 8), columns),
        "dpo": Case(
            LLAMA, preference_loss(llama, Preference(), compute), Layout(128, 64, "side by side"), ("reference",),
            pairs=True,
        ),
        "distill": Case(
            GEMMA, distillation_loss((gemma, llama), 0.3, 1.3, compute), Layout(64, 64), frozen=random_params(LLAMA, 9)
        ),
    }  # fmt: skip


def steps(case, mesh):
    """Losses and gradient norms of two steps, and the parameters after them."""
    optimizer = optimizer_of(OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, max_skipped=2))
    params = own_params(random_params(case.model, 3), mesh)
    state, step = init_state(optimizer, params, mesh), make_step(case.loss, optimizer, 2, mesh)
    frozen, found = put_params(case.frozen, mesh), []
    for _ in range(2):
        params, state, sums = step(params, state, case.batches(row_shards(mesh)), frozen)
        found += [sums["loss"], sums["grad_norm"]]
    return np.array(found), jax.tree.map(np.asarray, params)


def main(name):
    use(DTYPE)
    gaps, case = {}, cases()[name]
    wanted, params = steps(case, None)
    for label, axes in MESHES.items():
        count = axes.data * axes.fsdp * axes.tensor * axes.context
        found, moved = steps(case, make_mesh(axes, jax.devices()[:count]))
        furthest = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, moved)
        gaps[label] = [float(np.abs(wanted - found).max()), max(jax.tree.leaves(furthest))]
    print(json.dumps(gaps))


main(*sys.argv[1:])
