"""The memory and the work of a reward model that scores completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from tuning.fit.figures import Figures
from tuning.fit.liveness import held
from tuning.fit.machines import Machine
from tuning.fit.places import (
    Beside,
    abstract_mesh,
    bytes_of,
    in_type,
    local,
    narrower,
    of_others,
    shapes_of,
    sizes_over,
    weight_bytes,
)
from tuning.fit.training import of_one_device, pairs_bytes, spread, traceable
from tuning.mesh import row_shards
from tuning.models.config import DecoderConfig
from tuning.models.decoder import scalar_graph
from tuning.precision import item_bytes
from tuning.settings import ComputeSettings
from tuning.shapes import bucket
from tuning.target import compiling_for
from tuning.training.batch import Group, choose_rows, micro_batches
from tuning.training.forward import scores
from tuning.training.speed import forward_flops


@dataclasses.dataclass(frozen=True)
class Scored:
    """What a reward model scores."""

    model: DecoderConfig
    groups: Sequence[Group]
    """Prompts with the completions to score."""
    compute: ComputeSettings
    beside: tuple[Beside, ...] = ()
    """What else is in the devices' memory meanwhile."""


def scoring(asked: Scored, machine: Machine) -> Figures:
    """The figures of a reward model's pass over all groups. Raises ValueError where the mesh is not of the devices."""
    platform = machine.kind.platform
    with compiling_for(platform):
        device = machine.choices(asked.compute.dtype)
        compute = device.compute
        mesh = abstract_mesh(asked.compute.mesh, machine.count)
        shards, dtype = row_shards(mesh), narrower(compute.dtype)
        # As `tuning.training.completions.per_completion` packs them: the budget is of all devices.
        budget = asked.compute.tokens_per_micro_batch or device.row_tokens_per_step
        layout = choose_rows([asked.groups[:64]], budget)
        width = bucket(max(len(c) for g in asked.groups for c in g.completions))
        packed = micro_batches(asked.groups, layout=layout, completion_tokens=width, shards=shards)
        batch = of_one_device(packed[0].arrays(), shards)
        parts = {"reward model": weight_bytes(in_type(shapes_of(asked.model, "scalar"), dtype), mesh)}
        parts |= of_others(asked.beside, mesh, compute.dtype) | {"micro-batch": bytes_of(batch)}
        own = local(asked.model, mesh.shape["tensor"])
        shapes = in_type(shapes_of(own, "scalar"), dtype)
    with compiling_for(traceable(platform), part=machine.count > 1):
        traced = jax.make_jaxpr(lambda p, b: scores(scalar_graph(own), p, b, compute))(shapes, batch)
        found = held(traced, sizes_over(shapes, mesh.shape["fsdp"]))
    temporary = found.peak - found.within
    if platform == "gpu":
        rows, length = batch["tokens_BL"].shape
        temporary += pairs_bytes(rows, length, item_bytes(compute.dtype))
    parameters = sum(x.size for x in jax.tree.leaves(shapes))
    fsdp = mesh.shape["fsdp"]
    return Figures(
        parts=parts,
        temporary=spread(temporary, found.within, platform),
        flops=forward_flops(asked.model, asked.groups, head=False) / machine.count,
        moved=found.moved * len(packed),
        sent=len(packed) * (fsdp - 1) / fsdp * 2.0 * parameters,
        shape={
            "micro_batches": len(packed),
            "rows": batch["tokens_BL"].shape[0],
            "row_tokens": batch["tokens_BL"].shape[1],
        },
        step="round",
    )
