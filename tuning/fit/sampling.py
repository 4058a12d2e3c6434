"""The memory and the work of the native engine: weights as decoding reads them, keys and values, and its programs.

Each replica has an engine of its own, on one device or on those of the axis `tensor`.

Slots or pages, lengths and the layout of weights are the engine's own (`tuning.rollout.engine`), from shapes alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tuning.axes import Axes
from tuning.cpu.kernels import has_compiler
from tuning.fit.caches import Engine, in_pages, in_slots, least
from tuning.fit.figures import Figures
from tuning.fit.machines import Machine
from tuning.fit.places import Beside, abstract_mesh, local, of_others, weight_bytes
from tuning.models.config import DecoderConfig
from tuning.precision import item_bytes
from tuning.rollout.engine.cpu import products
from tuning.rollout.engine.limits import Limits
from tuning.rollout.engine.paged.engine import runs_paged
from tuning.rollout.engine.placement import sampling_axes
from tuning.rollout.engine.pool import cache_room
from tuning.settings import ComputeSettings
from tuning.target import compiling_for

SPREAD = 0.7, 1.1, 1.3
"""What the compilers for TPUs, H100 and CPUs give a program of the engine, least, expected and most, as a multiple of
what its trace holds. No layer is computed twice, so it is less than of training."""


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
    cache: str = "auto"
    """`cache` of the engine."""
    quantization: Any = "none"
    beside: tuple[Beside, ...] = ()
    """What else is in the devices' memory meanwhile."""


def sampling(asked: Sampled, machine: Machine) -> Figures:
    """The figures of a stage that samples; a step is one token in every slot.

    Raises RefusedRequest where no slot fits the cache, ValueError where the mesh is not of the machine's devices.
    """
    with compiling_for(machine.kind.platform):
        return _sampling(asked, machine)


def temporary(peak: float) -> tuple[int, int, int]:
    """Least, expected and most bytes of a program of the engine whose trace holds `peak`."""
    low, middle, high = (int(factor * peak) for factor in SPREAD)
    return low, middle, high


def _sampling(asked: Sampled, machine: Machine) -> Figures:
    dtype = machine.choices(asked.compute.dtype).compute.dtype
    dtype = "float32" if dtype == "float64" else dtype
    kv: Any = dtype if asked.kv == "auto" else asked.kv
    axes = sampling_axes(asked.compute.mesh, machine.count)
    tensor, replicas = int(axes.tensor), int(axes.data)
    mesh: Any = abstract_mesh(Axes(1, 1, tensor), tensor)
    one = tensor == 1
    with_pages = runs_paged(asked.cache, asked.model, dtype, asked.kv, tensor)
    rolled = one and not with_pages and machine.kind.platform == "cpu" and products.suits(dtype) and has_compiler()
    layout: dict[str, Any] = {"join": one, "rolled": rolled, "quantization": asked.quantization}
    layout["dtype"] = "bfloat16" if machine.resolved(asked.compute.dtype) == "fast" else dtype
    context = min(asked.limits.context or asked.prompt + asked.completion, asked.model.max_positions)
    engine = Engine(asked.model, asked.limits, kv, dtype, mesh, layout)
    parts = {"sampling weights": weight_bytes(engine.weights(asked.model)[1], mesh)}
    others = of_others(asked.beside, abstract_mesh(asked.compute.mesh, machine.count), dtype)
    if asked.limits.cache_share and machine.kind.platform != "cpu":
        free = machine.limit - sum(parts.values()) - sum(others.values())
        # One sequence at least, so that what is missing is told, and what would make room.
        room = max(least(engine, context, with_pages), cache_room(asked.model, max(0, free), asked.limits, tensor))
        engine = dataclasses.replace(engine, limits=dataclasses.replace(asked.limits, cache_bytes=room))
    cached = (in_pages if with_pages else in_slots)(engine, context, -(-asked.samples // replicas))
    own = cached.sequences
    parts["cache"] = cached.held
    parts |= others
    beside = max(h.peak for h in cached.programs)
    steps = asked.limits.steps
    # Of a token: two FLOPs for each weight of a product, and its attention over half of the context.
    c = local(asked.model, tensor)
    kernels = c.hidden_size * (c.head_dim * 2 * (c.num_heads + c.num_kv_heads) + 3 * c.intermediate_size)
    attended = 2 * c.num_heads * c.head_dim * (asked.prompt + asked.completion // 2)
    flops = 2.0 * own * (c.num_layers * (kernels + attended) + c.hidden_size * c.vocab_size)
    sums = 2 * c.num_layers * own * c.hidden_size * item_bytes(dtype)
    return Figures(
        parts=parts,
        temporary=temporary(beside),
        flops=flops,
        # A step reads all weights and, on average, half of the completions' keys and values.
        moved=parts["sampling weights"] + cached.token * own * (asked.prompt + asked.completion / 2),
        sent=2 * (tensor - 1) / tensor * sums,
        shape={
            "slots": own * replicas,
            "slots_a_replica": own,
            "replicas": replicas,
            "capacity": cached.capacity,
            "cache": "paged" if with_pages else "slots",
            "kv_cache_dtype": kv,
            "tokens": asked.completion * -(-asked.samples // (own * replicas)),
            "run": steps,
        },
        step="token",
    )
