"""The programs that read packed rows, from shapes alone: steps of training, and scores of a reward model.

Models have their own widths and, in training, their own depth: a loop over layers compiles one of them.
"""

import contextlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from rlhf.tuning.algorithms.algorithm import find
from rlhf.tuning.algorithms.objective import policy_loss
from rlhf.tuning.algorithms.preference import preference_loss
from rlhf.tuning.algorithms.settings import Objective, Preference
from rlhf.tuning.algorithms.supervised import reward_loss, sft_loss
from rlhf.tuning.axes import Axes
from rlhf.tuning.compile_target import compiling_for
from rlhf.tuning.device import Compute
from rlhf.tuning.fit import machines
from rlhf.tuning.fit.sharded_sizes import frozen, trees
from rlhf.tuning.mesh import make_mesh, row_shards, state_shardings, under
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import decoder_graph, scalar_graph
from rlhf.tuning.models.lora import over, tuned_graph
from rlhf.tuning.models.sharding import CONTEXT, ROWS, shardings
from rlhf.tuning.models.sharding import parts as parts_of
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.batch import Group, choose_rows, micro_batches
from rlhf.tuning.training.forward import scores
from rlhf.tuning.training.optimizers import optimizer_of
from rlhf.tuning.training.step import LossFn, counted, step_programs
from tests.aot.cases import PROMPT, TRAINING, Case
from tests.aot.sampling import sampling
from tests.aot.shapes import adapter_of, kernels, model_of, on_all, placed

COMPUTE = Compute("bfloat16", remat="full")
CHIP = "TPU v5 lite"
"""Of a mesh without devices."""
COMPLETIONS = {"sft": 1, "grpo": 4, "dpo": 2, "reward": 2, "score": 4}
"""Completions of a prompt."""
COLUMNS = {"grpo": ("mu_CT", "old_CT", "ref_CT", "advantages_CT"), "dpo": ("reference_C",), "reward": ("margin_C",)}
"""What the loss reads beside tokens."""


def lowered(case: Case, mesh: Mesh | AbstractMesh | None = None) -> tuple[Any, float]:
    """The lowered program, and the FLOPs of its products that a device has to do where loops go round once: what
    XLA's cost analysis counts of a program that wastes nothing. Kernels are in neither; 0 where there is no product.

    mesh: in place of that of the case's topology, which only the compiler's library knows.
    """
    trains = case.program in TRAINING
    if mesh is None:
        devices = _devices(case)
        if trains:
            mesh = make_mesh(Axes(case.data, -1, case.tensor, case.context), devices)
        elif case.program == "move":
            mesh = make_mesh(Axes(-1, 1, case.tensor), devices)
        else:
            # Each replica has an engine of its own.
            mesh = make_mesh(Axes(1, 1, case.tensor), devices[: case.tensor])
    elif case.paged and isinstance(mesh, AbstractMesh):
        mesh = mesh.update(abstract_device=AbstractDevice(CHIP, 1, "tpu"))
    with compiling_for(case.platform), _on_its_chip(case, mesh):
        traced, ideal = (_packed if trains else sampling)(case, mesh)
        return traced.lower(lowering_platforms=("cuda" if case.platform == "gpu" else "tpu",)), ideal


def _on_its_chip(case: Case, mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager[Any]:
    """Within it the kernel of pages, which asks what chip it is for, is told that of the case."""
    if not case.paged or case.platform != "tpu":
        return contextlib.nullcontext()
    return use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh)


def _devices(case: Case) -> list[Any]:
    if case.platform == "tpu":
        return list(get_topology_desc(platform="tpu", topology_name=case.topology).devices)
    described, count = case.topology.split("x")
    config = (Path(machines.__file__).with_name(f"{described}.txtpb")).read_text()
    return list(get_topology_desc(platform="cuda", target_config=config, topology=f"1x1x{count}").devices)


