"""The memory of programs that read packed rows: an optimizer step, or a reward model's scores.

Packing, sharding, loss and optimizer are the product's own, from shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from rlhf.tuning.compile_target import few_shapes
from rlhf.tuning.device import Compute
from rlhf.tuning.fit.machines import Machine
from rlhf.tuning.fit.needs import Needs
from rlhf.tuning.fit.sharded_sizes import frozen, size, trees
from rlhf.tuning.mesh import batch_spec, laid_out, row_shards, state_shapes, under
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import scalar_graph
from rlhf.tuning.models.lora import LoraConfig, Role, over, tuned_graph
from rlhf.tuning.settings import ComputeSettings, OptimizerSettings
from rlhf.tuning.shapes import bucket
from rlhf.tuning.training.batch import Bounds, Group, choose_rows, micro_batches
from rlhf.tuning.training.forward import scores
from rlhf.tuning.training.optimizers import optimizer_of
from rlhf.tuning.training.step import LossFn, counted, step_programs


@dataclasses.dataclass(frozen=True)
class Packed:
    """Groups that a stage trains on in one step, or that a reward model scores."""

    model: DecoderConfig
    groups: Sequence[Group]
    compute: ComputeSettings
    make_loss: Callable[[Compute], LossFn] | None = None
    """None: a reward model scores."""
    optimizer: OptimizerSettings = OptimizerSettings()
    role: Role = "decoder"
    lora: LoraConfig | None = None
    whole: bool = False
    """Whether the completions of a group stay together, as those of a pair."""
    columns: tuple[str, ...] = ()
    """Columns that the loss reads next to tokens: `NAME_CT` of tokens, `NAME_C` of completions."""
    teacher: DecoderConfig | None = None
    """A model that the loss reads unchanged."""
    others: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of other arrays in a device's memory, by name."""

    def needs(self, on: Machine) -> Needs:
        """The needs of the stage. Raises ValueError if the mesh does not have the machine's number of devices."""
        with on.compiling():
            device, mesh = on.choices(self.compute.dtype, self.compute.remat), on.mesh(self.compute.mesh)
            packed = self._packed(device, row_shards(mesh))
            rows, length = packed[0].tokens_BL.shape
            shape = {"micro_batches": len(packed), "rows": rows, "row_tokens": length, "shards": row_shards(mesh)}
            program = self._scores if self.make_loss is None else self._step
            parts, programs = program(device.compute, mesh, packed)
            return Needs(
                {name: count for name, count in (parts | dict(self.others)).items() if count},
                shape,
                programs,
                # In one program gradients are made and used up.
                within=parts.get("gradients", 0) if len(packed) == 1 else 0,
            )

    def _packed(self, device: Any, shards: int) -> list[Any]:
        """Packs as `stages.training.fit`, `tuning.algorithms.rounds` and `tuning.training.completions` do."""
        budget, undivided = device.micro_batch(self.compute.tokens_per_micro_batch, shards, self.lora is not None)
        if self.make_loss is None:
            budget = undivided = self.compute.tokens_per_micro_batch or device.row_tokens_per_step
        largest = max(g.size for g in self.groups) if self.whole else 0
        # Passes over a table have one layout for all, and no bounds.
        bounded = few_shapes() and (self.make_loss is None or any(name.endswith("_CT") for name in self.columns))
        bounds = Bounds(sum(len(g.completions) for g in self.groups)) if bounded else None
        layout = choose_rows([self.groups], budget, largest, self.whole, undivided, bounds)
        width = bucket(max(len(c) for g in self.groups for c in g.completions))
        return micro_batches(self.groups, layout=layout, completion_tokens=width, shards=shards)

    def _scores(self, compute: Compute, mesh: Any, packed: list[Any]) -> tuple[dict[str, int], Any]:
        params = laid_out(frozen(self.model, "scalar", compute.dtype), mesh)
        batch = _placed(packed[0].arrays(), mesh)
        score = jax.jit(lambda params, batch: scores(scalar_graph(self.model), params, batch, compute))

        def programs(layers: int) -> list[Any]:
            with under(mesh):
                return [score.trace(params, batch)]

        return {"reward model": size(params), "batch": size(batch)}, programs

    def _step(self, compute: Compute, mesh: Any, packed: list[Any]) -> tuple[dict[str, int], Any]:
        columns = {n: packed[0].mask_CT if n.endswith("_CT") else packed[0].mask_CT[:, 0] for n in self.columns}
        batch = _placed(counted(self.groups, packed[:1])[0] | columns, mesh)
        optimizer = optimizer_of(self.optimizer)
        trained, base = trees(self.model, self.role, self.lora, compute.dtype)
        params, state = state_shapes(optimizer, trained, mesh)
        base = laid_out(base, mesh)
        teacher = self.teacher and laid_out(frozen(self.teacher, "decoder", compute.dtype), mesh)

        def programs(layers: int) -> list[Any]:
            assert self.make_loss is not None
            loss, below = self.make_loss(compute), teacher
            if self.lora is not None:
                loss, below = over(tuned_graph(self.model, self.role, self.lora), loss), (base, teacher)
            step: dict[str, Any] = dict(step_programs(loss, optimizer, trained, mesh))
            with under(mesh):
                if len(packed) == 1:
                    return [step["single"].trace(params, state, batch, below)]
                return [step["add"].trace(params, params, batch, below), step["apply"].trace(params, state, params)]

        parts = {"weights": size(params), "gradients": size(params), "moments": size(state)}
        return parts | {
            "frozen base": size(base),
            "teacher": size(teacher),
            # All of a step are on the devices before the first is computed.
            "batch": len(packed) * size(batch),
        }, programs


def _placed(batch: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Shapes of a micro-batch, each with its place."""

    def one(name: str, x: Any) -> Any:
        where = None if mesh is None else NamedSharding(mesh, batch_spec(name, np.shape(x), mesh))
        return jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=where)

    return {name: one(name, x) for name, x in batch.items()}
