"""The loop of the stages that pass over a table of examples: SFT and reward models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from stages.contract.definition import Context

SHAPE_STEPS = 32


@dataclasses.dataclass(frozen=True)
class Task:
    """What a stage trains on, and by which loss."""

    make_loss: Callable[[Any], Any]
    """Compute choices -> loss function of `tuning.training.step`; the batch holds `n_tokens` and `n_groups`."""
    examples: Any
    """A sequence of groups with the sizes of all (`tuning.data.reading.Examples`); in a step their completions are
    numbered from 0."""
    summary: Callable[[dict[str, float]], dict[str, float]]
    """Sums of a step -> metrics to show."""
    sample: Callable[[Any, int, list[Any]], list[Any]] | None = None
    """(parameters, step, groups) -> the groups to train on, for completions that the model itself writes."""
    flops: Callable[[list[Any]], float] = lambda groups: 0.0
    """Groups -> FLOPs of a step on them, or of what a step computes beside the policy (`stages.training.adapters`)."""
    columns: Callable[[Any, list[int], list[Any]], list[dict[str, Any]]] | None = None
    """(parameters, example numbers, micro-batches) -> what the loss needs of each beside its tokens."""
    tokens_per_step: int | None = None
    """Tokens of a step, in place of a number of examples."""
    longest: int = 0
    """Tokens of a completion for which there must be room, where the model writes some."""
    largest: int = 0
    """Tokens of a group for which there must be room, likewise."""


def fit(ctx: Context, task: Task, params: Any, config: Any, frozen: Any = None) -> tuple[Any, dict[str, Any]]:
    """Trains a copy of `params`; resumes from the newest checkpoint in `ctx.work`.

    `config` has epochs, examples_per_step, optimizer, compute and checkpoint_every; `frozen` is
    handed to the loss as it is. Returns the parameters and the manifest's metrics.
    """
    from tuning.data.reading import Steps
    from tuning.device import choose
    from tuning.mesh import init_state, over_devices, put_params, row_shards
    from tuning.shapes import bucket
    from tuning.training.batch import choose_rows, counted, micro_batches, numbered
    from tuning.training.checkpoint import Checkpoints
    from tuning.training.optimizers import optimizer_of
    from tuning.training.speed import Meter
    from tuning.training.step import copy, make_step

    device = choose(config.compute.dtype)
    if not len(task.examples):
        raise ValueError("there are no examples to train on; the data's card.html says what was dropped and why")
    table, per_step = task.examples, None if task.tokens_per_step else config.examples_per_step
    steps = Steps(table.sizes_N, config.epochs, ctx.seed, per_step, task.tokens_per_step)
    total = len(steps)
    optimizer = optimizer_of(config.optimizer, total)
    mesh = over_devices(config.compute.mesh)
    step_fn = make_step(task.make_loss(device.compute), optimizer, config.optimizer.max_skipped, mesh)

    def groups_of(step: int) -> list[Any]:
        return numbered([table[i] for i in steps[step]])

    # No group is split: the completions of one lie in neighbouring slots.
    width, largest = bucket(max(task.longest, table.longest)), max(task.largest, int(table.sizes_N.max()))
    budget = config.compute.tokens_per_micro_batch or device.row_tokens_per_step
    layout = choose_rows([groups_of(s) for s in range(min(total, SHAPE_STEPS))], budget, largest)

    params, frozen = put_params(copy(params), mesh), put_params(frozen, mesh)
    opt_state = init_state(optimizer, params, mesh)
    checkpoints = Checkpoints(ctx.work / "checkpoints", ctx.saved)
    first = 0
    lines: list[dict[str, Any]] = []
    try:
        restored = checkpoints.restore((params, opt_state))
        if restored is not None:
            (params, opt_state), position = restored
            first, lines = position["step"], position["lines"]
            for line in lines:
                ctx.metrics_line(**line)
            ctx.log(f"resumed at step {first} of {total}")
        meter, last = Meter(device.compute.dtype), {}
        for step in range(first, total):
            groups = groups_of(step)
            if task.sample is not None:
                groups = task.sample(params, step, groups)
            packed = micro_batches(groups, layout=layout, completion_tokens=width, shards=row_shards(mesh))
            batches = counted(groups, packed)
            if task.columns is not None:
                more = task.columns(params, steps[step], packed)
                batches = [a | b for a, b in zip(batches, more, strict=True)]
            params, opt_state, sums = step_fn(params, opt_state, batches, frozen)
            last = task.summary(sums)
            tokens = sum(g.size for g in groups)
            speed = meter.step(tokens, task.flops(groups))
            lines.append({"step": step, "grad_norm": float(sums["grad_norm"]), "row_tokens": tokens, **last, **speed})
            ctx.metrics_line(**lines[-1])
            ctx.progress(step + 1, total, "step", loss=last["loss"], **meter.rates())
            if (step + 1) % config.checkpoint_every == 0 and step + 1 < total:
                checkpoints.save(step + 1, (params, opt_state), {"step": step + 1, "lines": lines})
    finally:
        checkpoints.close()
    metrics: dict[str, Any] = {"steps": total} | {k: float(v) for k, v in last.items()}
    return params, metrics | meter.whole()
