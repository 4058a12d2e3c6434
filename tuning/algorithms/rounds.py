"""One round of RL on scored rollouts: advantages, then optimizer steps over packed groups.

    forward passes    log pi_old, log pi_ref and values of every completion, where the settings need them
    advantages        of the algorithm, or of the critic (PPO)
    steps             epochs x steps of `prompts_per_step` prompts, each with all its completions

The algorithm is found by name (`rlhf.tuning.algorithms.algorithm`); nothing here depends on which one it is, but that
PPO brings a critic. While the device computes one optimizer step, a thread packs the next one's rows.

Axes: N completions of the round, C completions of a micro-batch, T completion tokens.

`Tally` has sums over the optimizer steps of a round, and the metrics that follow from them (R19).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms import ppo
from rlhf.tuning.algorithms.diagnostics import Coefficients, mismatch_means, plain, summarise
from rlhf.tuning.algorithms.flat import Column
from rlhf.tuning.algorithms.learner import Learner, critic_step, policy_step, step_flops
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.selection import Selection
from rlhf.tuning.algorithms.settings import Objective, RoundSettings
from rlhf.tuning.compile_target import few_shapes
from rlhf.tuning.device import choose
from rlhf.tuning.losses.rewards import kl_penalty
from rlhf.tuning.mesh import over_devices, put_params, row_shards
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.precision import real
from rlhf.tuning.training.batch import Bounds, Group, Packed, choose_rows, count_micro_batches, micro_batches
from rlhf.tuning.training.completions import logps_program, run_pass, values_program
from rlhf.tuning.training.prefetch import one_ahead, one_behind
from rlhf.tuning.training.speed import Meter
from rlhf.tuning.training.step import StepFn, Sums, counted


@dataclasses.dataclass
class Tally:
    """Sums over the steps of policy and critic. A step that was skipped trained nothing, and its sums need not be
    finite (R24)."""

    by_sampler: bool = False
    """Whether log pi_old is the sampler's: then only steps before the policy's first move measure the gap between
    sampler and trainer (`mismatch_kl`); later steps measure the policy's drift from the sampler (`drift_kl`)."""
    sums: Counter[str] = dataclasses.field(default_factory=Counter)
    apart: Counter[str] = dataclasses.field(default_factory=Counter)
    """The same, of steps that measure the gap between sampler and trainer."""
    drifts: list[float] = dataclasses.field(default_factory=list)
    """`drift_kl` of each step that measures it."""
    norms: list[float] = dataclasses.field(default_factory=list)
    """Of the gradients of each step that was not skipped."""
    skipped: int = 0
    trained: float = 0.0
    """Tokens in the loss."""
    tokens: int = 0
    """Tokens in rows, padding not counted."""
    value_sums: Counter[str] = dataclasses.field(default_factory=Counter)
    value_steps: int = 0

    def add(self, step: Sums, unpacked: int = 0) -> dict[str, float]:
        """Adds a step of the policy; its own metrics. unpacked: tokens of the loss that were in no micro-batch."""
        # A norm is not a sum: kept apart from what is added over steps.
        norm, skip = step.pop("grad_norm"), step.pop("skipped")
        apart = mismatch_means(step)
        if self.by_sampler and self.norms:
            apart = {"drift_kl": apart["mismatch_kl"]} if apart else {}
            self.drifts += apart.values()
        elif not skip:
            self.apart.update(step)
        self.skipped += int(skip)
        if not skip:
            self.norms.append(norm)
            self.sums.update(step)
            self.trained += step["old_n_tokens"] + unpacked
        return {"grad_norm": norm} | summarise(step) | apart

    def add_value(self, step: Sums) -> None:
        """Adds a step of the critic."""
        if not step["skipped"]:
            self.value_sums.update(step)
            self.value_steps += 1

    def metrics(self) -> dict[str, Any]:
        """Of the policy over the round."""
        metrics: dict[str, Any] = {"steps": len(self.norms) + self.skipped, "skipped": self.skipped}
        metrics["row_tokens"] = self.tokens
        if self.drifts:
            metrics["drift_kl"] = max(self.drifts)
        if self.norms:
            metrics |= summarise(self.sums) | mismatch_means(self.apart)
            metrics |= {"loss": self.sums["loss"] / len(self.norms), "grad_norm": float(np.mean(self.norms))}
            # Of all epochs: for audits, which count what may be trained on in the tables.
            metrics["trained_tokens"] = round(self.trained)
        return metrics

    def value_metrics(self, returns: np.ndarray) -> dict[str, float]:
        """Of the critic; none where it made no step. returns: of the tokens that were trained."""
        if not self.value_steps:
            return {}
        n = max(self.value_sums["n_tokens"], 1.0)
        return {
            "value_loss": self.value_sums["loss"] / self.value_steps,
            "value_clipped": self.value_sums["value_clipped"] / n,
            # All returns of a round may be equal.
            "value_explained": 1.0 - self.value_sums["value_error_sq"] / n / max(float(np.var(returns)), 1e-12),
        }


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
    coefficients = coefficients or Coefficients.start(settings.objective)
    round_ = _Round(data, settings, model, policy, critic, coefficients, progress, record)
    of_steps = round_.run(reference) if round_.steps else {"steps": 0}
    adapted = coefficients.adapted(settings)
    metrics = {k: plain(v) for k, v in (round_.selection.overview(round_.keep_N) | adapted | of_steps).items()}
    return RoundResult(
        policy,
        critic,
        coefficients.next(settings, metrics),
        metrics,
        # Without a step nothing was trained, whatever was to be.
        round_.keep_N & bool(metrics["steps"]),
        round_.selection.signal_N,
        shared_N(round_.trained, round_.columns.get("advantages")),
        round_.selection.filtered_N,
    )


