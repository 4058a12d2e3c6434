"""Training of an adapter, or of all parameters, as a stage's settings have it.

A stage with an adapter stores it under `adapter/`, as PEFT loads it. Its manifest names the artifact with the weights
below, and `restore` merges both.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from rlhf.stages.common.models import ADAPTER, below, cached, load_base, load_policy, mesh_of
from rlhf.stages.common.settings import Lora
from rlhf.stages.contract.definition import Context
from rlhf.stages.store.artifacts import Artifact
from rlhf.stages.training import fit as training
from rlhf.stages.training.fit import Task

if TYPE_CHECKING:
    from rlhf.tuning.models.lora import Base, LoraConfig

Role = Literal["decoder", "scalar"]


def lora_config(settings: Lora) -> LoraConfig:
    """The settings as the core takes them."""
    from rlhf.tuning.models.lora import PROJECTIONS, LoraConfig

    values = settings.model_dump()
    chosen = PROJECTIONS if settings.targets == "all-linear" else settings.targets
    # In one order: how the recipe lists them is no difference.
    return LoraConfig(**values | {"targets": tuple(name for name in PROJECTIONS if name in chosen)})


def fit(
    ctx: Context,
    task: Task,
    model: Any,
    params: Any,
    config: Any,
    *,
    role: Role = "decoder",
    frozen: Any = None,
) -> tuple[Any, dict[str, Any]]:
    """As `training.fit`, with an adapter if `config.lora` is set; returns dense parameters either way.

    `model` is the DecoderConfig of `params`. The task's loss and columns see a tuned model in place of parameters,
    its `sample` and `measure` get merged ones.
    """
    scaling, longest = model.rope_scaling, int(task.examples.positions_N.max())
    if scaling and scaling.kind == "longrope" and longest > model.max_positions:
        raise ValueError(
            f"an example takes {longest} positions, and the short factors of this model's longrope hold for "
            f"{model.max_positions}: lower data.max_prompt_tokens or data.max_completion_tokens"
        )
    task = dataclasses.replace(task, flops=_flops(task, model, role, config))
    if config.lora is None:
        return training.fit(ctx, task, params, config, frozen)
    import jax

    from rlhf.tuning.device import choose
    from rlhf.tuning.models.lora import join, merge, over, tune, tuned_graph
    from rlhf.tuning.models.peft import save_adapter

    lora = lora_config(config.lora)
    graph = tuned_graph(model, role, lora)
    dtype = choose(config.compute.dtype).compute.dtype
    trainable, base = tune(model, role, params, lora, seed=ctx.seed, dtype=dtype)
    columns, sample, measure = task.columns, task.sample, task.measure
    adapted = dataclasses.replace(
        task,
        make_loss=lambda compute: over(graph, task.make_loss(compute)),
        columns=None if columns is None else lambda p, *rest: columns(join(graph, p, base), *rest),
        sample=None if sample is None else lambda p, *rest: sample(merge(model, role, params, p, lora), *rest),
        measure=None if measure is None else lambda p: measure(merge(model, role, params, p, lora)),
    )
    trained, metrics = training.fit(ctx, adapted, trainable, config, (base, frozen))
    save_adapter(ctx.out / ADAPTER, trained, lora, name_of(ctx.inputs["policy" if "policy" in ctx.inputs else "base"]))
    return merge(model, role, params, trained, lora), metrics | {
        "trained_parameters": sum(x.size for x in jax.tree.leaves(trained)),
        "frozen_bytes": sum(x.nbytes for x in jax.tree.leaves(base)),
    }


def restore(ctx: Context, artifact: Artifact) -> tuple[Any, Any]:
    """(DecoderConfig, parameters) of an artifact with an adapter alone, merged with those of the artifact below it.

    Raises RuntimeError, naming both, if that is not stored any more.
    """
    from rlhf.tuning.mesh import put_params
    from rlhf.tuning.models.huggingface import scalar_head_params
    from rlhf.tuning.models.lora import merge, trainable_shapes
    from rlhf.tuning.models.peft import load_adapter

    lora = lora_config(Lora.model_validate_json(json.dumps(artifact.manifest["config"]["lora"])))
    role: Role = "scalar" if artifact.stage == "reward" else "decoder"

    config, params = load_base(ctx, below(artifact))
    if role == "scalar":
        params = scalar_head_params(config, params)
    trained = load_adapter(artifact.local(f"{ADAPTER}/"), trainable_shapes(config, role, lora))
    params, trained = (put_params(tree, mesh_of(ctx)) for tree in (params, trained))
    return config, merge(config, role, params, trained, lora)


def _flops(task: Task, model: Any, role: Role, config: Any) -> Callable[[list[Any]], float]:
    """FLOPs of a step on groups: forward and backward through the policy, and the task's other computations."""
    from rlhf.tuning.training.speed import ADAPTER, FULL, forward_flops

    # A frozen kernel has no gradient.
    times = FULL if config.lora is None else ADAPTER
    return lambda groups: times * forward_flops(model, groups, head=role == "decoder") + task.flops(groups)


def name_of(artifact: Artifact) -> str:
    """The name of an artifact in the config of an adapter over it: stage and digest."""
    return f"{artifact.stage}-{artifact.digest[:12]}"


def load_start(ctx: Context, artifact: Artifact) -> tuple[Any, Any]:
    """(DecoderConfig, parameters) of the policy that a stage trains, or that goes under its adapter."""
    return (load_policy if ctx.config.lora is None else load_base)(ctx, artifact)


def based(ctx: Context, digest: str, role: Role, load: Callable[[], tuple[Any, Any]], config: Any) -> Base:
    """The frozen part under the adapters of `config.lora`, kept in the worker's memory.

    `load` gives (DecoderConfig, dense parameters) of the artifact with this digest.
    """
    from rlhf.tuning.device import choose
    from rlhf.tuning.models.lora import Base, tune, tuned_graph

    lora, dtype = lora_config(config.lora), choose(config.compute.dtype).compute.dtype

    def frozen() -> tuple[Any, Any]:
        model, params = load()
        # Only the frozen half is used, which no seed changes.
        return model, tune(model, role, params, lora, seed=0, dtype=dtype)[1]

    model, kept = cached(ctx, f"frozen:{digest}:{lora.quantize}:{dtype}", frozen)
    return Base(tuned_graph(model, role, lora), kept)
