"""The programs: a training step of SFT and of GRPO, prefill and decoding, from shapes alone.

Models have their own widths, and in training their own depth; the engine, which compiles layer by layer, has fewer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tuning.algorithms.algorithm import find
from tuning.algorithms.objective import policy_loss
from tuning.algorithms.settings import Objective
from tuning.algorithms.supervised import sft_loss
from tuning.axes import Axes
from tuning.device import Compute
from tuning.mesh import make_mesh, row_shards, state_shardings, under
from tuning.models.config import DecoderConfig
from tuning.models.decoder import abstract_decoder, decoder_graph
from tuning.models.sharding import ROWS, shardings
from tuning.rollout.engine import cache, programs
from tuning.rollout.engine.ahead import abstract_weights
from tuning.rollout.engine.cpu.kernels import Kernels
from tuning.rollout.engine.placement import cache_shardings
from tuning.rollout.engine.slots import Slot, pack, row_arrays
from tuning.target import compiling_for
from tuning.training.batch import Group, choose_rows, micro_batches
from tuning.training.optimizers import make_optimizer, make_schedule
from tuning.training.step import step_programs

MODELS = {
    "qwen3-0.6b": DecoderConfig(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8,
        head_dim=128, rope_theta=1e6, norm_eps=1e-6, tie_embeddings=True, max_positions=40960, family="qwen3",
        qk_norm=True,
    ),
    "llama-3-8b": DecoderConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, rope_theta=5e5, norm_eps=1e-5, tie_embeddings=False, max_positions=8192,
    ),
}  # fmt: skip
COMPUTE = Compute("bfloat16", remat="full")
PROMPT, COMPLETION = 256, 1792
"""Tokens of an example; with its prompt it fills a row."""
ROWS_A_DEVICE = 4
"""Rows of a micro-batch on each device."""
SLOTS, CAPACITY, CHUNK, STEPS = 64, 2048, 1024, 64
"""Of the engine: slots a device, tokens of a slot, of a prefill chunk, of a run of decoding."""
DECODING_LAYERS = 4
"""Of the engine's model, whose layers are compiled one by one: bytes and FLOPs are those of so many."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One program for one model on one topology."""

    program: str
    model: str
    topology: str

    @property
    def name(self) -> str:
        return f"{self.program} {self.model} {self.topology}"


def lowered(case: Case, mesh: Mesh | AbstractMesh | None = None) -> tuple[Any, float]:
    """The lowered program, and the FLOPs of its products that a device has to do where loops go round once: what
    XLA's cost analysis counts of a program that wastes nothing. Kernels are in neither.

    mesh: in place of that of the case's topology, which only libtpu knows.
    """
    trains = case.program in ("sft", "grpo")
    if mesh is None:
        devices = list(get_topology_desc(platform="tpu", topology_name=case.topology).devices)
        mesh = make_mesh(Axes(1, -1, 1) if trains else Axes(-1, 1, 1), devices)
    with compiling_for("tpu"):
        return (_training if trains else _sampling)(case, mesh)


def _placed(tree: Any, where: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where)


def _everywhere(tree: Any, mesh: Any) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=sharding), tree)


def _training(case: Case, mesh: Any) -> tuple[Any, float]:
    config = MODELS[case.model]
    graph, shapes = abstract_decoder(config)
    optimizer = make_optimizer(
        make_schedule("constant", 1e-5, 0, 10), b1=0.9, b2=0.95, weight_decay=0.1, clip_norm=1.0, max_skipped=2
    )
    of_params, of_state = state_shardings(optimizer, shapes, mesh)
    params, state = _placed(shapes, of_params), _placed(jax.eval_shape(optimizer.init, shapes), of_state)
    batch = _batch(case, mesh)
    if case.program == "grpo":
        objective = Objective(kl_coef=0.01)
        loss = policy_loss(graph, find(objective), objective, COMPUTE)
    else:
        loss = sft_loss(graph, COMPUTE)
    step = step_programs(loss, optimizer, shapes, mesh)["single"]
    with under(mesh):
        program = step.trace(params, state, batch, None).lower(lowering_platforms=("tpu",))
    tokens = ROWS_A_DEVICE * (PROMPT + COMPLETION)
    positions = batch["where_M"].size / mesh.size
    # Of a layer: forward, forward again, and two products backward. Of a slice of the head: the same.
    kernels = config.hidden_size * (
        config.head_dim * 2 * (config.num_heads + config.num_kv_heads) + 3 * config.intermediate_size
    )
    return program, 8.0 * (kernels * tokens + config.hidden_size * _slice(config, positions) * positions)


