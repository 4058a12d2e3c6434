"""One round of RL on scored rollouts: advantages, then optimizer steps over packed groups.

    forward passes    log pi_old, log pi_ref and values of every completion, where the settings need them
    advantages        of the algorithm, or of the critic (PPO)
    steps             epochs x steps of `prompts_per_step` prompts, each with all its completions

The algorithm is found by name (`tuning.algorithms.algorithm`); nothing here depends on which one it is, but that PPO
brings a critic. Axes: N completions of the round, C completions of a micro-batch, T completion tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tuning.algorithms import ppo, selection
from tuning.algorithms.algorithm import find
from tuning.algorithms.diagnostics import Coefficients, pass_histogram, plain, summarise
from tuning.algorithms.learner import Learner, critic_step, policy_step
from tuning.algorithms.round_data import RoundData
from tuning.algorithms.settings import RoundSettings
from tuning.device import Compute, choose
from tuning.losses.rewards import kl_penalty
from tuning.mesh import over_devices, put_batch, put_params, row_shards, under
from tuning.models.config import DecoderConfig
from tuning.models.decoder import decoder_graph, scalar_graph
from tuning.precision import real
from tuning.training.batch import Group, Packed, choose_rows, micro_batches
from tuning.training.forward import logps_and_entropy, values_and_last
from tuning.training.speed import ADAPTER, FULL, Meter, forward_flops
from tuning.training.step import counted

Forward = Callable[[Any, dict[str, Any]], jax.Array]
"""A compiled (parameters, batch) -> an array whose first axis is C."""


class Mismatch(RuntimeError):
    """Sampler and trainer disagree by more than the settings allow."""


@dataclasses.dataclass(frozen=True)
class RoundResult:
    """The learners after a round, for the next one, and its metrics."""

    policy: Learner
    critic: Learner | None
    coefficients: Coefficients
    """Of the next round."""
    metrics: dict[str, Any]
    """JSON values by name; `steps` is 0 where no completion carried a signal."""
    trained_N: np.ndarray
    """Completions in the loss, [N] bool."""
    signal_N: np.ndarray
    """Completions with an advantage, [N] bool."""
    advantages_N: np.ndarray
    """The advantage that all tokens of a completion share, [N]; NaN where tokens differ or nothing is trained."""
    filtered_N: np.ndarray
    """Completions of groups that `keep_most_varied` left out, [N] bool."""


def run_round(
    data: RoundData,
    settings: RoundSettings,
    model: DecoderConfig,
    policy: Learner,
    critic: Learner | None = None,
    *,
    reference: Any = None,
    coefficients: Coefficients | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, unit: None,
    record: Callable[..., None] = lambda **values: None,
) -> RoundResult:
    """Trains policy and critic, whose arrays are donated, on the rollouts of a round.

    reference: dense parameters, where `settings.needs_reference`. coefficients: those of the round before; None in the
    first. progress: called with (micro-batches done, all, unit). record: called with the metrics of each step by name.
    Raises Mismatch past `settings.max_mismatch_kl`.
    """
    coefficients = coefficients or Coefficients(entropy_coef=settings.entropy_coef)
    under_way = _Round(data, settings, model, policy, critic, coefficients, progress, record)
    of_steps = under_way.run(reference) if under_way.steps else {"steps": 0}
    metrics = {k: plain(v) for k, v in (under_way.overview() | of_steps).items()}
    return RoundResult(
        policy,
        critic,
        coefficients.next(settings.objective, settings, metrics),
        metrics,
        # Without a step nothing was trained, whatever was to be.
        under_way.keep_N & bool(metrics["steps"]),
        under_way.signal_N,
        under_way.advantages_N(),
        under_way.filtered_N,
    )


@dataclasses.dataclass
class _Round:
    """A round in progress. The methods run in the order of `run`.

    Arrays of the round are in table order, [N, T]; a micro-batch has some of the rows, in its own order:

        completions of the round   0 1 2 3 4 5
        ids_C of two micro-batches 0 1 4 -1 | 2 3 5 -1      -1: an empty slot
        `arrays` gathers rows by these numbers, `collect` puts a forward pass's results back
    """

    data: RoundData
    settings: RoundSettings
    model: DecoderConfig
    policy: Learner
    critic: Learner | None
    coefficients: Coefficients
    progress: Callable[[int, int, str], None]
    record: Callable[..., None]

    def __post_init__(self) -> None:
        data, settings = self.data, self.settings
        self.objective = settings.objective
        self.algorithm = find(self.objective)
        compute = settings.compute
        self.device, self.mesh = choose(compute.dtype, compute.remat), over_devices(compute.mesh)
        self.scored, self.filtered_N = selection.scored(data, settings), selection.filtered(data, settings)
        self.keep_N = selection.candidates(data, self.scored, self.algorithm, settings)
        self.steps = data.steps(self.keep_N, settings.prompts_per_step)
        # Arrays [N, T] by name; a micro-batch has its rows of each as `NAME_CT`.
        self.columns_NT: dict[str, np.ndarray] = {"mu": data.mu_NT}
        self.done = self.total_work = 0
        self.seconds: dict[str, float] = defaultdict(float)

    @property
    def signal_N(self) -> np.ndarray:
        """Completions with an advantage, [N] bool."""
        return selection.with_signal(self.scored, self.algorithm)

    @property
    def trained_NT(self) -> np.ndarray:
        """Tokens that take part in the loss, [N, T] bool."""
        return (self.scored.mask_NT > 0) & self.keep_N[:, None]

    def overview(self) -> dict[str, Any]:
        """Metrics of the data, and of what was trained on."""
        data, coefficients = self.data, self.coefficients
        metrics: dict[str, Any] = {
            "kept": float(self.keep_N.mean()),
            "tied": len(set(data.groups_N[~self.filtered_N].tolist()) - set(data.groups_N[self.signal_N].tolist())),
            "completions": len(data.completions),
            "groups": len(set(data.groups_N[~self.filtered_N].tolist())),
            "informative": selection.informative_count(data, self.scored, self.algorithm, self.settings),
            "pass_histogram": pass_histogram(data.totals_N, data.groups_N, data.valid_N),
        }
        if self.filtered_N.any():
            metrics["filtered"] = len(set(data.groups_N[self.filtered_N].tolist()))
        if self.settings.kl_target is not None:
            metrics["kl_scale"] = coefficients.kl_scale
        if self.objective.entropy_target is not None:
            metrics["entropy_coef"] = coefficients.entropy_coef
        return metrics

    def run(self, reference: Any) -> dict[str, Any]:
        """All of the round; the metrics of its steps."""
        settings, critic, compute = self.settings, self.critic, self.device.compute
        pretrain_epochs = settings.critic.pretrain_epochs if critic is not None and settings.round == 0 else 0
        single_update = len(self.steps) * settings.epochs == 1
        # With a single update pi_old is pi: its gradient-free copy in the loss saves the pass (R4).
        needs_old = not single_update or critic is not None or self.objective.kl_in_reward > 0
        values_passes = int(critic is not None) + pretrain_epochs
        self.policy.put(settings.optimizer, self.mesh)
        # Old and reference log-probabilities, and values: passes that the progress counts before the updates.
        self.pack(int(needs_old) + int(reference is not None) + values_passes)

        logps = _logps(self.model, settings.temperature, compute)
        if needs_old:
            self.columns_NT["old"] = self.collect(self.forward(logps, self.policy.weights, "old"))
        if reference is not None:
            # Dense, and read in one forward pass: the loss gets its log-probabilities, not its weights.
            frozen = put_params(reference, self.mesh)
            self.columns_NT["ref"] = self.collect(self.forward(logps, frozen, "reference"))
        self.penalise()
        if not self.steps:
            return {"steps": 0}
        if needs_old:
            self.check_mismatch(self.mismatch_kl())
        metrics = {} if critic is None else self.prepare_critic(critic, pretrain_epochs)
        if critic is None:
            self.columns_NT["advantages"] = self.advantages_NT()

        metrics |= self.train()
        # With old log-probabilities the mismatch was checked before any step.
        self.check_mismatch(0.0 if needs_old else metrics.get("mismatch_kl", 0.0))
        advantages = self.columns_NT["advantages"][self.trained_NT]
        # Completions without a token have no advantage.
        metrics["advantage_spread"] = float(advantages.std()) if advantages.size else 0.0
        return metrics | {f"seconds_{name}": round(s, 3) for name, s in self.seconds.items()}

    def pack(self, passes: int) -> None:
        """Lays the steps out in micro-batches; `passes` forward passes come before the updates."""
        groups = [g for step in self.steps for g in step]
        # A pair must be in one micro-batch: rows hold the largest group, so none is split.
        largest_pair = max(g.size for g in groups) if self.algorithm.paired else 0
        width, shards = self.data.mu_NT.shape[1], row_shards(self.mesh)
        budget = self.settings.compute.tokens_per_micro_batch or self.device.row_tokens_per_step * shards
        layout = choose_rows(self.steps, budget, largest_pair, self.algorithm.paired)
        self.packed = [micro_batches(s, layout=layout, completion_tokens=width, shards=shards) for s in self.steps]
        self.flat = [p for step in self.packed for p in step]
        self.total_work = self.done + len(self.flat) * (passes + self.settings.epochs)

    def forward(self, program: Forward, weights: Any, name: str) -> list[np.ndarray]:
        """The output of a program for each micro-batch; its time counts under `name`."""
        started, outputs = time.monotonic(), []
        for batch in self.flat:
            with under(self.mesh):
                outputs.append(np.asarray(program(weights, put_batch(batch.arrays(), self.mesh))))
            self._ticked(1)
        self.seconds[name] += time.monotonic() - started
        return outputs

    def collect(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """[C, ...] arrays of the micro-batches as one [N, ...] array of the round."""
        out = np.zeros((len(self.keep_N), *outputs[0].shape[1:]), real())
        for batch, values_CT in zip(self.flat, outputs, strict=True):
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
            columns = (self.columns_NT["old"], self.columns_NT["ref"], self.data.mask_NT)
            old, ref, mask = (jnp.asarray(x) for x in columns)
            limit = None if o.kl_clamp is None else (-o.kl_clamp, o.kl_clamp)
            weight = o.kl_in_reward * self.coefficients.kl_scale
            penalty = kl_penalty(old, ref, mask, coef=weight, kind=o.kl_in_reward_kind, value_clamp=limit)
            self.scored = dataclasses.replace(self.scored, penalty_NT=np.asarray(penalty))
            self.select()

    def select(self) -> None:
        """Leaves out what has no place in the loss now that rewards are whole, and packs the rest anew."""
        keep_N = selection.trained(self.data, self.scored, self.algorithm, self.settings)
        if (keep_N != self.keep_N).any():
            self.keep_N = keep_N
            self.steps = self.data.steps(keep_N, self.settings.prompts_per_step)
            if self.steps:
                self.pack(0)

    def mismatch_kl(self) -> float:
        """Mean k3 estimate of KL(mu || pi_old) over the tokens that are trained; 0 without any."""
        mask = self.data.mask_NT & self.keep_N[:, None]
        # k3 = exp(x) - 1 - x; expm1 keeps it exact near 0, where a healthy mismatch is.
        log_rho = np.where(mask, self.columns_NT["old"] - self.data.mu_NT, 0.0)
        return float((np.expm1(log_rho) - log_rho).sum() / max(mask.sum(), 1))

    def check_mismatch(self, kl: float) -> None:
        """Raises Mismatch where `kl` exceeds the limit of the settings, or is no number."""
        limit = self.settings.max_mismatch_kl
        if not kl <= limit:
            raise Mismatch(
                f"sampler and trainer disagree: mismatch KL {kl:.4f} is above max_mismatch_kl {limit}; compare dtypes "
                "(those of rl.rollout.engine too), lower the staleness of the rollouts, or raise the limit knowingly"
            )

    def advantages_NT(self) -> np.ndarray:
        """The algorithm's advantages on every token, 0 where masked."""
        # Of a completion, [N], or of each token, [N, T].
        advantages = np.asarray(self.algorithm.advantages(self.scored), real())
        of_tokens = advantages if advantages.ndim == 2 else advantages[:, None]
        # The advantages of a tied group are rounding where they are not 0.
        counts_NT = (self.scored.mask_NT > 0) & self.signal_N[:, None]
        return np.where(counts_NT, of_tokens, 0.0).astype(real())

    def advantages_N(self) -> np.ndarray:
        """The advantage that the trained tokens of each completion share, [N]; NaN without one."""
        if "advantages" not in self.columns_NT:
            return np.full(len(self.keep_N), np.nan)
        trained_NT = self.trained_NT
        low = np.where(trained_NT, self.columns_NT["advantages"], np.inf).min(axis=1)
        high = np.where(trained_NT, self.columns_NT["advantages"], -np.inf).max(axis=1)
        return np.where(low == high, low, np.nan)

    def prepare_critic(self, critic: Learner, pretrain_epochs: int) -> dict[str, Any]:
        """Trains the critic alone where the settings ask for it, then takes advantages and returns from it."""
        critic.put(self.settings.critic.optimizer, self.mesh)
        metrics = {}
        if pretrain_epochs:
            metrics["value_pretrain_loss"] = self.pretrain(critic, pretrain_epochs)
        self.judge(critic)
        return metrics

    def pretrain(self, critic: Learner, epochs: int) -> float:
        """The critic alone, towards Monte-Carlo returns (VC-PPO, arXiv:2503.01491); its last mean loss."""
        step = critic_step(self.model, self.settings.critic, self.device.compute, critic.graph, self.mesh)
        losses: list[float] = []
        for _ in range(epochs):
            # Again in each epoch: the clipped value loss needs the values that the critic has now.
            self.judge(critic, lam=1.0)
            arrays = (self.arrays(g, b) for g, b in zip(self.steps, self.packed, strict=True))
            losses = [critic.train(step, a)["loss"] for a in arrays]
        return float(np.mean(losses))

    def judge(self, critic: Learner, lam: float | None = None) -> None:
        """Advantages and returns by the critic as it is now; `lam` in place of the settings' own."""
        program = _values(self.model, self.device.compute)
        values = self.collect(self.forward(program, critic.weights, "values"))
        judged = ppo.Judged(values[:, :-1], values[:, -1], self.data.truncated_N)
        advantages, returns = ppo.token_advantages(self.scored, judged, self.settings.critic, lam)
        self.columns_NT |= {"old_values": values[:, :-1], "returns": returns, "advantages": advantages}

    def arrays(self, groups: list[Group], batches: list[Packed]) -> list[dict[str, Any]]:
        """The micro-batches of a step: tokens, counts of the whole step, coefficients, and the round's columns."""
        scalars = {
            # Arrays of the batch, not constants of the program: a new value compiles nothing.
            "kl_scale": real().type(self.coefficients.kl_scale),
            "entropy_coef": real().type(self.coefficients.entropy_coef),
        }
        return [
            arrays | scalars | {f"{name}_CT": batch.gather(x_NT) for name, x_NT in self.columns_NT.items()}
            for arrays, batch in zip(counted(groups, batches), batches, strict=True)
        ]

    def train(self) -> dict[str, Any]:
        """All optimizer steps of the round; the metrics of policy and critic."""
        settings, critic, compute = self.settings, self.critic, self.device.compute
        step = policy_step(self.model, self.objective, settings.optimizer, compute, self.policy.graph, self.mesh)
        sums, value_sums, norms, tokens, skipped = Counter[str](), Counter[str](), list[float](), 0, 0
        value_steps = 0
        started, meter = time.monotonic(), Meter(compute.dtype)
        for epoch in range(settings.epochs):
            for number, (groups, batches) in enumerate(zip(self.steps, self.packed, strict=True)):
                arrays = self.arrays(groups, batches)
                step_sums = self.policy.train(step, arrays)
                # A norm is not a sum: kept apart from what is added over steps.
                norm, skip = step_sums.pop("grad_norm"), step_sums.pop("skipped")
                skipped += int(skip)
                if not skip:
                    # A step that was skipped trained nothing, and its sums need not be finite (R24).
                    norms.append(norm)
                    sums.update(step_sums)
                if critic is not None:
                    # After the policy, on the same arrays: advantages are from before either moved.
                    value_step = critic_step(self.model, settings.critic, compute, critic.graph, self.mesh)
                    of_critic = critic.train(value_step, arrays)
                    if not of_critic["skipped"]:
                        value_sums.update(of_critic)
                        value_steps += 1
                size = sum(g.size for g in groups)
                tokens += size
                self._ticked(len(batches))
                speed = meter.step(size, self.flops(groups))
                self.record(epoch=epoch, step=number, grad_norm=norm, **summarise(step_sums), **speed)
        self.seconds["train"] += time.monotonic() - started
        metrics = meter.whole() | {"steps": len(norms) + skipped, "skipped": skipped, "row_tokens": tokens}
        if norms:
            metrics |= summarise(sums) | {"loss": sums["loss"] / len(norms), "grad_norm": float(np.mean(norms))}
            # Of all epochs: for audits, which count what may be trained on in the tables.
            metrics |= {"trained_tokens": round(sums["old_n_tokens"])} if "old_n_tokens" in sums else {}
        return metrics | self.value_metrics(value_sums, value_steps) if value_steps else metrics

    def flops(self, groups: Sequence[Group]) -> float:
        """FLOPs of one optimizer step of all learners."""
        # A critic has no LM head.
        learners = [(self.policy, True)] + ([] if self.critic is None else [(self.critic, False)])
        return sum(
            (FULL if learner.base is None else ADAPTER) * forward_flops(self.model, groups, head=head)
            for learner, head in learners
        )

    def value_metrics(self, sums: Mapping[str, float], steps: int) -> dict[str, float]:
        """Metrics of the critic from the sums of its steps."""
        n = max(sums["n_tokens"], 1.0)
        spread = float(np.var(self.columns_NT["returns"][self.trained_NT]))
        return {
            "value_loss": sums["loss"] / steps,
            "value_clipped": sums["value_clipped"] / n,
            # All returns of a round may be equal.
            "value_explained": 1.0 - sums["value_error_sq"] / n / max(spread, 1e-12),
        }


# Kept between rounds: a new function would be compiled again.
@functools.lru_cache(maxsize=8)
def _logps(model: DecoderConfig, temperature: float, compute: Compute) -> Forward:
    graph = decoder_graph(model)
    return jax.jit(lambda params, batch: logps_and_entropy(graph, params, batch, temperature, compute)[0])


@functools.lru_cache(maxsize=8)
def _values(model: DecoderConfig, compute: Compute) -> Forward:
    graph = scalar_graph(model)
    return jax.jit(lambda params, batch: values_and_last(graph, params, batch, compute))
