"""The memory and the work of a training step, from the product's own loss, packing, sharding and optimizer.

The step's gradient is traced at the shapes of one device and its buffers are followed (`liveness`); weights, moments
and micro-batch are exact, by the rules of `tuning.mesh` and `tuning.training.batch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tuning.device import Compute
from tuning.fit.figures import Figures
from tuning.fit.liveness import Held, held
from tuning.fit.machines import Machine
from tuning.fit.places import (
    Beside,
    abstract_mesh,
    bytes_of,
    in_type,
    local,
    narrower,
    of_others,
    on_host_bytes,
    shapes_of,
    sizes_over,
    state_bytes,
    trees,
    weight_bytes,
)
from tuning.models.config import DecoderConfig
from tuning.models.lora import LoraConfig, Role, over, tuned_graph
from tuning.models.remat import RECOMPUTED
from tuning.models.sharding import CONTEXT, FSDP, ROWS, TENSOR
from tuning.models.sharding import parts as parts_of
from tuning.precision import item_bytes
from tuning.settings import ComputeSettings, OptimizerSettings
from tuning.shapes import bucket
from tuning.target import Platform, compiling_for
from tuning.training.batch import Group, choose_rows, micro_batches, plan_rows
from tuning.training.optimizers import optimizer_of
from tuning.training.speed import ADAPTER, FULL, forward_flops
from tuning.training.step import LossFn, counted

SPREAD = {"cpu": (1.0, 1.46, 2.0), "tpu": (1.0, 2.5, 3.4), "gpu": (1.0, 1.6, 2.5)}
"""Factors on the bytes that the body of a loop holds: least, expected, most. XLA's schedule within a body, copies for
layouts and holes between buffers are not known before it compiles, and on TPU it spends free memory to hide what
devices send. On CPU and TPU by what the compilers say (`tests/tuning/fit`, `tests/aot/bounds.json`); for GPUs nothing
was measured."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a stage trains, and on what."""

    model: DecoderConfig
    make_loss: Callable[[DecoderConfig, Compute], LossFn]
    """Of the model as a device computes it."""
    groups: Sequence[Group]
    """The groups of one optimizer step."""
    width: int
    """Tokens of the longest completion."""
    optimizer: OptimizerSettings
    compute: ComputeSettings
    role: Role = "decoder"
    lora: LoraConfig | None = None
    whole: bool = False
    """Whether the completions of a group stay together, as those of a pair."""
    columns: tuple[str, ...] = ()
    """Names of what the loss reads beside tokens: `NAME_CT` of tokens, `NAME_C` of completions."""
    teacher: DecoderConfig | None = None
    """A model that the loss reads unchanged."""
    beside: tuple[Beside, ...] = ()
    """What else is in the devices' memory meanwhile."""


def training(asked: Trained, machine: Machine) -> Figures:
    """The figures of an optimizer step. Raises ValueError where the mesh is not of the machine's devices."""
    with compiling_for(machine.kind.platform):
        longest = _training(asked, machine)
        shorter = _undivided(asked, machine, longest)
        if shorter is None:
            return longest
        other = _training(shorter, machine)
        if other.peak[1] <= longest.peak[1]:
            return longest
        return dataclasses.replace(longest, parts=other.parts, temporary=other.temporary)


def _undivided(asked: Trained, machine: Machine, longest: Figures) -> Trained | None:
    """A step of shorter sequences that is one micro-batch, larger than those of the longest step; None where no step is
    larger."""
    device = machine.choices(asked.compute.dtype, asked.compute.remat)
    budget, undivided = device.micro_batch(asked.compute.tokens_per_micro_batch, 1, asked.lora is not None)
    if undivided <= budget or longest.shape["micro_batches"] == 1:
        return None
    shards = parts_of(abstract_mesh(asked.compute.mesh, machine.count), ROWS)
    length, groups = longest.shape["row_tokens"], list(asked.groups)
    # As many as could fit without padding, and then as many as do.
    within = np.cumsum([g.size for g in groups]) <= undivided * shards
    groups = groups[: int(within.sum())]
    while groups and len(plan_rows(groups, length)) * length > undivided * shards:
        groups.pop()
    return dataclasses.replace(asked, groups=groups) if groups else None