@dataclasses.dataclass
class _Round:
    """A round in progress. The methods run in the order of `run`.

    Numbers of tokens are kept in table order without padding (`rlhf.tuning.algorithms.flat`); a micro-batch has some of
    the rows as [C, T], in its own order:

        completions of the round   0 1 2 3 4 5
        ids_C of two micro-batches 0 1 4 -1 | 2 3 5 -1      -1: an empty slot
        `arrays` gathers rows by these numbers, `forward` puts a pass's results back

    Steps are packed when a pass comes to them, and again in the next pass: all at once would be many times the round.
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
        self.selection = Selection.of(data, settings)
        self.algorithm = self.selection.algorithm
        compute = settings.compute
        self.device, self.mesh = choose(compute.dtype, compute.remat), over_devices(compute.mesh)
        self.keep_N = self.selection.candidates()
        self.division = self.selection.divided(self.keep_N)
        self.lengths_N, self.width = data.lengths_N, data.width
        self.in_loss = self.selection.scored.mask
        # By name; a micro-batch has its rows of each as `NAME_CT`.
        self.columns: dict[str, Column] = dict.fromkeys(["mu", "old"] if self.by_sampler else ["mu"], data.sampler)
        self.done = self.total_work = 0
        self.seconds: dict[str, float] = defaultdict(float)
        # Before anything compiles next to it: it may measure the processor.
        self.meter = Meter(self.device.compute.dtype)

    @property
    def steps(self) -> list[list[Group]]:
        """The groups of each optimizer step."""
        return self.division.groups

    @property
    def by_sampler(self) -> bool:
        """Whether log pi_old comes from the rollouts."""
        return self.objective.old_logps == "sampler"

    @property
    def policy_step(self) -> StepFn:
        """The policy's optimizer step."""
        optimizer, compute = self.settings.optimizer, self.device.compute
        return policy_step(self.model, self.objective, optimizer, compute, self.policy.graph, self.mesh)

    @property
    def trained(self) -> Column:
        """Mask of the tokens that take part in the loss."""
        return self.in_loss.only(self.keep_N)

    def run(self, reference: Any) -> dict[str, Any]:
        """All of the round; the metrics of its steps."""
        settings, critic = self.settings, self.critic
        pretrain_epochs = settings.critic.pretrain_epochs if critic is not None and settings.round == 0 else 0
        single_update = len(self.steps) * settings.epochs == 1
        # With a single update pi_old is pi: its gradient-free copy in the loss saves the pass (R4).
        needed = not single_update or critic is not None or self.algorithm.mark is not None
        needs_old = not self.by_sampler and (needed or self.objective.kl_in_reward > 0)
        passes = needs_old + (reference is not None) + (self.objective.top_entropy is not None)
        self.policy.put(settings.optimizer, self.mesh)
        # Passes that the progress counts before the updates.
        self.pack(passes + (critic is not None) + pretrain_epochs)
        metrics = self.passes(needs_old, reference, pretrain_epochs)
        if not self.steps:
            return {"steps": 0}
        metrics |= self.train()
        # With old log-probabilities the mismatch was checked before any step.
        check_mismatch(0.0 if needs_old else metrics.get("mismatch_kl", 0.0), settings.max_mismatch_kl)
        metrics["advantage_spread"] = spread(self.trained, self.columns["advantages"])
        return metrics | {f"seconds_{name}": round(s, 3) for name, s in self.seconds.items()}

    def pack(self, passes: int) -> None:
        """Lays the steps out in micro-batches; `passes` forward passes come before the updates."""
        groups = [g for step in self.steps for g in step]
        # A pair must be in one micro-batch: rows hold the largest group, so none is split.
        largest_pair = max(g.size for g in groups) if self.algorithm.paired else 0
        shards = row_shards(self.mesh)
        budget, undivided = self.device.micro_batch(
            self.settings.compute.tokens_per_micro_batch, shards, self.policy.base is not None
        )
        # With all completions of a prompt, whichever of them are in the loss.
        most = self.settings.prompts_per_step * int(np.bincount(self.data.groups_N).max())
        limits = self.settings.prompt_limit, self.settings.completion_limit
        bounds = Bounds(most, sum(limits) if limits[1] else 0) if few_shapes() else None
        layout = choose_rows(self.steps, budget, largest_pair, self.algorithm.paired, undivided, bounds)
        self.divided = bounds is not None and most > layout.rows
        self.pack_step = functools.partial(micro_batches, layout=layout, completion_tokens=self.width, shards=shards)
        count = sum(count_micro_batches(step, layout, shards) for step in self.steps)
        self.total_work = self.done + count * (passes + self.settings.epochs)

    def passes(self, needs_old: bool, reference: Any, pretrain_epochs: int) -> dict[str, Any]:
        """Compute the columns that the steps need, and the critic's metrics."""
        logps = logps_program(self.model, self.settings.temperature, self.device.compute)
        if needs_old:
            self.columns["old"] = self.forward(logps, self.policy.weights, "old")
        if reference is not None:
            # Dense, and read in one forward pass: the loss gets its log-probabilities, not its weights.
            frozen = put_params(reference, self.mesh)
            self.columns["ref"] = self.forward(logps, frozen, "reference")
        self.penalise()
        if not self.steps:
            return {}
        if needs_old:
            kl = mismatch_kl(self.data, self.division.packed_N, self.columns["old"])
            check_mismatch(kl, self.settings.max_mismatch_kl)
        metrics: dict[str, Any] = {}
        if (critic := self.critic) is None:
            self.ask_algorithm()
        else:
            critic.put(self.settings.critic.optimizer, self.mesh)
            if pretrain_epochs:
                metrics["value_pretrain_loss"] = self.pretrain(critic, pretrain_epochs)
            self.judge(critic)
        self.mark()
        return metrics

    def mark(self) -> None:
        """The tokens that the loss treats in another way, as columns."""
        if (share := self.objective.top_entropy) is not None:
            program = logps_program(self.model, self.settings.temperature, self.device.compute, 1)
            entropy = self.forward(program, self.policy.weights, "entropy")
            self.columns["top"] = marked(highest(share), [entropy], self.in_loss, self.steps)
        if self.algorithm.mark is not None:
            columns = [self.columns["advantages"], self.columns["old"]]
            self.columns["marked"] = marked(self.algorithm.mark, columns, self.in_loss, self.steps)

    def forward(self, program: Any, weights: Any, name: str, after_N: np.ndarray | None = None) -> Column:
        """The outputs [C, T] of a program as a column, 0 for completions in no step; its time counts under `name`.

        after_N: gets the last numbers of outputs [C, T + 1].
        """
        started = time.monotonic()
        column = Column.zeros(self.lengths_N, self.width, real())
        for ids_C, values_C in run_pass(
            functools.partial(program, weights), map(self.pack_step, self.steps), self.mesh
        ):
            column.put(ids_C, values_C)
            if after_N is not None:
                after_N[ids_C[ids_C >= 0]] = values_C[ids_C >= 0, -1]
            self._ticked(1)
        self.seconds[name] += time.monotonic() - started
        return column

    def _ticked(self, count: int) -> None:
        self.done += count
        self.progress(self.done, self.total_work, "micro-batch")

    def penalise(self) -> None:
        """Subtract the KL to the reference from the rewards (R8), then select the completions by these."""
        if self.objective.kl_in_reward > 0:
            scale = self.coefficients.kl_scale
            penalties = token_penalties(self.objective, scale, self.columns, self.data.sampled)
            self.selection.scored = dataclasses.replace(self.selection.scored, penalty=penalties)
            before_N = self.division.packed_N
            self.keep_N = self.selection.trained()
            self.division = self.selection.divided(self.keep_N)
            if self.steps and (before_N != self.division.packed_N).any():
                self.pack(0)

    def ask_algorithm(self) -> None:
        """The algorithm's advantages, of each completion or of each token."""
        found, signal_N = self.algorithm.advantages(self.selection.scored), self.selection.signal_N
        # Those of a tied group are rounding errors if they are not 0.
        if isinstance(found, Column) or found.ndim == 2:
            column = found if isinstance(found, Column) else Column.of(np.asarray(found, real()), self.lengths_N)
            column.clear(~signal_N)
        else:
            of_N = np.where(signal_N, np.asarray(found, real()), 0.0).astype(real())
            column = Column(lambda i: np.full(self.lengths_N[i], of_N[i]), len(of_N), self.width, of_N.dtype)
        self.columns["advantages"] = column

    def pretrain(self, critic: Learner, epochs: int) -> float:
        """The critic alone, towards Monte-Carlo returns (VC-PPO, arXiv:2503.01491); its last mean loss."""
        step = critic_step(self.model, self.settings.critic, self.device.compute, critic.graph, self.mesh)
        losses: list[float] = []
        for _ in range(epochs):
            # Again in each epoch: the clipped value loss needs the values that the critic has now.
            self.judge(critic, lam=1.0)
            ahead = one_ahead(map(self.arrays, range(len(self.steps))))
            losses = [critic.start_step(step, arrays, self.divided)()["loss"] for arrays in ahead]
        return float(np.mean(losses))

    def judge(self, critic: Learner, lam: float | None = None) -> None:
        """Advantages and returns by the critic as it is now; `lam` in place of the settings' own."""
        program = values_program(self.model, self.device.compute)
        after_N = np.zeros(len(self.keep_N), real())
        values = self.forward(program, critic.weights, "values", after_N)
        # A completion that ended has value 0 after its last token.
        after_N = np.where(self.data.unfinished_N, after_N, 0.0)
        advantages, returns = ppo.token_advantages(self.selection.scored, values, after_N, self.settings.critic, lam)
        advantages.clear(~self.selection.signal_N)
        self.columns |= {"old_values": values, "returns": returns, "advantages": advantages}

    def arrays(self, step: int) -> list[dict[str, Any]]:
        """The micro-batches of a step: tokens, counts of the whole step, coefficients, and the round's columns."""
        groups, scalars = self.steps[step], self.coefficients.scalars()
        batches = self.pack_step(groups)
        return [
            arrays | scalars | {f"{name}_CT": column for name, column in self.gathered(batch).items()}
            for arrays, batch in zip(counted(groups, batches, self.division.unpacked[step]), batches, strict=True)
        ]

    def gathered(self, batch: Packed) -> dict[str, np.ndarray]:
        """The rows of a micro-batch of each of the round's columns, [C, T]."""
        columns = {name: column.gather(batch.ids_C) for name, column in self.columns.items()}
        if self.critic is None:
            in_loss = self.in_loss.gather(batch.ids_C) > 0
            columns["advantages"] = np.where(in_loss, columns["advantages"], 0.0).astype(real())
        return columns

    def train(self) -> dict[str, Any]:
        """All optimizer steps of the round; the metrics of policy and critic."""
        settings, critic, compute = self.settings, self.critic, self.device.compute
        step, value_step = self.policy_step if self.selection.moves() else None, None
        if critic is not None:
            value_step = critic_step(self.model, settings.critic, compute, critic.graph, self.mesh)
        tally, started, meter = Tally(self.by_sampler), time.monotonic(), self.meter
        meter.skip()
        work = ((at, self.arrays(at[1])) for at in itertools.product(range(settings.epochs), range(len(self.steps))))

        def steps() -> Iterator[tuple[tuple[int, int], int, Callable[[], Sums] | None, Callable[[], Sums] | None]]:
            for at, arrays in one_ahead(work):
                sums = None if step is None else self.policy.start_step(step, arrays, self.divided)
                # After the policy, on the same arrays: advantages are from before either moved.
                value_sums = (
                    None
                    if critic is None or value_step is None
                    else critic.start_step(value_step, arrays, self.divided)
                )
                yield at, len(arrays), sums, value_sums

        for (epoch, number), batches, sums, value_sums in one_behind(steps()):
            unpacked, groups = self.division.unpacked[number].n_tokens, self.steps[number]
            of_policy = {} if sums is None else tally.add(sums(), unpacked)
            if self.by_sampler and epoch == 0:
                # Each token once, of skipped steps too.
                check_step(of_policy, settings.max_mismatch_kl)
            if value_sums is not None:
                tally.add_value(value_sums())
            size = sum(g.size for g in groups)
            tally.tokens += size
            self._ticked(batches)
            speed = meter.step(size, step_flops(self.model, groups, self.policy, critic))
            self.record(epoch=epoch, step=number, **of_policy, **speed)
        self.seconds["train"] += time.monotonic() - started
        for name in ("old", "ref", "old_values"):
            # No later step reads them.
            self.columns.pop(name, None)
        metrics = meter.whole() | tally.metrics()
        if critic is not None:
            metrics |= tally.value_metrics(np.concatenate(self.columns["returns"].where(self.trained)))
        return metrics


