"""The programs of the engine, from shapes alone: prefill, decoding, and the move of weights from training to it."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf.tuning.cpu.kernels import Kernels
from rlhf.tuning.fit.sharded_sizes import shapes_of
from rlhf.tuning.mesh import under
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.sharding import shardings
from rlhf.tuning.rollout.engine import cache, programs
from rlhf.tuning.rollout.engine.decoders import lay_out
from rlhf.tuning.rollout.engine.engine import abstract_weights
from rlhf.tuning.rollout.engine.paged import attention
from rlhf.tuning.rollout.engine.paged import programs as paged
from rlhf.tuning.rollout.engine.placement import cache_shardings
from rlhf.tuning.rollout.engine.rows import blank_rows
from rlhf.tuning.rollout.engine.slots import Slot, pack, row_arrays
from tests.aot.cases import Case
from tests.aot.shapes import kernels, model_of, on_all, placed

SLOTS, CAPACITY, CHUNK, STEPS = 64, 2048, 1024, 64
"""Slots a device, tokens of a slot, of a prefill chunk, of a run of decoding."""
PAGE = 64
"""Tokens of a page."""


def sampling(case: Case, mesh: Any) -> tuple[Any, float]:
    """The traced program, and the FLOPs of a device, as `programs.lowered` has them."""
    config = model_of(case, case.layers)
    graph, replicas, parts = decoder_graph(config), mesh.shape["data"], mesh.shape["tensor"]
    # As the engine has it over a mesh.
    quantization = "int8" if case.int8 else "none"
    layout: dict[str, Any] = {"join": parts == 1, "rolled": False, "quantization": quantization, "dtype": "bfloat16"}
    laid_out, shapes = abstract_weights(graph, config, **layout)
    weights = placed(shapes, shardings(shapes, mesh))
    if case.program == "move":
        dense, trained = shapes_of(config, "decoder"), _training(mesh)
        params = placed(dense, shardings(dense, trained))
        # `Engine.load` does it layer by layer; as one program its collectives can be read.
        move = jax.jit(lambda p: lay_out(graph, p, **layout)[1], out_shardings=shardings(shapes, mesh))
        return move.trace(params), 0.0
    if case.paged:
        return _paged(case, mesh, config, laid_out, weights)
    slots = SLOTS * replicas
    stacks = jax.eval_shape(lambda: cache.make(config, slots, CAPACITY, "bfloat16", rolled=False))
    heads = cache_shardings(stacks, mesh)
    held = placed(stacks, jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(None, "data", *s.spec[2:])), heads))
    options: Any = {"kv": "bfloat16", "dtype": "bfloat16", "kernels": Kernels()}
    if case.program == "prefill":
        chunk, _, prefixed = pack([Slot() for _ in range(slots)], CHUNK)
        with under(mesh if config.num_experts else None):
            traced = programs.prefill.trace(laid_out, weights, held, on_all(chunk, mesh), prefixed=prefixed, **options)
        # A chunk is one row, which every replica computes. No kernel: each pair of tokens is multiplied.
        pairs = 2 * config.num_heads * config.head_dim * CHUNK
        return traced, 2.0 * config.num_layers * CHUNK * (kernels(config) + pairs) / parts
    rows = on_all(row_arrays([Slot() for _ in range(slots)], CAPACITY, STEPS), mesh)
    wake, most = on_all((np.int32(slots), np.int32(STEPS)), mesh)
    # As the engine does.
    with under(mesh if config.num_experts else None):
        traced = programs.decode.trace(laid_out, weights, held, rows, wake, most, steps=STEPS, top=0, **options)
    head = config.hidden_size * config.vocab_size
    read = 2 * config.num_heads * config.head_dim * (CAPACITY + STEPS)
    return traced, 2.0 * (config.num_layers * (kernels(config) + read) + head) * SLOTS / parts


def _paged(case: Case, mesh: Any, config: Any, graph: Any, weights: Any) -> tuple[Any, float]:
    """As `sampling`, with pages for as many tokens; tables are as wide as the longest sequence."""
    parts = mesh.shape["tensor"]
    kv: Any = "int8" if case.kv8 else "bfloat16"
    kernel = attention.kernel_for(case.platform, config, kv, "bfloat16", parts)
    width = (CAPACITY + STEPS) // PAGE
    stacks = jax.eval_shape(lambda: attention.make(config, 1 + SLOTS * CAPACITY // PAGE, PAGE, kv, kernel))
    held = placed(stacks, cache_shardings(stacks, mesh))
    rows, table = on_all((blank_rows(SLOTS), np.zeros((SLOTS, width), np.int32)), mesh)
    over = mesh if kernel and parts > 1 else None
    options: Any = {"top": 0, "dtype": "bfloat16", "kernel": kernel, "mesh": over}
    head = config.hidden_size * config.vocab_size * SLOTS
    # The kernel's products are in neither figure.
    gathered = 0 if kernel else 2 * config.num_heads * config.head_dim * width * PAGE
    if case.program == "decode":
        wake = on_all(np.int32(SLOTS), mesh)
        traced = paged.decode.trace(graph, weights, held, table, rows, wake, steps=STEPS, **options)
        return traced, 2.0 * (config.num_layers * (kernels(config) + gathered) * SLOTS + head) / parts
    tokens = CHUNK + SLOTS
    each, ends = np.zeros(tokens, np.int32), np.zeros(SLOTS + 1, np.int32)
    fed = on_all(
        paged.Fed(
            each, each, attention.Ragged(each, ends[1:], np.zeros((SLOTS, width), np.int32), ends, ends[:1]), ends[1:]
        ),
        mesh,
    )
    traced = paged.mixed.trace(graph, weights, held, fed, rows, **options)
    return traced, 2.0 * (config.num_layers * (kernels(config) + gathered) * tokens + head) / parts


def _training(mesh: Any) -> Any:
    """The same devices as one axis that parameters are cut over."""
    names, sizes = mesh.axis_names, {"data": 1, "fsdp": mesh.size, "tensor": 1}
    shape = tuple(sizes.get(n, 1) for n in names)
    return Mesh(mesh.devices.reshape(shape), names) if isinstance(mesh, Mesh) else type(mesh)(shape, names)
