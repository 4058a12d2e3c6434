"""The loop of the stages that pass over a table of examples: SFT, reward models, preference learning, distillation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhf.stages.common.settings import Fitted
from rlhf.stages.contract.definition import Context

if TYPE_CHECKING:
    from rlhf.tuning.data.reading import Examples
    from rlhf.tuning.device import Compute
    from rlhf.tuning.training.batch import Group, Packed
    from rlhf.tuning.training.checkpoint import Checkpoints
    from rlhf.tuning.training.step import LossFn

SHAPE_STEPS = 32
"""Steps whose groups decide how long rows are."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The examples that a stage trains on, and the loss."""

    make_loss: Callable[[Compute], LossFn]
    """Compute choices -> loss function of `rlhf.tuning.training.step`; the batch holds `n_tokens` and `n_groups`."""
    examples: Examples
    """A sequence of groups with the sizes of all (`rlhf.tuning.data.reading.Examples`); in a step their completions are
    numbered from 0."""
    summary: Callable[[dict[str, float]], dict[str, float]]
    """Sums of a step -> metrics to show."""
    sample: Callable[[Any, int, list[Group]], list[Group]] | None = None
    """(parameters, step, groups) -> the groups to train on, for completions that the model itself writes."""
    flops: Callable[[list[Group]], float] = lambda groups: 0.0
    """Groups -> FLOPs of a step on them, or of its computations outside the policy
    (`rlhf.stages.training.adapters`)."""
    columns: Callable[[Any, list[int], list[Packed]], list[dict[str, Any]]] | None = None
    """(parameters, example numbers, micro-batches) -> inputs of the loss for each in addition to its tokens."""
    measure: Callable[[Any], dict[str, float]] | None = None
    """Parameters -> metrics on held-out examples, such as `loss`; None: there are no such examples."""
    judged: str = "loss"
    """The one of these that early stopping follows."""
    tokens_per_step: int | None = None
    """Tokens of a step, in place of a number of examples."""
    longest: int = 0
    """Longest completion in tokens that the model itself may write; 0: it writes none."""
    largest: int = 0
    """Largest group in tokens with such completions."""


def fit(ctx: Context, task: Task, params: Any, config: Fitted, frozen: Any = None) -> tuple[Any, dict[str, Any]]:
    """Train a copy of `params`; resume from the newest checkpoint in `ctx.work`.

    `frozen` is passed to the loss unchanged. Returns the parameters and the manifest's metrics: those of the last step,
    and `heldout_NAME` of the task's measurement, after training and as `heldout_NAME_before` before it.
    Raises ValueError without examples.
    """
    from rlhf.tuning import multihost
    from rlhf.tuning.training.checkpoint import Checkpoints

    if not len(task.examples):
        raise ValueError("there are no examples to train on; the data's card.html says what was dropped and why")
    loop = _Loop(ctx, task, config, params, frozen)
    early = config.early_stopping_every or 0
    checkpoints = Checkpoints(ctx.work / "checkpoints", ctx.saved, ctx.fetch)
    try:
        first = loop.resume(checkpoints)
        for step in range(first, loop.total):
            judged = _due(step + 1, early)
            loop.train(step, measure=step + 1 == loop.total or judged or _due(step + 1, config.heldout_every))
            if judged and loop.stalled(early, config.early_stopping_patience):
                ctx.log(f"stopped after step {step + 1} of {loop.total}: the held-out loss no longer falls")
                break
            # None after the last step: the artifact follows at once.
            if (step + 1) % config.checkpoint_every == 0 and step + 1 < loop.total:
                loop.read()
                checkpoints.save(step + 1, loop.state, {"step": step + 1, "lines": loop.lines})
    finally:
        checkpoints.close()
    metrics: dict[str, Any] = {"steps": len(loop.lines)} | {k: float(v) for k, v in loop.last.items()}
    if "tokens" in loop.last:
        # All that were trained on; the other metrics are those of the last step.
        metrics["tokens"] = float(sum(line.get("tokens", 0.0) for line in loop.lines))
    # Of the process that wrote most.
    metrics["checkpoint_bytes"] = max(multihost.gather(checkpoints.bytes_written))
    return loop.state[0], metrics | loop.heldout() | loop.meter.whole()


def _due(steps: int, every: int) -> bool:
    return every > 0 and steps % every == 0


def _nothing() -> None:
    pass