Mark = Callable[..., np.ndarray]
"""Numbers of all tokens of a step, [tokens] of each column -> 1 on those that are marked."""


def token_penalties(objective: Objective, scale: float, columns: Mapping[str, Column], sampled: Column) -> Column:
    """The KL to the reference that is subtracted from the reward of each token (R8), from pi_old, times `scale`."""
    penalties = Column.zeros(sampled.lengths_N, sampled.width, real())
    limit = None if objective.kl_clamp is None else (-objective.kl_clamp, objective.kl_clamp)
    weight, kind = objective.kl_in_reward * scale, objective.kl_in_reward_kind
    for rows in sampled.blocks():
        old, ref, mask = (jnp.asarray(column.gather(rows)) for column in (columns["old"], columns["ref"], sampled))
        penalties.put(rows, np.asarray(kl_penalty(old, ref, mask, coef=weight, kind=kind, value_clamp=limit)))
    return penalties


def marked(mark: Mark, columns: Sequence[Column], in_loss: Column, steps: Sequence[Sequence[Group]]) -> Column:
    """1 on the tokens of each step that `mark` chooses by these columns."""
    marks = Column.zeros(columns[-1].lengths_N, in_loss.width, real())
    for step in steps:
        mask = in_loss.only(np.isin(np.arange(in_loss.count), [i for group in step for i in group.ids]))
        marks.write(mask, mark(*(np.concatenate(column.where(mask)) for column in columns)))
    return marks


