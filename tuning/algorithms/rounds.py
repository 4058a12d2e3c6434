"""One round of RL on scored rollouts: advantages, then optimizer steps over packed groups.

The algorithm is found by name (`tuning.algorithms.algorithm`); nothing here depends on which one it is, but that PPO
brings a critic. Axes: N completions of the round, C completions of a micro-batch, T completion tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tuning.algorithms import ppo
from tuning.algorithms.algorithm import Objective, Scored, find, informative
from tuning.algorithms.diagnostics import Coefficients, pass_histogram, summarise
from tuning.algorithms.objective import policy_loss
from tuning.algorithms.round_data import RoundData
from tuning.device import Compute, choose
from tuning.losses.rewards import kl_penalty
from tuning.mesh import over_devices, put_batch, put_params, put_state, row_shards
from tuning.models.config import DecoderConfig
from tuning.models.decoder import decoder_graph, scalar_graph
from tuning.models.lora import Base, join, over
from tuning.training.batch import Group, Packed, choose_rows, micro_batches
from tuning.training.forward import logps_and_entropy, values_and_last
from tuning.training.speed import ADAPTER, FULL, Meter, forward_flops
from tuning.training.step import make_step


class Mismatch(RuntimeError):
    """Sampler and trainer disagree by more than the settings allow."""


@functools.lru_cache(maxsize=8)
def _logps(model: DecoderConfig, temperature: float, compute: Compute) -> Any:
    graph = decoder_graph(model)
    return jax.jit(lambda params, batch: logps_and_entropy(graph, params, batch, temperature, compute)[0])


@functools.lru_cache(maxsize=8)
def _values(model: DecoderConfig, compute: Compute) -> Any:
    graph = scalar_graph(model)
    return jax.jit(lambda params, batch: values_and_last(graph, params, batch, compute))


# Optimizers close over functions, so equal ones compare unequal; steps are kept by what made them.
_steps: dict[Any, Any] = {}


def _step(key: Any, make: Callable[[], Any]) -> Any:
    if key not in _steps:
        _steps[key] = make()
    return _steps[key]


@dataclasses.dataclass
class Trainee:
    """Parameters in training, what lies frozen under them, and their optimizer."""

    params: Any
    opt_state: Any
    optimizer: Any
    settings: Any
    base: Base | None
    step: Any = None

    def placed(self, mesh: Any) -> Trainee:
        """The same, on the mesh."""
        self.params, self.opt_state = put_state(self.optimizer, self.params, self.opt_state, mesh)
        if self.base is not None:
            self.base = dataclasses.replace(self.base, frozen=put_params(self.base.frozen, mesh))
        return self

    @property
    def whole(self) -> Any:
        """Parameters as the model takes them."""
        return self.params if self.base is None else join(self.base.graph, self.params, self.base.frozen)

    def compiled(self, key: Any, loss: Callable[[], Any], mesh: Any) -> None:
        graph = self.base and self.base.graph

        def make() -> Any:
            wrapped = loss() if graph is None else over(graph, loss())
            return make_step(wrapped, self.optimizer, self.settings.max_skipped, mesh)

        self.step = _step((key, self.settings.model_dump_json(), graph, mesh), make)

    def train(self, arrays: list[dict[str, Any]]) -> dict[str, float]:
        """One optimizer step; the sums of its metrics."""
        frozen = None if self.base is None else (self.base.frozen, None)
        self.params, self.opt_state, sums = self.step(self.params, self.opt_state, arrays, frozen)
        return sums


class _Round:
    """A round under way."""

    def __init__(self, data: RoundData, settings: Any, model: DecoderConfig, hooks: Any, coefficients: Coefficients):
        self.data, self.settings, self.model = data, settings, model
        self.counted, self.progress, self.record = hooks
        self.coefficients = coefficients
        self.objective = Objective.of(settings)
        self.algorithm = find(self.objective)
        self.device, self.mesh = choose(settings.compute.dtype), over_devices(settings.compute.mesh)
        empty = np.zeros(data.mask_NT.shape, np.float32)
        valid_NT = (data.mask_NT & data.valid_N[:, None]).astype(np.float32)
        totals = np.where(data.valid_N, data.totals_N, 0.0).astype(np.float32)
        self.scored = Scored(totals, data.groups_N, data.valid_N, valid_NT, empty, data.greedy_N)
        self.keep = (self.algorithm.keep or informative)(self.scored)
        if settings.truncated == "mask":
            self.keep = self.keep & ~data.truncated_N
        self.steps = data.steps(self.keep, settings.prompts_per_step)
        self.columns: dict[str, np.ndarray] = {"mu_CT": data.mu_NT}
        self.done = self.total_work = 0
        self.seconds: dict[str, float] = defaultdict(float)

    def pack(self, passes: int) -> None:
        """Lays the steps out in micro-batches; `passes` forward passes come before the updates."""
        groups = [g for step in self.steps for g in step]
        whole = max(g.size for g in groups) if self.algorithm.paired else 0
        budget = self.settings.compute.tokens_per_micro_batch or self.device.row_tokens_per_step
        layout = choose_rows(self.steps, budget, whole)
        options = {"layout": layout, "completion_tokens": self.data.mu_NT.shape[1], "shards": row_shards(self.mesh)}
        self.packed = [micro_batches(step, **options) for step in self.steps]
        self.flat = [p for step in self.packed for p in step]
        self.total_work = len(self.flat) * (passes + self.settings.epochs)

    def forward(self, program: Any, weights: Any, name: str) -> list[np.ndarray]:
        """Each micro-batch through a program."""
        started, found = time.monotonic(), []
        for batch in self.flat:
            found.append(np.asarray(program(weights, put_batch(batch.arrays(), self.mesh))))
            self._ticked(1)
        self.seconds[name] += time.monotonic() - started
        return found

    def collect(self, found: Sequence[np.ndarray]) -> np.ndarray:
        """[C, ...] arrays of the micro-batches as one [N, ...] array of the round."""
        out = np.zeros((len(self.keep), *found[0].shape[1:]), np.float32)
        for batch, values_CT in zip(self.flat, found, strict=True):
            filled = batch.ids_C >= 0
            out[batch.ids_C[filled]] = values_CT[filled]
        return out

    def _ticked(self, count: int) -> None:
        self.done += count
        self.progress(self.done, self.total_work, "micro-batch")

    def penalise(self) -> None:
        """The KL to the reference inside the reward (R8), from pi_old."""
        o = self.objective
        if o.kl_in_reward > 0:
            old, ref, mask = (
                jnp.asarray(x) for x in (self.columns["old_CT"], self.columns["ref_CT"], self.scored.mask_NT)
            )
            limit = None if o.kl_clamp is None else (-o.kl_clamp, o.kl_clamp)
            weight = o.kl_in_reward * self.coefficients.kl_scale
            penalty = kl_penalty(old, ref, mask, coef=weight, kind=o.kl_in_reward_kind, value_clamp=limit)
            self.scored = dataclasses.replace(self.scored, penalty_NT=np.asarray(penalty))

    def check_mismatch(self, kl: float) -> None:
        limit = self.settings.max_mismatch_kl
        if kl > limit:
            raise Mismatch(
                f"sampler and trainer disagree: mismatch KL {kl:.4f} is above max_mismatch_kl {limit}; compare dtypes "
                "(those of rl.rollout.engine too), lower the staleness of the rollouts, or raise the limit knowingly"
            )

    def arrays(self, groups: list[Group], batches: list[Packed]) -> list[dict[str, Any]]:
        """What a step is given: tokens, counts of the whole step, and the round's columns."""
        scalars = {
            "kl_scale": np.float32(self.coefficients.kl_scale),
            "entropy_coef": np.float32(self.coefficients.entropy_coef),
        }
        return [
            a | scalars | {k: b.gather(v) for k, v in self.columns.items()}
            for a, b in zip(self.counted(groups, batches), batches, strict=True)
        ]

    def train(self, policy: Trainee, critic: Trainee | None) -> dict[str, Any]:
        """All optimizer steps of the round; the metrics of policy and critic."""
        sums, value_sums, norms, tokens = Counter[str](), Counter[str](), [], 0
        started, meter = time.monotonic(), Meter(self.device.compute.dtype)
        trained = [(policy, True), *([] if critic is None else [(critic, False)])]
        for epoch in range(self.settings.epochs):
            for number, (groups, batches) in enumerate(zip(self.steps, self.packed, strict=True)):
                arrays = self.arrays(groups, batches)
                found = policy.train(arrays)
                norms.append(found.pop("grad_norm"))
                sums.update(found)
                if critic is not None:
                    value_sums.update(critic.train(arrays))
                size = sum(g.size for g in groups)
                tokens += size
                self._ticked(len(batches))
                flops = sum(
                    (FULL if t.base is None else ADAPTER) * forward_flops(self.model, groups, head=head)
                    for t, head in trained
                )
                speed = meter.step(size, flops)
                self.record(epoch=epoch, step=number, grad_norm=norms[-1], **summarise(found), **speed)
        self.seconds["train"] += time.monotonic() - started
        metrics = (
            summarise(sums)
            | meter.whole()
            | {
                "loss": sums["loss"] / len(norms),
                "grad_norm": float(np.mean(norms)),
                "steps": len(norms),
                "skipped": sums["skipped"],
                "row_tokens": tokens,
            }
        )
        if critic is not None:
            mask = (self.scored.mask_NT > 0) & self.keep[:, None]
            n = max(value_sums["n_tokens"], 1.0)
            spread = float(np.var(self.columns["returns_CT"][mask]))
            metrics["value_loss"] = value_sums["loss"] / len(norms)
            metrics["value_clipped"] = value_sums["value_clipped"] / n
            metrics["value_explained"] = 1.0 - value_sums["value_error_sq"] / n / max(spread, 1e-12)
        return metrics

    def judge(self, critic: Trainee, settings: ppo.Critic, lam: float | None = None) -> None:
        """Advantages and returns by the critic as it is now."""
        found = self.collect(self.forward(_values(self.model, self.device.compute), critic.whole, "values"))
        judged = ppo.Judged(found[:, :-1], found[:, -1], self.data.truncated_N)
        advantages, returns = ppo.token_advantages(self.scored, judged, settings, lam)
        self.columns |= {"old_values_CT": found[:, :-1], "returns_CT": returns, "advantages_CT": advantages}

    def pretrain(self, critic: Trainee, settings: ppo.Critic) -> float:
        """The critic alone, towards Monte-Carlo returns (VC-PPO, arXiv:2503.01491); its last mean loss."""
        losses: list[float] = []
        for _ in range(settings.pretrain_epochs):
            self.judge(critic, settings, lam=1.0)
            losses = [critic.train(self.arrays(g, b))["loss"] for g, b in zip(self.steps, self.packed, strict=True)]
        return float(np.mean(losses))