class _Loop:
    """Training in progress: the layout of micro-batches, and the state that steps change."""

    def __init__(self, ctx: Context, task: Task, config: Fitted, params: Any, frozen: Any):
        from rlhf.tuning.data.reading import Steps
        from rlhf.tuning.device import choose
        from rlhf.tuning.mesh import over_devices, put_params, row_shards
        from rlhf.tuning.shapes import bucket
        from rlhf.tuning.training.batch import choose_rows
        from rlhf.tuning.training.optimizers import optimizer_of
        from rlhf.tuning.training.step import make_step

        self.ctx, self.task = ctx, task
        device, table = choose(config.compute.dtype, config.compute.remat), task.examples
        per_step = None if task.tokens_per_step else config.examples_per_step
        self.steps = Steps(table.sizes_N, config.epochs, ctx.seed, per_step, task.tokens_per_step)
        self.total = len(self.steps)
        # The number of steps is known, so a schedule ends with the last of them.
        self.optimizer = optimizer_of(config.optimizer, self.total)
        self.mesh = over_devices(config.compute.mesh)
        self.step_fn = make_step(
            task.make_loss(device.compute), self.optimizer, config.optimizer.max_skipped, self.mesh
        )

        # No group is split: the completions of one are in neighbouring slots.
        largest = max(task.largest, int(table.sizes_N.max()))
        self.width = bucket(max(task.longest, table.longest))
        budget, undivided = device.micro_batch(
            config.compute.tokens_per_micro_batch, row_shards(self.mesh), config.lora is not None
        )
        # One layout serves all steps, so that each program compiles once; the first steps stand for the rest.
        first = [self.groups(s) for s in range(min(self.total, SHAPE_STEPS))]
        self.layout = choose_rows(first, budget, largest, True, undivided)

        self.start, self.frozen = params, put_params(frozen, self.mesh)
        self.state: tuple[Any, Any]
        self.lines: list[dict[str, Any]] = []
        self.last: dict[str, float] = {}
        self.dtype = device.compute.dtype
        self.read: Callable[[], None] = _nothing
        """Waits for the last step that was started, and writes its line; called once more it does nothing."""

    def groups(self, step: int) -> list[Group]:
        """The examples of a step."""
        from rlhf.tuning.training.batch import numbered

        return numbered([self.task.examples[i] for i in self.steps[step]])

    def resume(self, checkpoints: Checkpoints) -> int:
        """Restore the newest checkpoint, or initialise the state; return the number of the first step to train."""
        from rlhf.tuning.mesh import init_state, own_params, state_shapes
        from rlhf.tuning.training.speed import Meter

        restored = checkpoints.restore(state_shapes(self.optimizer, self.start, self.mesh))
        if restored is None:
            # A copy: the step donates its arrays, and those of the worker's memory are needed again.
            params = own_params(self.start, self.mesh)
            self.state = params, init_state(self.optimizer, params, self.mesh)
        # The clock of the steps starts after a checkpoint is read.
        self.meter = Meter(self.dtype)
        if restored is None:
            return 0
        self.state, position = restored
        first: int = position["step"]
        # The log of a resumed stage has the earlier steps too.
        self.lines = position["lines"]
        for line in self.lines:
            self.ctx.metrics_line(**line)
        self.ctx.log(f"resumed at step {first} of {self.total}")
        return first

    def train(self, step: int, measure: bool) -> None:
        """Start one optimizer step, then read the one before while the device computes; with `measure` also this one,
        with the metrics on the held-out examples."""
        task, groups = self.task, self.groups(step)
        before = {f"{name}_before": value for name, value in self.measured().items()} if step == 0 else {}
        if task.sample is not None:
            # With the parameters of this step: on policy.
            groups = task.sample(self.state[0], step, groups)
        params, opt_state, sums = self.step_fn.start(*self.state, self.batches(step, groups), self.frozen)
        self.state = params, opt_state
        self.read()
        tokens, flops = sum(g.size for g in groups), task.flops(groups)

        def read() -> None:
            self.read = _nothing
            found = sums()
            self.last = task.summary(found)
            speed = self.meter.step(tokens, flops)
            line = {"step": step, "grad_norm": float(found["grad_norm"]), "row_tokens": tokens, **self.last, **speed}
            line |= before | (self.measured() if measure else {})
            self.lines.append(line)
            self.ctx.metrics_line(**line)
            self.ctx.progress(step + 1, self.total, "step", loss=self.last["loss"], **self.meter.rates())

        self.read = read
        if measure:
            read()

    def stalled(self, every: int, patience: int) -> bool:
        """Whether the last `patience` measurements, one each `every` steps, are not below the least before them.

        Raises ValueError without held-out examples.
        """
        name = f"heldout_{self.task.judged}"
        if name not in self.lines[-1]:
            raise ValueError("early_stopping_every needs held-out examples: raise heldout_fraction")
        losses = [line[name] for line in self.lines[every - 1 :: every]]
        return len(losses) > patience and bool(min(losses[-patience:]) >= min(losses[:-patience]))

    def measured(self) -> dict[str, float]:
        """Compute the metrics on the held-out examples with the current parameters; none without such examples."""
        if self.task.measure is None:
            return {}
        found = {f"heldout_{k}": float(v) for k, v in self.task.measure(self.state[0]).items()}
        self.meter.skip()
        return found

    def heldout(self) -> dict[str, float]:
        """Return the metrics on the held-out examples, at the end and, as `NAME_before`, at the start."""
        first, last = self.lines[0], self.lines[-1]
        before = {k: v for k, v in first.items() if k.startswith("heldout_") and k.endswith("_before")}
        return {k: v for k, v in last.items() if k.startswith("heldout_")} | before

    def batches(self, step: int, groups: list[Group]) -> list[dict[str, Any]]:
        """The micro-batches of a step, with the task's additions."""
        from rlhf.tuning.mesh import row_shards
        from rlhf.tuning.training.batch import micro_batches
        from rlhf.tuning.training.step import counted

        shards = row_shards(self.mesh)
        packed = micro_batches(groups, layout=self.layout, completion_tokens=self.width, shards=shards)
        batches = counted(groups, packed)
        if self.task.columns is None:
            return batches
        # Before the update: columns may come from the parameters, as KTO's reference point does.
        more = self.task.columns(self.state[0], self.steps[step], packed)
        return [a | b for a, b in zip(batches, more, strict=True)]