def highest(share: float) -> Mark:
    """Marks this share of the tokens: those with the highest numbers, as TRL's `top_entropy_quantile`."""
    return lambda numbers: numbers >= np.quantile(numbers, 1 - share) if len(numbers) else numbers


class Mismatch(RuntimeError):
    """Sampler and trainer disagree by more than the settings allow."""


def mismatch_kl(data: RoundData, keep_N: np.ndarray, old: Column) -> float:
    """Mean k3 estimate of KL(mu || pi_old) over the sampled tokens of these completions, [N] bool; 0 without any."""
    mask = data.sampled.only(keep_N)
    log_rho = np.concatenate(old.where(mask)) - np.concatenate(data.sampler.where(mask))
    # k3 = exp(x) - 1 - x; expm1 keeps it exact near 0, where a healthy mismatch is.
    return float((np.expm1(log_rho) - log_rho).sum(dtype=np.float64)) / max(len(log_rho), 1)


DRIFT = 10.0
"""Limit of how far a policy may have moved from its sampler within a round, in limits of a mismatch: single steps of a
policy with little entropy have moved by one, without harm; rollouts of other weights are further away."""


def check_step(of_policy: Mapping[str, float], limit: float) -> None:
    """Raise Mismatch if other weights sampled the rollouts of a step whose log pi_old is the sampler's."""
    check_mismatch(of_policy.get("mismatch_kl", 0.0), limit)
    if not of_policy.get("drift_kl", 0.0) <= DRIFT * limit:
        raise Mismatch(
            f"a step's rollouts are of another policy, or the policy has moved too far from its sampler: drift KL "
            f"{of_policy['drift_kl']:.4f} is above {DRIFT:.0f} times max_mismatch_kl {limit}; see whether all rollouts "
            "of the round have the same policy (`rlhf audit`), learn in smaller steps "
            "(rl.update.optimizer.learning_rate), or raise the limit knowingly"
        )


def check_mismatch(kl: float, limit: float) -> None:
    """Raise Mismatch if `kl` exceeds `max_mismatch_kl`, or is NaN."""
    if not kl <= limit:
        raise Mismatch(
            f"sampler and trainer disagree: mismatch KL {kl:.4f} is above max_mismatch_kl {limit}; compare dtypes "
            "(those of rl.rollout.engine too), let newer policies sample (a lower rl.staleness), or raise "
            "the limit knowingly"
        )


def spread(trained: Column, advantages: Column) -> float:
    """Standard deviation of the advantage over the tokens that are trained; 0 without one."""
    of_tokens = np.concatenate(advantages.where(trained))
    # Completions without a token have no advantage.
    return float(of_tokens.std()) if of_tokens.size else 0.0


def shared_N(trained: Column, advantages: Column | None) -> np.ndarray:
    """The advantage that the trained tokens of each completion share, [N]; NaN without one."""
    shared = np.full(trained.count, np.nan, real())
    for i, of_tokens in enumerate([] if advantages is None else advantages.where(trained)):
        if len(of_tokens) and (of_tokens == of_tokens[0]).all():
            shared[i] = of_tokens[0]
    return shared
