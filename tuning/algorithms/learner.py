"""Parameters under training, and the compiled steps that train them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from rlhf.tuning.algorithms import ppo
from rlhf.tuning.algorithms.algorithm import find
from rlhf.tuning.algorithms.objective import policy_loss
from rlhf.tuning.algorithms.settings import CriticSettings, Objective
from rlhf.tuning.device import Compute
from rlhf.tuning.mesh import init_state, put_params, put_state
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import decoder_graph, scalar_graph
from rlhf.tuning.models.lora import Base, join, over
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.batch import Group
from rlhf.tuning.training.optimizers import optimizer_of
from rlhf.tuning.training.speed import ADAPTER, FULL, forward_flops
from rlhf.tuning.training.step import LossFn, StepFn, Sums, make_step


@dataclasses.dataclass
class Learner:
    """Parameters under training with their optimizer's state. A step donates both and puts new ones in their place."""

    params: Any
    """A pytree: all parameters of the model, or with a base the adapter's."""
    opt_state: Any
    base: Base | None = None
    """The frozen model under an adapter; None: all parameters are trained."""

    @classmethod
    def start(
        cls, params: Any, settings: OptimizerSettings, base: Base | None = None, mesh: Mesh | None = None
    ) -> Learner:
        """With the optimizer's first state, on the mesh that `params` are on.

        The first step donates `params`: pass a copy where others use them.
        """
        return cls(params, init_state(optimizer_of(settings), params, mesh), base)

    def put(self, settings: OptimizerSettings, mesh: Mesh | None) -> None:
        """Moves parameters, optimizer state and frozen base to the mesh; arrays already there are not copied."""
        self.params, self.opt_state = put_state(optimizer_of(settings), self.params, self.opt_state, mesh)
        if self.base is not None:
            self.base = dataclasses.replace(self.base, frozen=put_params(self.base.frozen, mesh))

    @property
    def graph(self) -> Any:
        """The static half of the tuned model; None without an adapter."""
        return self.base and self.base.graph

    @property
    def weights(self) -> Any:
        """Parameters as the forward passes take them, the frozen ones included."""
        return self.params if self.base is None else join(self.base.graph, self.params, self.base.frozen)

    def start_step(self, step: StepFn, batches: Sequence[dict[str, Any]], divided: bool) -> Callable[[], Sums]:
        """Starts an optimizer step on micro-batches; a function that waits for the sums of its metrics."""
        # (frozen base, the frozen argument of the loss itself), as `lora.over` takes them.
        frozen = None if self.base is None else (self.base.frozen, None)
        self.params, self.opt_state, sums = step.start(self.params, self.opt_state, batches, frozen, divided)
        return sums


# Kept between rounds by their settings: a new function would be compiled again.
@functools.lru_cache(maxsize=8)
def policy_step(
    model: DecoderConfig,
    objective: Objective,
    optimizer: OptimizerSettings,
    compute: Compute,
    graph: Any,
    mesh: Mesh | None,
) -> StepFn:
    """The policy's optimizer step; `graph` is `Learner.graph`."""
    return _step(policy_loss(decoder_graph(model), find(objective), objective, compute), optimizer, graph, mesh)


@functools.lru_cache(maxsize=8)
def critic_step(
    model: DecoderConfig, critic: CriticSettings, compute: Compute, graph: Any, mesh: Mesh | None
) -> StepFn:
    """The critic's optimizer step; `graph` is `Learner.graph`."""
    return _step(ppo.critic_loss(scalar_graph(model), critic, compute), critic.optimizer, graph, mesh)


def _step(loss: LossFn, optimizer: OptimizerSettings, graph: Any, mesh: Mesh | None) -> StepFn:
    wrapped = loss if graph is None else over(graph, loss)
    return make_step(wrapped, optimizer_of(optimizer), optimizer.max_skipped, mesh)


def step_flops(model: DecoderConfig, groups: Sequence[Group], policy: Learner, critic: Learner | None) -> float:
    """FLOPs of one optimizer step of all learners."""
    learners = [policy] if critic is None else [policy, critic]
    # A critic has no LM head.
    flops = [forward_flops(model, groups, head=learner is policy) for learner in learners]
    return sum(f * (FULL if learner.base is None else ADAPTER) for f, learner in zip(flops, learners, strict=True))