def _training(asked: Trained, machine: Machine) -> Figures:
    device = machine.choices(asked.compute.dtype, asked.compute.remat)
    compute = device.compute
    mesh = abstract_mesh(asked.compute.mesh, machine.count)
    shards, fsdp, tensor, context = (parts_of(mesh, axes) for axes in (ROWS, FSDP, TENSOR, CONTEXT))
    # As `stages.training.fit` and `tuning.algorithms.rounds` pack a step.
    budget, undivided = device.micro_batch(asked.compute.tokens_per_micro_batch, shards, asked.lora is not None)
    largest = max(g.size for g in asked.groups) if asked.whole else 0
    layout = choose_rows([asked.groups], budget, largest, asked.whole, undivided)
    packed = micro_batches(asked.groups, layout=layout, completion_tokens=bucket(asked.width), shards=shards)
    batch = of_one_device(counted(asked.groups, packed[:1])[0] | _columns(asked, packed[0]), shards)

    optimizer = optimizer_of(asked.optimizer)
    trained, frozen = trees(asked.model, asked.role, asked.lora, compute.dtype)
    dense = shapes_of(asked.model, asked.role)
    parts = {"weights": weight_bytes(trained, mesh), "moments": state_bytes(optimizer, trained, mesh)}
    if frozen is not None:
        parts["frozen base"] = weight_bytes(frozen, mesh)
    if asked.teacher is not None:
        parts["teacher"] = weight_bytes(in_type(shapes_of(asked.teacher, "decoder"), narrower(compute.dtype)), mesh)
    parts |= of_others(asked.beside, mesh, compute.dtype)
    parts["micro-batch"] = bytes_of(batch)
    several = len(packed) > 1
    if several:
        # All of an optimizer step are put on the devices before the first is computed.
        parts["further micro-batches"] = (len(packed) - 1) * parts["micro-batch"]
    gradients = weight_bytes(trained, mesh)
    if several:
        # One tree is added to, the other is new: the second is in `gradient`.
        parts["gradients"] = gradients

    item = item_bytes(compute.dtype)
    with compiling_for(traceable(machine.kind.platform), part=machine.count > 1):
        traced = gradient(asked, compute, of_columns(batch, context), tensor, fsdp)
    outer, within = traced.peak - traced.within, traced.within
    # Keys and values of whole rows.
    gathered = 2 * batch["tokens_BL"].size * local(asked.model, tensor).num_kv_heads * asked.model.head_dim * item
    if context > 1:
        # Their gradients are as large.
        within += 2 * gathered
    if machine.kind.platform == "gpu":
        rows, length = batch["tokens_BL"].shape
        outer += 2 * pairs_bytes(rows, length, item)
    # The update needs the gradients and as much for what it changes.
    apply = gradients if several else 2 * gradients
    # Moments come from the host and go back one parameter at a time.
    on_host, largest = on_host_bytes(optimizer, trained, mesh)
    apply += largest
    if machine.kind.platform != "cpu" and item < 4 and frozen is None:
        # XLA casts the stacked weights once, before the loop over layers.
        outer += weight_bytes(in_type(trained, compute.dtype), mesh)
    low, middle, high = (max(x, apply) for x in spread(outer, within, machine.kind.platform))

    tokens = sum(p.tokens_BL.size for p in packed)
    head = asked.role == "decoder"
    forward = forward_flops(asked.model, asked.groups, head=head)
    # Padding is computed too.
    forward *= tokens / max(1, sum(g.size for g in asked.groups))
    passes = (FULL if asked.lora is None else ADAPTER) + RECOMPUTED[compute.remat]
    flops = passes * forward + (forward_flops(asked.teacher, asked.groups) if asked.teacher else 0.0)
    state = parts["weights"] + parts["moments"]
    sent = _sent(asked, mesh.shape, bytes_of(dense) // 4, item, tokens / len(packed) / shards / context)
    # Forward, forward again where layers are computed again, and the way back.
    sent += (2 + RECOMPUTED[compute.remat]) * asked.model.num_layers * gathered * (context - 1) / context
    return Figures(
        parts=parts,
        temporary=(low, middle, high),
        flops=flops / machine.count,
        moved=traced.moved * len(packed) + 2 * state + 2 * gradients,
        sent=len(packed) * sent,
        shape={
            "micro_batches": len(packed),
            "rows": packed[0].tokens_BL.shape[0] // shards,
            "row_tokens": packed[0].tokens_BL.shape[1],
            "remat": compute.remat,
            "host": on_host,
            "mesh": dict(mesh.shape),
        },
    )


def pairs_bytes(rows: int, length: int, item: int) -> int:
    """Bytes of cuDNN's bias over all pairs of each row, which JAX makes of a mask in the type of the products. Its
    gradient, which nobody reads, is as large (`jax.nn.dot_product_attention`, jax 0.10)."""
    return rows * length * length * item


def spread(outer: float, within: float, platform: Platform) -> tuple[int, int, int]:
    """Least, expected and most bytes of a program that holds `within` of its bytes in the body of a loop."""
    low, middle, high = (int(outer + factor * within) for factor in SPREAD[platform])
    # What is outside of loops has holes and copies too.
    return low, middle, max(high, int(1.1 * middle))


def gradient(asked: Trained, compute: Compute, batch: Any, tensor: int, fsdp: int) -> Held:
    """What the program of value and gradient holds on one device, gradients included."""
    model = local(asked.model, tensor)
    trained, frozen = trees(model, asked.role, asked.lora, compute.dtype)
    loss = asked.make_loss(model, compute)
    teacher = None if asked.teacher is None else shapes_of(local(asked.teacher, tensor), "decoder")
    if teacher is not None:
        teacher = in_type(teacher, narrower(compute.dtype))
    below: Any = teacher
    if asked.lora is not None:
        loss, below = over(tuned_graph(model, asked.role, asked.lora), loss), (frozen, teacher)
    traced = jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(trained, batch, below)
    return held(traced, sizes_over((trained, below), fsdp))


def traceable(platform: Platform) -> Platform:
    """The platform that a program is traced for in place of another: cuDNN's kernel asks for the library, and what it
    keeps (its output and the sums of its softmax) is what splash keeps."""
    return "tpu" if platform == "gpu" else platform


def _columns(asked: Trained, packed: Any) -> dict[str, np.ndarray]:
    of_tokens, of_completions = packed.mask_CT, packed.mask_CT[:, 0]
    return {n: of_tokens if n.endswith("_CT") else of_completions for n in asked.columns}


def of_one_device(batch: dict[str, Any], shards: int) -> dict[str, Any]:
    """Shapes of a micro-batch's part."""

    def part(name: str, x: Any) -> Any:
        shape = np.shape(x)
        if name == "where_M" and len(shape) == 2:
            shape = shape[1:]
        elif shape and shards > 1:
            shape = (shape[0] // shards, *shape[1:])
        return jax.ShapeDtypeStruct(shape, np.asarray(x).dtype)

    return {name: part(name, x) for name, x in batch.items()}


def of_columns(batch: dict[str, Any], context: int) -> dict[str, Any]:
    """Shapes of the columns and positions of a micro-batch that are a device's own where rows are cut by `context`."""

    def part(name: str, x: Any) -> Any:
        if not name.endswith(("_BL", "_M")):
            return x
        return jax.ShapeDtypeStruct((*x.shape[:-1], -(-x.shape[-1] // context)), x.dtype)

    return {name: part(name, x) for name, x in batch.items()}


def _sent(asked: Trained, sizes: Any, parameters: int, item: int, tokens: float) -> float:
    """Bytes that a device sends for one micro-batch of `tokens` on each shard.

    `fsdp`: parameters are gathered forward and backward in the type of computation, gradients scattered in float32
    (Zhao et al., 2023). `data`: gradients are summed. `tensor`: two sums of activations a layer each way (Shoeybi et
    al., 2019).
    """
    data, fsdp, tensor = sizes["data"], sizes["fsdp"], sizes["tensor"]
    mine = parameters / tensor
    # An adapter's gradients are small.
    gradients = 0.0 if asked.lora is not None else 4.0 * mine
    sent = (fsdp - 1) / fsdp * (2 * item * mine + gradients)
    sent += 2 * (data - 1) / data * gradients / fsdp
    sums = 4 * asked.model.num_layers * tokens * asked.model.hidden_size * item
    return sent + 2 * (tensor - 1) / tensor * sums
