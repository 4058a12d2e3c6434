"""One round of RL on scored rollouts: advantages, then optimizer steps over packed groups.

    forward passes    log pi_old, log pi_ref and values of every completion, where the settings need them
    advantages        of the algorithm, or of the critic (PPO)
    steps             epochs x steps of `prompts_per_step` prompts, each with all its completions

The algorithm is found by name (`rlhf.tuning.algorithms.algorithm`); nothing here depends on which one it is, but that
PPO brings a critic. While the device computes one optimizer step, a thread packs the next one's rows.

Axes: N completions of the round, C completions of a micro-batch, T completion tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms import ppo, selection
from rlhf.tuning.algorithms.algorithm import Algorithm, Scored, find
from rlhf.tuning.algorithms.diagnostics import Coefficients, plain
from rlhf.tuning.algorithms.flat import Column, Flat, blocks
from rlhf.tuning.algorithms.learner import Learner, critic_step, policy_step, step_flops
from rlhf.tuning.algorithms.passes import Forward, logps_program, run_pass, values_program
from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.algorithms.settings import Objective, RoundSettings
from rlhf.tuning.algorithms.tally import Tally
from rlhf.tuning.device import choose
from rlhf.tuning.losses.rewards import kl_penalty
from rlhf.tuning.mesh import over_devices, put_params, row_shards
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.precision import real
from rlhf.tuning.training.batch import Group, Packed, choose_rows, count_micro_batches, micro_batches
from rlhf.tuning.training.prefetch import one_ahead
from rlhf.tuning.training.speed import Meter
from rlhf.tuning.training.step import StepFn, Sums, counted


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
        shared_N(under_way.trained, under_way.columns.get("advantages")),
        under_way.filtered_N,
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
        self.algorithm = find(self.objective)
        compute = settings.compute
        self.device, self.mesh = choose(compute.dtype, compute.remat), over_devices(compute.mesh)
        self.scored, self.filtered_N = selection.scored(data, settings), selection.filtered(data, settings)
        self.keep_N = selection.candidates(*self.of)
        self.division = selection.divided(*self.of, self.keep_N)
        self.lengths_N, self.width = data.lengths_N, data.width
        self.in_loss = selection.mask_in_loss(data, self.scored.valid_N, settings)
        # By name; a micro-batch has its rows of each as `NAME_CT`.
        self.columns: dict[str, Column] = dict.fromkeys(["mu", "old"] if self.by_sampler else ["mu"], data.sampler)
        self.done = self.total_work = 0
        self.seconds: dict[str, float] = defaultdict(float)
        # Before anything compiles beside it: it may measure the processor.
        self.meter = Meter(self.device.compute.dtype)

    @property
    def of(self) -> tuple[RoundData, Scored, Algorithm, RoundSettings]:
        """What `selection` decides by."""
        return self.data, self.scored, self.algorithm, self.settings

    @property
    def steps(self) -> list[list[Group]]:
        """The groups of each optimizer step."""
        return self.division.groups

    @property
    def signal_N(self) -> np.ndarray:
        """Completions with an advantage, [N] bool."""
        return selection.with_signal(*self.of[1:])

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
    def trained(self) -> Trained:
        """Tokens that take part in the loss."""
        return Trained(self.in_loss, self.keep_N)

    def overview(self) -> dict[str, Any]:
        """Metrics of the data, of the trained completions, and of adaptive coefficients."""
        return selection.overview(*self.of, self.keep_N) | self.coefficients.adapted(self.objective, self.settings)

    def run(self, reference: Any) -> dict[str, Any]:
        """All of the round; the metrics of its steps."""
        settings, critic = self.settings, self.critic
        pretrain_epochs = settings.critic.pretrain_epochs if critic is not None and settings.round == 0 else 0
        single_update = len(self.steps) * settings.epochs == 1
        # With a single update pi_old is pi: its gradient-free copy in the loss saves the pass (R4).
        top, by_mark = self.objective.top_entropy is not None, self.algorithm.mark is not None
        needed = not single_update or critic is not None or by_mark
        needs_old = not self.by_sampler and (needed or self.objective.kl_in_reward > 0)
        values_passes = int(critic is not None) + pretrain_epochs
        self.policy.put(settings.optimizer, self.mesh)
        # Old and reference log-probabilities, and values: passes that the progress counts before the updates.
        self.pack(int(needs_old) + int(reference is not None) + int(top) + values_passes)
        with self.compiling(old=needs_old, ref=reference is not None, top=top, marked=by_mark):
            metrics, passed = self.passes(needs_old, reference, pretrain_epochs), time.monotonic()
        self.seconds["compile"] += time.monotonic() - passed
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
        layout = choose_rows(self.steps, budget, largest_pair, self.algorithm.paired, undivided)
        self.pack_step = functools.partial(micro_batches, layout=layout, completion_tokens=self.width, shards=shards)
        count = sum(count_micro_batches(step, layout, shards) for step in self.steps)
        self.total_work = self.done + count * (passes + self.settings.epochs)

    def compiling(self, **passes: bool) -> AbstractContextManager[None]:
        """Compile the policy's step in parallel with the passes that compute its columns."""
        if not selection.moves(*self.of) and self.objective.kl_in_reward == 0:
            return nullcontext()
        names = ["advantages", *(name for name, comes in passes.items() if comes)]
        names += ["old_values", "returns"] if self.critic is not None else []
        return self.policy.compiling(self.policy_step, self.arrays(0, names))

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
        if self.steps and needs_old:
            kl = mismatch_kl(self.data, self.division.packed_N, self.columns["old"])
            check_mismatch(kl, self.settings.max_mismatch_kl)
        if not self.steps:
            return {}
        metrics = {} if self.critic is None else self.prepare_critic(self.critic, pretrain_epochs)
        if self.critic is None:
            self.ask_algorithm()
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

    def forward(self, program: Forward, weights: Any, name: str, behind_N: np.ndarray | None = None) -> Flat:
        """The outputs [C, T] of a program as a column, 0 for completions in no step; its time counts under `name`.

        behind_N: takes the last numbers of outputs [C, T + 1].
        """
        started = time.monotonic()
        found = Flat.zeros(self.lengths_N, self.width, real())

        def take(ids_C: np.ndarray, values_C: np.ndarray) -> None:
            found.put(ids_C, values_C)
            if behind_N is not None:
                behind_N[ids_C[ids_C >= 0]] = values_C[ids_C >= 0, -1]
            self._ticked(1)

        run_pass(program, weights, map(self.pack_step, self.steps), take, self.mesh)
        self.seconds[name] += time.monotonic() - started
        return found

    def _ticked(self, count: int) -> None:
        self.done += count
        self.progress(self.done, self.total_work, "micro-batch")

    def penalise(self) -> None:
        """The KL to the reference inside the reward (R8), from pi_old; then what has no place in the loss leaves."""
        if self.objective.kl_in_reward > 0:
            scale = self.coefficients.kl_scale
            penalties = token_penalties(self.objective, scale, self.columns, self.data.sampled)
            # The mask as it is kept: one that is read is an array.
            self.scored = dataclasses.replace(self.scored, mask_NT=self.in_loss, penalty_NT=penalties)
            before_N = self.division.packed_N
            self.keep_N = selection.trained(*self.of)
            self.division = selection.divided(*self.of, self.keep_N)
            if self.steps and (before_N != self.division.packed_N).any():
                self.pack(0)

    def ask_algorithm(self) -> None:
        """The algorithm's advantages, of each completion or of each token."""
        found = self.algorithm.advantages(self.scored)
        # Those of a tied group are rounding where they are not 0.
        if isinstance(found, Flat) or found.ndim == 2:
            flat = found if isinstance(found, Flat) else Flat.of(np.asarray(found, real()), self.lengths_N)
            flat.clear(~self.signal_N)
            self.columns["advantages"] = flat
        else:
            of_N = np.where(self.signal_N, np.asarray(found, real()), 0.0).astype(real())
            row = lambda i: np.full(self.lengths_N[i], of_N[i])  # noqa: E731
            self.columns["advantages"] = Column(row, len(of_N), self.width, of_N.dtype)

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
            ahead = one_ahead(map(self.arrays, range(len(self.steps))))
            losses = [critic.train(step, arrays)["loss"] for arrays in ahead]
        return float(np.mean(losses))

    def judge(self, critic: Learner, lam: float | None = None) -> None:
        """Advantages and returns by the critic as it is now; `lam` in place of the settings' own."""
        program = values_program(self.model, self.device.compute)
        after_N = np.zeros(len(self.keep_N), real())
        values = self.forward(program, critic.weights, "values", after_N)
        judged = ppo.Judged(values, after_N, self.data.unfinished_N)
        advantages, returns = ppo.token_advantages(self.scored, judged, self.settings.critic, lam)
        advantages.clear(~self.signal_N)
        self.columns |= {"old_values": values, "returns": returns, "advantages": advantages}

    def arrays(self, step: int, to_come: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The micro-batches of a step: tokens, counts of the whole step, coefficients, and the round's columns; zeros
        stand for those `to_come`."""
        groups, scalars = self.steps[step], self.coefficients.scalars()
        batches = self.pack_step(groups)
        return [
            arrays | scalars | {f"{name}_CT": column for name, column in self.gathered(batch, to_come).items()}
            for arrays, batch in zip(counted(groups, batches, self.division.unpacked[step]), batches, strict=True)
        ]

    def gathered(self, batch: Packed, to_come: Sequence[str]) -> dict[str, np.ndarray]:
        """The rows of a micro-batch of each of the round's columns, [C, T]."""
        columns = {name: column.gathered(batch.ids_C) for name, column in self.columns.items()}
        if to_come:
            return columns | dict.fromkeys(to_come, np.zeros(batch.mask_CT.shape, real()))
        if self.critic is None:
            in_loss = self.in_loss.gathered(batch.ids_C) > 0
            columns["advantages"] = np.where(in_loss, columns["advantages"], 0.0).astype(real())
        return columns

    def train(self) -> dict[str, Any]:
        """All optimizer steps of the round; the metrics of policy and critic."""
        settings, critic, compute = self.settings, self.critic, self.device.compute
        step, value_step = self.policy_step if selection.moves(*self.of) else None, None
        if critic is not None:
            value_step = critic_step(self.model, settings.critic, compute, critic.graph, self.mesh)
        tally, started, meter = Tally(self.by_sampler), time.monotonic(), self.meter
        meter.skip()

        def ended(
            at: tuple[int, int], groups: list[Group], batches: int, sums: list[Callable[[], Sums] | None]
        ) -> None:
            of_policy = {} if sums[0] is None else tally.add(sums[0](), self.division.unpacked[at[1]].n_tokens)
            if self.by_sampler and at[0] == 0:
                # Each token once, of skipped steps too.
                check_step(of_policy, settings.max_mismatch_kl)
            if sums[1] is not None:
                tally.add_value(sums[1]())
            size = sum(g.size for g in groups)
            tally.tokens += size
            self._ticked(batches)
            speed = meter.step(size, step_flops(self.model, groups, self.policy, critic))
            self.record(epoch=at[0], step=at[1], **of_policy, **speed)

        # The step that the device may still compute. Its sums are read when it has the next one.
        under_way: Callable[[], None] = lambda: None  # noqa: E731
        for at, groups, arrays in one_ahead(self.work()):
            sums = [None if step is None else self.policy.start_step(step, arrays)]
            # After the policy, on the same arrays: advantages are from before either moved.
            sums.append(None if critic is None or value_step is None else critic.start_step(value_step, arrays))
            under_way()
            under_way = functools.partial(ended, at, groups, len(arrays), sums)
        under_way()
        self.seconds["train"] += time.monotonic() - started
        for name in ("old", "ref", "old_values"):
            # No step reads them any more.
            self.columns.pop(name, None)
        metrics = meter.whole() | tally.metrics()
        if critic is not None:
            metrics |= tally.value_metrics(np.concatenate(self.trained.numbers(self.columns["returns"])))
        return metrics

    def work(self) -> Iterator[tuple[tuple[int, int], list[Group], list[dict[str, Any]]]]:
        """((epoch, step), groups, arrays) of each optimizer step of the round."""
        for epoch in range(self.settings.epochs):
            for number, groups in enumerate(self.steps):
                yield (epoch, number), groups, self.arrays(number)


Mark = Callable[..., np.ndarray]
"""Numbers of all tokens of a step, [tokens] of each column -> 1 on those that are marked."""


def token_penalties(objective: Objective, scale: float, columns: Mapping[str, Column], sampled: Column) -> Flat:
    """The KL to the reference that is subtracted from the reward of each token (R8), from pi_old, times `scale`."""
    found = Flat.zeros(np.asarray([len(sampled.row(i)) for i in range(sampled.count)]), sampled.width, real())
    limit = None if objective.kl_clamp is None else (-objective.kl_clamp, objective.kl_clamp)
    weight, kind = objective.kl_in_reward * scale, objective.kl_in_reward_kind
    for rows in blocks(sampled.count, sampled.width):
        old, ref, mask = (jnp.asarray(column.gathered(rows)) for column in (columns["old"], columns["ref"], sampled))
        found.put(rows, np.asarray(kl_penalty(old, ref, mask, coef=weight, kind=kind, value_clamp=limit)))
    return found


def marked(mark: Mark, columns: Sequence[Column], in_loss: Column, steps: Sequence[Sequence[Group]]) -> Flat:
    """1 on the tokens of each step that `mark` chooses by these columns."""
    lengths = [len(columns[-1].row(i)) for i in range(in_loss.count)]
    found = Flat.zeros(np.asarray(lengths), in_loss.width, real())
    for step in steps:
        ids = sorted({i for group in step for i in group.ids})
        masks = [in_loss.row(i) > 0 for i in ids]
        numbers = [[c.row(i)[: len(m)][m] for i, m in zip(ids, masks, strict=True)] for c in columns]
        chosen = mark(*map(np.concatenate, numbers))
        ends = np.cumsum([m.sum() for m in masks])[:-1]
        for i, m, of_row in zip(ids, masks, np.split(chosen, ends), strict=True):
            found.row(i)[: len(m)][m] = of_row
    return found


def highest(share: float) -> Mark:
    """Marks this share of the tokens: those with the highest numbers, as TRL's `top_entropy_quantile`."""
    return lambda numbers: numbers >= np.quantile(numbers, 1 - share) if len(numbers) else numbers


class Mismatch(RuntimeError):
    """Sampler and trainer disagree by more than the settings allow."""


def mismatch_kl(data: RoundData, keep_N: np.ndarray, old: Column) -> float:
    """Mean k3 estimate of KL(mu || pi_old) over the sampled tokens of these completions, [N] bool; 0 without any."""
    total, count = 0.0, 0
    # By rows: arrays of all tokens would be as large as the round.
    for i in np.flatnonzero(keep_N).tolist():
        log_rho = (old.row(i) - data.mu[i])[data.mask_of(i)]
        # k3 = exp(x) - 1 - x; expm1 keeps it exact near 0, where a healthy mismatch is.
        total += float((np.expm1(log_rho) - log_rho).sum())
        count += len(log_rho)
    return total / max(count, 1)


DRIFT = 10.0
"""Limit of how far a policy may have moved from its sampler within a round, in limits of a mismatch: single steps of a
policy with little entropy have moved by one, without harm; rollouts of other weights are further away."""


def check_step(of_policy: Mapping[str, float], limit: float) -> None:
    """Raises Mismatch where a step whose log pi_old is the sampler's has rollouts that are by other weights."""
    if "mismatch_kl" in of_policy:
        check_mismatch(of_policy["mismatch_kl"], limit)
    elif not of_policy.get("drift_kl", 0.0) <= DRIFT * limit:
        raise Mismatch(
            f"a step's rollouts are of another policy, or the policy has moved too far from its sampler: drift KL "
            f"{of_policy['drift_kl']:.4f} is above {DRIFT:.0f} times max_mismatch_kl {limit}; see whether all rollouts "
            "of the round have the same policy (`rlhf audit`), learn in smaller steps "
            "(rl.update.optimizer.learning_rate), or raise the limit knowingly"
        )


def check_mismatch(kl: float, limit: float) -> None:
    """Raises Mismatch where `kl` exceeds `max_mismatch_kl`, or is no number."""
    if not kl <= limit:
        raise Mismatch(
            f"sampler and trainer disagree: mismatch KL {kl:.4f} is above max_mismatch_kl {limit}; compare dtypes "
            "(those of rl.rollout.engine too), let newer policies sample (a lower rl.staleness), or raise "
            "the limit knowingly"
        )


@dataclasses.dataclass(frozen=True)
class Trained:
    """The tokens of a round that take part in the loss."""

    in_loss: Column
    """1 on the tokens that may."""
    keep_N: np.ndarray
    """Completions that do, [N] bool."""

    def mask_of(self, i: int) -> np.ndarray:
        """True on the tokens of completion i that take part; empty where none does."""
        return self.in_loss.row(i) if self.keep_N[i] else np.zeros(0, bool)

    def numbers(self, column: Column) -> list[np.ndarray]:
        """What a column has for them, by completion."""
        masks = [self.mask_of(i) for i in range(len(self.keep_N))]
        return [column.row(i)[: len(mask)][mask] for i, mask in enumerate(masks)]


def spread(trained: Trained, advantages: Column) -> float:
    """Standard deviation of the advantage over the tokens that are trained; 0 without one."""
    of_tokens = np.concatenate(trained.numbers(advantages))
    if not of_tokens.size:
        # Completions without a token have no advantage.
        return 0.0
    # As `of_tokens.std()`, which would make a second array of all tokens.
    of_tokens -= of_tokens.mean()
    of_tokens *= of_tokens
    return float(np.sqrt(of_tokens.mean()))


def shared_N(trained: Trained, advantages: Column | None) -> np.ndarray:
    """The advantage that the trained tokens of each completion share, [N]; NaN without one."""
    found = np.full(len(trained.keep_N), np.nan, real())
    for i, of_tokens in enumerate(trained.numbers(advantages) if advantages is not None else ()):
        if len(of_tokens) and (of_tokens == of_tokens[0]).all():
            found[i] = of_tokens[0]
    return found
