"""The engine that a stage samples with: this project's own in the worker, or HTTP servers with the same interface."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf.stages.common.models import limits_of, load_policy, load_rounded, mesh_of
from rlhf.stages.contract.definition import Context
from rlhf.stages.sampling.settings import NATIVE, SERVERS, EngineSettings
from rlhf.tuning import multihost

if TYPE_CHECKING:
    from rlhf.tuning.rollout.requests import Request


def open_engine(
    ctx: Context, settings: EngineSettings, quantize: str, context: int, requests: Sequence[Request]
) -> Any:
    """Open the engine with the stage's policy; its `run(requests)` yields (index, completions) as requests end.

    context: tokens of the longest prompt with its completion. requests: their first ones are probes of servers.
    """
    if not settings.in_worker:
        # By name, not by import: the code of HTTP servers must not be in the keys of rollouts without them.
        return importlib.import_module(SERVERS).open_engine(ctx, settings, quantize, context, requests)
    from rlhf.tuning.compile_target import few_shapes
    from rlhf.tuning.device import choose
    from rlhf.tuning.rollout.engine.placement import replicas_of, sampling_mesh
    from rlhf.tuning.rollout.engine.replicas import engine_over

    compute = ctx.config.compute
    device = choose(compute.dtype)
    config, params = load_rounded(ctx, ctx.inputs["policy"], quantize)
    mesh = sampling_mesh(compute.mesh)
    # `context` is bucketed and may exceed the positions.
    limits = limits_of(compute, device, min(context, config.max_positions), replicas_of(mesh), few_shapes())
    types = {name: getattr(settings, name) for name in NATIVE}
    engine = engine_over(mesh, config, device.compute.dtype, limits, **types)
    engine.load(params)
    ctx.log(f"the engine has {engine.size}")
    return engine


def with_local_policy(ctx: Context) -> Context:
    """The context with the stage's policy on the devices of this process alone. All processes of a group call it."""
    import jax

    from rlhf.tuning.mesh import gather
    from rlhf.tuning.models.sharding import shardings

    artifact = ctx.inputs["policy"]
    config, params = load_policy(ctx, artifact)
    params = gather(params)
    memory: dict[str, object] = {}
    if ctx.is_primary:
        with multihost.alone():
            mesh = mesh_of(ctx)
        local = jax.device_put(params) if mesh is None else jax.device_put(params, shardings(params, mesh))
        memory[f"decoder:{artifact.digest}"] = config, local
    return dataclasses.replace(ctx, memory=memory)


def replicas_here(ctx: Context) -> int:
    """How many engines of this project sample on the devices of each process of the group."""
    from rlhf.tuning.rollout.engine.placement import replicas_of, sampling_mesh

    return max(1, replicas_of(sampling_mesh(ctx.config.compute.mesh)) // multihost.process_count())


def in_one_go(settings: EngineSettings) -> bool:
    """Whether all shards of a round are sampled together, each written when its last completion has come.

    Else one after the other: on a single CPU device a shard then has the same bits after a kill. Elsewhere slots that
    a shard has left would wait for its longest completion.
    """
    import jax

    return settings.in_worker and (jax.default_backend() != "cpu" or jax.device_count() > 1)
