"""The memory and the work of the native engine: weights as decoding reads them, keys and values, and its programs.

Each replica has an engine of its own, on one device or on those of the axis `tensor`.

Slots, their length and the layout of weights are the engine's own (`tuning.rollout.engine`), from shapes alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tuning.axes import Axes
from tuning.fit.figures import Figures
from tuning.fit.liveness import Held, held
from tuning.fit.machines import Machine
from tuning.fit.places import Beside, abstract_mesh, bytes_of, local, of_others, weight_bytes
from tuning.fit.training import spread
from tuning.models.config import DecoderConfig
from tuning.models.decoder import decoder_graph
from tuning.rollout.engine import cache, programs
from tuning.rollout.engine.ahead import abstract_weights
from tuning.rollout.engine.cpu import products
from tuning.rollout.engine.cpu.kernels import Kernels, has_compiler
from tuning.rollout.engine.limits import Limits
from tuning.rollout.engine.placement import cache_shardings, sampling_axes
from tuning.rollout.engine.pool import GRAIN, Pool, cache_room
from tuning.rollout.engine.slots import Slot, pack, row_arrays
from tuning.settings import ComputeSettings
from tuning.target import compiling_for


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What a stage samples."""

    model: DecoderConfig
    samples: int
    """Completions of the stage."""
    prompt: int
    """Tokens of a prompt."""
    completion: int
    """Tokens of a completion."""
    limits: Limits
    """Of the engine of a replica."""
    compute: ComputeSettings
    kv: str = "auto"
    """`kv_cache_dtype` of the engine."""
    quantization: Any = "none"
    beside: tuple[Beside, ...] = ()
    """What else is in the devices' memory meanwhile."""


def sampling(asked: Sampled, machine: Machine) -> Figures:
    """The figures of a stage that samples; a step is one token in every slot.

    Raises RefusedRequest where no slot fits the cache, ValueError where the mesh is not of the machine's devices.
    """
    with compiling_for(machine.kind.platform):
        return _sampling(asked, machine)


def _sampling(asked: Sampled, machine: Machine) -> Figures:
    dtype = machine.choices(asked.compute.dtype).compute.dtype
    dtype = "float32" if dtype == "float64" else dtype
    kv: Any = dtype if asked.kv == "auto" else asked.kv
    axes = sampling_axes(asked.compute.mesh, machine.count)
    tensor, replicas = int(axes.tensor), int(axes.data)
    mesh: Any = abstract_mesh(Axes(1, 1, tensor), tensor)
    one = tensor == 1
    rolled = one and machine.kind.platform == "cpu" and products.suits(dtype) and has_compiler()
    layout = {"join": one, "rolled": rolled, "quantization": asked.quantization, "dtype": dtype}

    def weights(model: DecoderConfig) -> tuple[Any, Any]:
        return abstract_weights(decoder_graph(model), model, **layout)

    context = min(asked.prompt + asked.completion, asked.model.max_positions)
    parts = {"sampling weights": weight_bytes(weights(asked.model)[1], mesh)}
    others = of_others(asked.beside, abstract_mesh(asked.compute.mesh, machine.count), dtype)
    limits = asked.limits
    if limits.cache_share and machine.kind.platform != "cpu":
        free = machine.limit - sum(parts.values()) - sum(others.values())
        # One slot at least, so that what is missing is told, and what would make room.
        least = cache.token_bytes(asked.model, kv) * (-(-(context + limits.steps) // GRAIN) * GRAIN)
        room = max(least, cache_room(asked.model, max(0, free), limits, tensor))
        limits = dataclasses.replace(limits, cache_bytes=room)
    pool = Pool(asked.model, limits, kv, None if one else mesh, rolled=rolled)
    own = min(pool.most(context), -(-asked.samples // replicas))
    capacity = pool.capacity_for(context)
    stacks = jax.eval_shape(lambda: cache.make(asked.model, own, capacity, kv, rolled=rolled))
    parts["cache"] = bytes_of(stacks, cache_shardings(stacks, mesh))
    parts |= others
    model = local(asked.model, tensor)
    run, chunk = _programs(model, weights(model), own, capacity, asked.limits, kv, dtype, rolled)
    either = [spread(h.peak - h.within, h.within, machine.kind.platform) for h in (run, chunk)]
    low, middle, high = (max(of_both) for of_both in zip(*either, strict=True))
    steps = asked.limits.steps
    # Of a token: two FLOPs for each weight of a product, and its attention over half of the context.
    c = model
    kernels = c.hidden_size * (c.head_dim * 2 * (c.num_heads + c.num_kv_heads) + 3 * c.intermediate_size)
    attended = 2 * c.num_heads * c.head_dim * (asked.prompt + asked.completion // 2)
    flops = 2.0 * own * (c.num_layers * (kernels + attended) + c.hidden_size * c.vocab_size)
    sums = 2 * c.num_layers * own * c.hidden_size * np.dtype(jnp.dtype(dtype)).itemsize
    return Figures(
        parts=parts,
        temporary=(low, middle, high),
        flops=flops,
        # A step reads all weights and, on average, half of the completions' keys and values.
        moved=parts["sampling weights"] + parts["cache"] * (asked.prompt + asked.completion / 2) / capacity,
        sent=2 * (tensor - 1) / tensor * sums,
        shape={
            "slots": own * replicas,
            "slots_a_replica": own,
            "replicas": replicas,
            "capacity": capacity,
            "kv_cache_dtype": kv,
            "tokens": asked.completion * -(-asked.samples // (own * replicas)),
            "run": steps,
        },
        step="token",
    )


def _programs(
    model: DecoderConfig,
    weights: tuple[Any, Any],
    slots: int,
    capacity: int,
    limits: Limits,
    kv: Any,
    dtype: str,
    rolled: bool,
) -> tuple[Held, Held]:
    """What a run of decoding and a chunk of prefill hold."""
    graph, state = weights
    stacks = jax.eval_shape(lambda: cache.make(model, slots, capacity, kv, rolled=rolled))
    seen: Any = jax.ShapeDtypeStruct((slots, model.vocab_size), bool)
    options = {"kv": kv, "dtype": dtype, "kernels": Kernels()}
    empty = [Slot() for _ in range(slots)]
    rows = row_arrays(empty, capacity, limits.steps)
    most = np.int32(limits.steps)
    # The caches are donated: what a program writes into them is in their place.
    given = len(jax.tree.leaves(state)), len(jax.tree.leaves(stacks))
    free = range(given[0], sum(given) + 1)
    decode = programs.decode.trace(
        graph, state, programs.State(stacks, seen), rows, np.int32(slots), most, steps=limits.steps, top=0, **options
    )
    piece, _, prefixed = pack(empty, limits.chunks[-1])
    prefill = programs.prefill.trace(graph, state, stacks, piece, prefixed=prefixed, **options)
    return held(decode.jaxpr, free=free), held(prefill.jaxpr, free=free)