def _slice(config: DecoderConfig, positions: float) -> int:
    """Tokens of a slice of the vocabulary, as `tuning.losses.head.token_logps` chooses it."""
    slices = -(-config.vocab_size // max(128, int(2**25 // positions)))
    return -(-config.vocab_size // (slices * 128)) * 128


def _batch(case: Case, mesh: Any) -> dict[str, Any]:
    """A micro-batch as the trainer packs it: one completion a prompt for SFT, four for GRPO."""
    count, shards = ROWS_A_DEVICE * row_shards(mesh), row_shards(mesh)
    each = 4 if case.program == "grpo" else 1
    groups = [Group([1] * PROMPT, [[2] * COMPLETION] * each, list(range(i, i + each))) for i in range(0, count, each)]
    layout = choose_rows([groups], count * (PROMPT + COMPLETION))
    (packed,) = micro_batches(groups, layout=layout, completion_tokens=COMPLETION, shards=shards)
    arrays = packed.arrays()
    if case.program == "grpo":
        arrays |= {f"{name}_CT": packed.mask_CT for name in ("mu", "old", "ref", "advantages")}
    cut = NamedSharding(mesh, PartitionSpec(ROWS))
    counts = {name: np.float32(1) for name in ("n_tokens", "n_completions", "n_groups")}
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut) for k, x in arrays.items()} | _everywhere(
        counts, mesh
    )


def _sampling(case: Case, mesh: Any) -> tuple[Any, float]:
    config = dataclasses.replace(MODELS[case.model], num_layers=DECODING_LAYERS)
    graph, shapes = abstract_weights(
        decoder_graph(config), config, join=True, rolled=False, quantization="none", dtype="bfloat16"
    )
    weights = _placed(shapes, shardings(shapes, mesh))
    slots = SLOTS * mesh.size
    stacks = jax.eval_shape(lambda: cache.make(config, slots, CAPACITY, "bfloat16", rolled=False))
    held = _placed(stacks, cache_shardings(stacks, mesh))
    options = {"kv": "bfloat16", "dtype": "bfloat16", "kernels": Kernels()}
    kernels = config.hidden_size * (
        config.head_dim * 2 * (config.num_heads + config.num_kv_heads) + 3 * config.intermediate_size
    )
    if case.program == "prefill":
        chunk, _, prefixed = pack([Slot() for _ in range(slots)], CHUNK)
        traced = programs.prefill.trace(graph, weights, held, _everywhere(chunk, mesh), prefixed=prefixed, **options)
        # A chunk is one row, which every replica computes. No kernel: each pair of tokens is multiplied.
        ideal = 2.0 * config.num_layers * CHUNK * (kernels + 2 * config.num_heads * config.head_dim * CHUNK)
        return traced.lower(lowering_platforms=("tpu",)), ideal
    seen = jax.ShapeDtypeStruct((slots, config.vocab_size), bool, sharding=NamedSharding(mesh, PartitionSpec()))
    rows = _everywhere(row_arrays([Slot() for _ in range(slots)], CAPACITY, STEPS), mesh)
    wake, most = _everywhere((np.int32(slots), np.int32(STEPS)), mesh)
    state = programs.State(held, seen)
    traced = programs.decode.trace(graph, weights, state, rows, wake, most, steps=STEPS, top=0, **options)
    head = config.hidden_size * config.vocab_size
    read = 2 * config.num_heads * config.head_dim * (CAPACITY + STEPS)
    return traced.lower(lowering_platforms=("tpu",)), 2.0 * (config.num_layers * (kernels + read) + head) * SLOTS
