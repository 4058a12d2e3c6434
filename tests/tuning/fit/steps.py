"""Steps of SFT and GRPO for a tiny model and one of 0.1 B, as they are asked, and as the product runs them."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import numpy as np

from rlhf.tuning.algorithms.algorithm import find
from rlhf.tuning.algorithms.objective import policy_loss
from rlhf.tuning.algorithms.settings import Objective
from rlhf.tuning.algorithms.supervised import sft_loss
from rlhf.tuning.axes import Axes
from rlhf.tuning.device import choose
from rlhf.tuning.fit.machines import Machine, machine
from rlhf.tuning.fit.training import Packed
from rlhf.tuning.mesh import over_devices, row_shards, state_shapes, under
from rlhf.tuning.models.config import DecoderConfig, tiny
from rlhf.tuning.models.decoder import abstract_decoder, decoder_graph
from rlhf.tuning.models.sharding import ROWS
from rlhf.tuning.settings import ComputeSettings
from rlhf.tuning.training.batch import Group, choose_rows, micro_batches
from rlhf.tuning.training.optimizers import optimizer_of
from rlhf.tuning.training.step import counted, step_programs
from tests.aot.cases import PROMPT, Case
from tests.aot.shapes import adapter_of, public
from tests.tuning.models.mixtures import mixture

MODELS = {
    "tiny": tiny(259),
    "mixture": mixture(259),
    "0.1b": DecoderConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12, num_kv_heads=4,
        head_dim=64, rope_theta=1e4, norm_eps=1e-5, tie_embeddings=True, max_positions=4096,
    ),
}  # fmt: skip
SIZES = {"sft": (128, 128, 1), "grpo": (64, 64, 4)}
"""Tokens of a prompt and of a completion, and completions of a prompt."""
OBJECTIVE = Objective(kl_coef=0.01)


def asked(model: str, kind: str, shards: int) -> Packed:
    """One micro-batch of 1,024 row tokens on each of the shards, as a CPU has it."""
    prompt, completion, each = SIZES[kind]
    count = 1024 * shards // (prompt + each * completion)
    config = MODELS[model]
    graph = decoder_graph(config)
    grpo = partial(policy_loss, graph, find(OBJECTIVE), OBJECTIVE)
    return Packed(
        config,
        [Group([1] * prompt, [[2] * completion] * each, range(i * each, (i + 1) * each)) for i in range(count)],
        ComputeSettings(),
        grpo if kind == "grpo" else partial(sft_loss, graph),
        columns=("mu_CT", "old_CT", "ref_CT", "advantages_CT") if kind == "grpo" else (),
    )


def elsewhere(case: Case) -> tuple[Packed, Machine]:
    """The step of a program that is compiled ahead of time, and its machine."""
    generation, _, sides = case.topology.partition(":")
    on = machine(f"{generation}x{math.prod(map(int, sides.split('x')))}" if sides else generation)
    shards, each = on.count // case.tensor // case.context, 4 if case.program == "grpo" else 1
    rows, length = case.rows * shards, PROMPT + case.completion
    groups = [Group([1] * PROMPT, [[2] * case.completion] * each, range(i, i + each)) for i in range(0, rows, each)]
    mesh = Axes(case.data, -1, case.tensor, case.context)
    step = asked("tiny", case.program, 1)
    model = public(case.model)
    grpo = partial(policy_loss, decoder_graph(model), find(OBJECTIVE), OBJECTIVE)
    loss = grpo if case.program == "grpo" else partial(sft_loss, decoder_graph(model))
    lora = adapter_of(case)
    compute = ComputeSettings(tokens_per_micro_batch=rows * length, mesh=mesh)
    return dataclasses.replace(step, model=model, make_loss=loss, groups=groups, compute=compute, lora=lora), on


def measured(step: Packed) -> tuple[int, int]:
    """Bytes of what the compiled step is given, and of all that it holds, on a device of this process."""
    compute, mesh = choose(remat=step.compute.remat).compute, over_devices(Axes())
    optimizer = optimizer_of(step.optimizer)
    shapes = abstract_decoder(step.model)[1]
    shards = row_shards(mesh)
    layout = choose_rows([step.groups], 1024 * shards)
    width = len(step.groups[0].completions[0])
    (packed,) = micro_batches(step.groups, layout=layout, completion_tokens=width, shards=shards)
    batch = counted(step.groups, [packed])[0] | {name: packed.mask_CT for name in step.columns}
    if mesh is not None:
        whole, cut = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*x)) for x in ((), (ROWS,)))
        batch = {
            name: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=cut if np.ndim(x) else whole)
            for name, x in batch.items()
        }
    assert step.make_loss is not None
    program: Any = step_programs(step.make_loss(compute), optimizer, shapes, mesh)["single"]
    with under(mesh):
        given = (*state_shapes(optimizer, shapes, mesh), batch)
        compiled = program.lower(*given, None).compile()
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes + _unread(compiled, given)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(arguments), int(arguments + memory.temp_size_in_bytes + results)


def _unread(compiled: Any, given: Any) -> int:
    """Bytes on a device of what a step is given and its program does not have, as nothing reads it."""
    # JAX says in no public place which arguments it left out.
    kept = compiled._executable._kept_var_idx
    count = 0
    for x in (x for i, x in enumerate(jax.tree.leaves(given)) if i not in kept):
        cut = x.sharding.shard_shape(x.shape) if getattr(x, "sharding", None) else np.shape(x)
        count += math.prod(cut) * np.dtype(x.dtype).itemsize
    return count