def _packed(case: Case, mesh: Any) -> tuple[Any, float]:
    config = model_of(case)
    batch = _batch(case, mesh)
    rows = batch["tokens_BL"]
    shards, parts = row_shards(mesh) * parts_of(mesh, CONTEXT), mesh.shape["tensor"]
    tokens = rows.size / shards
    layer = kernels(config) / parts * tokens
    if case.program == "score":
        score = jax.jit(lambda params, batch: scores(scalar_graph(config), params, batch, COMPUTE))
        # As frozen weights are loaded.
        shapes = frozen(config, "scalar", COMPUTE.dtype)
        with under(mesh):
            return score.trace(placed(shapes, shardings(shapes, mesh)), batch), 2.0 * layer

    role: Any = "scalar" if case.program == "reward" else "decoder"
    lora = adapter_of(case)
    loss = _loss(case, config)
    trained, base = trees(config, role, lora, COMPUTE.dtype)
    below = None
    if lora is not None:
        loss, below = over(tuned_graph(config, role, lora), loss), (placed(base, shardings(base, mesh)), None)
    optimizer = optimizer_of(OptimizerSettings(learning_rate=1e-5, weight_decay=0.1, max_skipped=2))
    of_params, of_state = state_shardings(optimizer, trained, mesh)
    params, state = placed(trained, of_params), placed(jax.eval_shape(optimizer.init, trained), of_state)
    step = step_programs(loss, optimizer, trained, mesh)["single"]
    with under(mesh):
        traced = step.trace(params, state, batch, below)
    # Of a layer: forward, forward again, and two products backward, of which a frozen kernel needs one. Of a slice of
    # the head: the same.
    positions = batch["where_M"].size / shards
    head = config.hidden_size * _slice(config, positions) / parts * positions if role == "decoder" else 0.0
    return traced, (6.0 if lora else 8.0) * (layer + head)


def _loss(case: Case, config: DecoderConfig) -> LossFn:
    graph = decoder_graph(config)
    match case.program:
        case "grpo":
            objective = Objective(kl_coef=0.01)
            return policy_loss(graph, find(objective), objective, COMPUTE)
        case "dpo":
            return preference_loss(graph, Preference.of("dpo"), COMPUTE)
        case "reward":
            return reward_loss(scalar_graph(config), 0.01, COMPUTE)
        case _:
            return sft_loss(graph, COMPUTE)


def _slice(config: DecoderConfig, positions: float) -> int:
    """Tokens of a slice of the vocabulary, as `rlhf.tuning.losses.head.token_logps` chooses it."""
    slices = -(-config.vocab_size // max(128, int(2**25 // positions)))
    return -(-config.vocab_size // (slices * 128)) * 128


def _batch(case: Case, mesh: Any) -> dict[str, Any]:
    """A micro-batch as the trainer packs it, with `rows` rows on each device that has rows of its own."""
    shards, each = row_shards(mesh), COMPLETIONS[case.program]
    count, length = case.rows * shards, PROMPT + case.completion
    pairs = case.program in ("dpo", "reward")
    if pairs:
        # One row has both, each with the prompt.
        count, length = 2 * count, 2 * length
    groups = [
        Group([1] * PROMPT, [[2] * case.completion] * each, list(range(i, i + each))) for i in range(0, count, each)
    ]
    layout = choose_rows([groups], case.rows * shards * length, whole=pairs)
    (packed,) = micro_batches(groups, layout=layout, completion_tokens=case.completion, shards=shards)
    of_tokens, of_completions = packed.mask_CT, packed.mask_CT[:, 0]
    arrays = packed.arrays() if case.program == "score" else counted(groups, [packed])[0]
    arrays |= {n: of_tokens if n.endswith("_CT") else of_completions for n in COLUMNS.get(case.program, ())}
    cut = NamedSharding(mesh, PartitionSpec(ROWS))
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut) if np.ndim(x) else on_all(x, mesh)
        for name, x in arrays.items()
    }