def run_round(
    data: RoundData,
    *,
    settings: Any,
    model: DecoderConfig,
    optimizers: tuple[Any, Any],
    trainer: tuple[Any, Any, Any, Any],
    bases: tuple[Base | None, Base | None] = (None, None),
    reference: Any,
    counted: Callable[[list[Any], list[Any]], list[dict[str, Any]]],
    progress: Callable[..., None],
    record: Callable[..., None],
    coefficients: Coefficients | None = None,
) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Updates (params, opt_state, critic, critic_opt), which are donated; returns them and the round's metrics.

    `settings` has the fields of the update stage's config. Where policy or critic have a base, their parameters are
    the trainable tree over it. Raises Mismatch past `settings.max_mismatch_kl`.
    """
    coefficients = coefficients or Coefficients(entropy_coef=settings.entropy_coef)
    r = _Round(data, settings, model, (counted, progress, record), coefficients)
    critic_settings = ppo.Critic.of(settings.critic)
    policy = Trainee(trainer[0], trainer[1], optimizers[0], settings.optimizer, bases[0])
    critic = None
    if trainer[2] is not None:
        critic = Trainee(trainer[2], trainer[3], optimizers[1], settings.critic.optimizer, bases[1])
    metrics: dict[str, Any] = {
        "kept": float(r.keep.mean()),
        "completions": len(data.completions),
        "groups": len(set(data.groups_N.tolist())),
        "pass_histogram": pass_histogram(data.totals_N, data.groups_N, data.valid_N),
        **({"kl_scale": coefficients.kl_scale} if settings.kl_target is not None else {}),
        **({"entropy_coef": coefficients.entropy_coef} if r.objective.entropy_target is not None else {}),
    }
    if not r.steps:
        return *trainer, metrics | {"steps": 0}
    policy.placed(r.mesh)
    compute = r.device.compute
    pretrains = critic is not None and settings.round == 0 and critic_settings.pretrain_epochs > 0
    needs_old = len(r.steps) * settings.epochs > 1 or critic is not None or r.objective.kl_in_reward > 0
    values_passes = int(critic is not None) + (critic_settings.pretrain_epochs if pretrains else 0)
    r.pack(int(needs_old) + int(reference is not None) + values_passes)
    forward = _logps(model, settings.temperature, compute)
    if needs_old:
        old = r.columns["old_CT"] = r.collect(r.forward(forward, policy.whole, "old"))
        mask = data.mask_NT & r.keep[:, None]
        log_rho = np.where(mask, old - data.mu_NT, 0.0)
        r.check_mismatch(float((np.expm1(log_rho) - log_rho).sum() / mask.sum()))
    if reference is not None:
        r.columns["ref_CT"] = r.collect(r.forward(forward, put_params(reference, r.mesh), "reference"))
    r.penalise()
    if critic is not None:
        critic.placed(r.mesh)
        critic.compiled(
            ("critic", model, critic_settings, compute),
            lambda: ppo.critic_loss(scalar_graph(model), critic_settings, compute),
            r.mesh,
        )
        if pretrains:
            metrics["value_pretrain_loss"] = r.pretrain(critic, critic_settings)
        r.judge(critic, critic_settings)
    else:
        found = np.asarray(r.algorithm.advantages(r.scored), np.float32)
        of_tokens = found if found.ndim == 2 else found[:, None]
        r.columns["advantages_CT"] = np.where(r.scored.mask_NT > 0, of_tokens, 0.0).astype(np.float32)
    policy.compiled(
        ("policy", model, r.objective, compute),
        lambda: policy_loss(decoder_graph(model), r.algorithm, r.objective, compute),
        r.mesh,
    )
    metrics |= r.train(policy, critic)
    r.check_mismatch(metrics["mismatch_kl"] if settings.epochs * len(r.steps) == 1 else 0.0)
    mask = (r.scored.mask_NT > 0) & r.keep[:, None]
    metrics["advantage_spread"] = float(r.columns["advantages_CT"][mask].std())
    metrics |= {f"seconds_{name}": round(s, 3) for name, s in r.seconds.items()}
    done = (policy.params, policy.opt_state, *((critic.params, critic.opt_state) if critic else trainer[2:]))
    return *done, {k: _plain(v) for k, v in metrics.items()}


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, np.floating | jax.Array) else value
