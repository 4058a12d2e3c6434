"""The memory of the native engine: weights as decoding reads them, keys and values in slots or pages, and its program
of decoding, which computes logits of all slots; a chunk of prefill computes none.

Each replica has its own engine, on one device or on those of the axis `tensor`. Pools, layouts and options are
those of an engine that loads no weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlhf.tuning.axes import Axes
from rlhf.tuning.fit.machines import Machine
from rlhf.tuning.fit.needs import Needs
from rlhf.tuning.fit.sharded_sizes import on_all, size
from rlhf.tuning.mesh import laid_out, under
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.rollout.engine import programs
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.paged import programs as paged
from rlhf.tuning.rollout.engine.paged.engine import PagedEngine
from rlhf.tuning.rollout.engine.paged.pool import PagedPool
from rlhf.tuning.rollout.engine.placement import cache_shardings, sampling_axes
from rlhf.tuning.rollout.engine.pool import cache_room
from rlhf.tuning.rollout.engine.replicas import engine_at
from rlhf.tuning.rollout.engine.rows import blank_rows
from rlhf.tuning.settings import ComputeSettings

SERVERS = "servers of vLLM may span hosts (rl.rollout.engine.kind: vllm)"
"""The way out for a model that no host holds."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Completions that a stage samples."""

    model: DecoderConfig
    samples: int
    limits: Limits
    """Of the engine of a replica; its context is set."""
    compute: ComputeSettings
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the engine: `cache`, `kv_cache_dtype`, `quantization`."""
    others: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of other arrays in a device's memory, by name."""

    def needs(self, on: Machine) -> Needs:
        """The needs of the stage. Raises RefusedRequest if the cache has room for no sequence, ValueError if the mesh
        does not have the machine's number of devices, or an engine is on several hosts."""
        with on.compiling():
            axes = sampling_axes(self.compute.mesh, on.count)
            tensor, replicas = int(axes.tensor), int(axes.data)
            if on.per_host % tensor:
                raise ValueError(
                    f"compute.mesh.tensor {tensor}: an engine is on the devices of one host, and a host of {on.name} "
                    f"has {on.per_host}; {SERVERS}"
                )
            mesh: Any = on.mesh(Axes(1, 1, tensor), tensor)
            dtype = on.choices(self.compute.dtype).compute.dtype

            def engine(model: DecoderConfig, limits: Limits) -> Engine:
                return engine_at(mesh if tensor > 1 else None, model, dtype, limits, **self.options)

            limits = dataclasses.replace(self.limits, context=min(self.limits.context, self.model.max_positions))
            made = engine(self.model, limits)
            parts = {"sampling weights": size(laid_out(made.weights.shapes[1], mesh)), **self.others}
            if limits.cache_share and on.kind.platform != "cpu":
                free = max(0, on.limit - sum(parts.values()))
                # At least one sequence, so that the answer names the bytes that are missing.
                least = made._pool.slot_bytes(limits.context + limits.page_tokens)
                room = max(least, cache_room(self.model, free, limits, tensor))
                limits = dataclasses.replace(limits, cache_bytes=room)
                made = engine(self.model, limits)
            sequences, rows, length = _shape(made, -(-self.samples // replicas), limits.context)
            stacks = _cache(made, rows, length, mesh)
            return Needs(
                parts | {"cache": size(stacks)},
                {"slots": sequences * replicas, "context": limits.context},
                lambda layers: [_decoding(engine(_of_layers(self.model, layers), limits), rows, length, mesh)],
                # One stack is read by a loop.
                layers=len(stacks) if len(stacks) > 1 else 0,
            )


def _shape(engine: Engine, samples: int, context: int) -> tuple[int, int, int]:
    """Sequences of the full length at once, rows of the widest batch, and tokens of a slot or pages of a sequence."""
    pool = engine._pool
    most = pool.most(context)
    if isinstance(engine, PagedEngine) and isinstance(pool, PagedPool):
        # Sequences are seated while their prompts have room: more than fit at their full length.
        return min(most, samples), engine._rows_of(min(pool.most_seats, samples)), pool.table_width
    slots = min(most, pool.rows_for(samples))
    return slots, slots, pool.capacity_for(context)


def _cache(engine: Engine, rows: int, length: int, mesh: Any) -> Any:
    """Shapes of keys and values."""
    pool = engine._pool
    made = jax.eval_shape(pool.made if isinstance(pool, PagedPool) else lambda: pool.empty(rows, length))
    if mesh is None:
        return made
    where = cache_shardings(made, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), made, where)


def _decoding(engine: Engine, rows: int, length: int, mesh: Any) -> Any:
    """A run of decoding."""
    graph, weights = engine.weights.shapes
    weights, cache = laid_out(weights, mesh), _cache(engine, rows, length, mesh)
    batch, one = on_all((blank_rows(rows), np.int32(1)), mesh)
    options = engine.decode_options
    if not isinstance(engine, PagedEngine):
        with engine.tracing:
            return programs.decode.trace(graph, weights, cache, batch, one, one, **options)
    table = on_all(np.zeros((rows, length), np.int32), mesh)
    # The kernel asks the mesh for its chip.
    with under(mesh):
        return paged.decode.trace(graph, weights, cache, table, batch, one, **options)


def _of_layers(model: DecoderConfig, layers: int) -> DecoderConfig:
    """The model with its first layers alone; all of them for 0."""
    layers = layers or model.num_layers
    flags = {n: getattr(model, n)[:layers] for n in ("rope_layers", "sliding_layers")}
    return dataclasses.replace(model, num_layers=layers, **flags)
