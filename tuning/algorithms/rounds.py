"""One round of RL on scored rollouts: advantages, then optimizer steps over packed groups.

Axes: N completions of the round, C completions of a micro-batch, T completion tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tuning.algorithms import grpo, ppo
from tuning.algorithms.objective import Objective, policy_loss, summarise
from tuning.device import choose
from tuning.models.config import DecoderConfig
from tuning.models.lora import Base, join, over
from tuning.training.batch import Group, Layout, Packed, bucket, choose_rows, micro_batches
from tuning.training.forward import Compute, decoder_graph, logps_and_entropy, scalar_graph, values
from tuning.training.mesh import over_devices, put_batch, put_params, put_state, row_shards
from tuning.training.speed import ADAPTER, FULL, Meter, forward_flops
from tuning.training.step import make_step


@dataclasses.dataclass(frozen=True)
class RoundData:
    """The rollouts of a round with their totals, in table order."""

    prompts: list[list[int]]
    completions: list[list[int]]
    mu: list[list[float]]
    groups_N: np.ndarray
    totals_N: np.ndarray
    valid_N: np.ndarray

    @classmethod
    def from_rows(cls, rollouts: Sequence[dict[str, Any]], scores: Sequence[dict[str, Any]]) -> RoundData:
        """From the rows of the rollout and score tables; a completion whose reward failed is not valid."""
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(r["prompt_id"], len(numbers)) for r in rollouts]
        totals = np.asarray([np.nan if s["total"] is None else s["total"] for s in scores], np.float32)
        return cls(
            prompts=[r["prompt_ids"] for r in rollouts],
            completions=[r["token_ids"] for r in rollouts],
            mu=[r["logprobs"] for r in rollouts],
            groups_N=np.asarray(groups),
            totals_N=totals,
            valid_N=np.isfinite(totals),
        )

    def steps(self, keep_N: np.ndarray, prompts_per_step: int) -> list[list[Group]]:
        """Kept completions as groups, at most `prompts_per_step` of them a step, in table order.

        Steps are even: a last step of few groups would move the weights as far, on little evidence.
        """
        members: dict[int, list[int]] = {}
        for i in np.flatnonzero(keep_N):
            members.setdefault(int(self.groups_N[i]), []).append(int(i))
        groups = [Group(self.prompts[m[0]], [self.completions[i] for i in m], m) for m in members.values()]
        count = -(-len(groups) // prompts_per_step)
        bounds = [len(groups) * i // count for i in range(count + 1)] if count else []
        return [groups[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@functools.lru_cache(maxsize=8)
def _logps(model: DecoderConfig, temperature: float, compute: Compute) -> Any:
    graph = decoder_graph(model)
    return jax.jit(lambda params, batch: logps_and_entropy(graph, params, batch, temperature, compute)[0])


@functools.lru_cache(maxsize=8)
def _values(model: DecoderConfig, compute: Compute) -> Any:
    graph = scalar_graph(model)
    return jax.jit(lambda params, batch: values(graph, params, batch, compute))


# Optimizers close over functions, so equal ones compare unequal; steps are kept by what made them.
_steps: dict[Any, Any] = {}


def _step(key: Any, make: Callable[[], Any]) -> Any:
    if key not in _steps:
        _steps[key] = make()
    return _steps[key]


def _whole(base: Base | None, params: Any) -> Any:
    return params if base is None else join(base.graph, params, base.frozen)


def _loss(base: Base | None, loss: Any) -> Any:
    return loss if base is None else over(base.graph, loss)


def _frozen(base: Base | None) -> Any:
    return None if base is None else (base.frozen, None)


def _collect(batches: Sequence[Packed], found: Sequence[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """[C, T] arrays of micro-batches as one [N, T] array of the round."""
    out = np.zeros(shape, np.float32)
    for batch, values_CT in zip(batches, found, strict=True):
        filled = batch.ids_C >= 0
        out[batch.ids_C[filled]] = np.asarray(values_CT)[filled]
    return out


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
) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Updates (params, opt_state, critic, critic_opt), which are donated; returns them and the round's metrics.

    `settings` has the fields of the update stage's config. Where policy or critic have a base, their parameters are
    the trainable tree over it.
    """
    params, opt_state, critic, critic_opt = trainer
    device = choose(settings.compute.dtype)
    compute, mesh = device.compute, over_devices(settings.compute.mesh)
    is_ppo = settings.algorithm == "ppo"
    keep = data.valid_N if is_ppo else grpo.kept(data.totals_N, data.groups_N, data.valid_N)
    steps = data.steps(keep, settings.prompts_per_step)
    metrics: dict[str, Any] = {
        "kept": float(keep.mean()),
        "groups": len(set(data.groups_N.tolist())),
        "pass_histogram": _histogram(data),
    }
    if not steps:
        return params, opt_state, critic, critic_opt, metrics | {"steps": 0}
    params, opt_state = put_state(optimizers[0], params, opt_state, mesh)
    reference = put_params(reference, mesh)
    policy_base, critic_base = (b and dataclasses.replace(b, frozen=put_params(b.frozen, mesh)) for b in bases)
    if is_ppo:
        critic, critic_opt = put_state(optimizers[1], critic, critic_opt, mesh)
    width = bucket(max(len(c) for c in data.completions))
    layout: Layout = choose_rows(steps, settings.compute.tokens_per_micro_batch or device.row_tokens_per_step)
    shards = row_shards(mesh)
    packed = [micro_batches(groups, layout=layout, completion_tokens=width, shards=shards) for groups in steps]
    flat = [p for step in packed for p in step]
    shape = (len(data.completions), width)
    lengths = np.asarray([len(c) for c in data.completions])
    mask_NT = (np.arange(width) < lengths[:, None]) & keep[:, None]
    mu_NT = np.zeros(shape, np.float32)
    for i, logps in enumerate(data.mu):
        mu_NT[i, : len(logps)] = logps

    forward = _logps(model, settings.temperature, compute)

    def pass_over(program: Any, weights: Any, done: int) -> np.ndarray:
        found = []
        for i, batch in enumerate(flat):
            found.append(np.asarray(program(weights, put_batch(batch.arrays(), mesh))))
            progress(done + i + 1, total_work, "micro-batch")
        return _collect(flat, found, shape)

    several = len(steps) * settings.epochs > 1
    passes = int(several or is_ppo) + int(reference is not None) + int(is_ppo)
    total_work = len(flat) * (passes + settings.epochs)
    done = 0
    columns: dict[str, np.ndarray] = {"mu_CT": mu_NT}
    if several or is_ppo:
        columns["old_CT"] = pass_over(forward, _whole(policy_base, params), done)
        done += len(flat)
    if reference is not None:
        columns["ref_CT"] = pass_over(forward, reference, done)
        done += len(flat)
    c = settings.critic
    critic_settings = ppo.Critic(c.gamma, c.lam, c.value_clip, c.kl_in_reward)
    if is_ppo:
        old_values = pass_over(_values(model, compute), _whole(critic_base, critic), done)
        done += len(flat)
        advantages, returns = ppo.token_advantages(
            np.where(data.valid_N, data.totals_N, 0.0).astype(np.float32),
            columns["old_CT"],
            columns.get("ref_CT", columns["old_CT"]),
            old_values,
            mask_NT.astype(np.float32),
            critic_settings,
        )
        columns |= {"old_values_CT": old_values, "returns_CT": returns}
    else:
        per_completion = grpo.advantages(data.totals_N, data.groups_N, data.valid_N, settings.normalisation)
        advantages = np.where(mask_NT, per_completion[:, None], 0.0).astype(np.float32)
    columns["advantages_CT"] = advantages

    objective = Objective(
        temperature=settings.temperature,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        aggregation=settings.aggregation,
        constant=settings.constant,
        kl_coef=settings.kl_coef,
        kl_kind=settings.kl_kind,
        entropy_coef=settings.entropy_coef,
        importance_max=settings.importance_max,
    )
    skipped = settings.optimizer.max_skipped
    policy_step = _step(
        (
            "policy",
            model,
            objective,
            compute,
            settings.optimizer.model_dump_json(),
            policy_base and policy_base.graph,
            mesh,
        ),
        lambda: make_step(
            _loss(policy_base, policy_loss(decoder_graph(model), objective, compute)), optimizers[0], skipped, mesh
        ),
    )
    sums: Counter[str] = Counter()
    norms, value_sums, tokens = [], Counter[str](), 0
    meter = Meter(compute.dtype)
    for epoch in range(settings.epochs):
        for number, (groups, batches) in enumerate(zip(steps, packed, strict=True)):
            arrays = [
                a | {k: b.gather(v) for k, v in columns.items()}
                for a, b in zip(counted(groups, batches), batches, strict=True)
            ]
            params, opt_state, found = policy_step(params, opt_state, arrays, _frozen(policy_base))
            norms.append(found.pop("grad_norm"))
            sums.update(found)
            if is_ppo:
                critic_step = _step(
                    (
                        "critic",
                        model,
                        critic_settings,
                        compute,
                        settings.critic.optimizer.model_dump_json(),
                        critic_base and critic_base.graph,
                        mesh,
                    ),
                    lambda: make_step(
                        _loss(critic_base, ppo.critic_loss(scalar_graph(model), critic_settings, compute)),
                        optimizers[1],
                        skipped,
                        mesh,
                    ),
                )
                critic, critic_opt, found_values = critic_step(critic, critic_opt, arrays, _frozen(critic_base))
                value_sums.update(found_values)
            tokens += sum(g.size for g in groups)
            done += len(batches)
            progress(done, total_work, "micro-batch")
            flops = sum(
                (FULL if base is None else ADAPTER) * forward_flops(model, groups, head=head)
                for base, head in [(policy_base, True), (critic_base, False)][: 1 + is_ppo]
            )
            speed = meter.step(sum(g.size for g in groups), flops)
            record(epoch=epoch, step=number, grad_norm=norms[-1], **summarise(found), **speed)
    metrics |= meter.whole()
    metrics |= summarise(sums) | {
        "loss": sums["loss"] / len(norms),
        "grad_norm": float(np.mean(norms)),
        "steps": len(norms),
        "skipped": sums["skipped"],
        "row_tokens": tokens,
        "advantage_spread": float(advantages[mask_NT].std()),
    }
    if is_ppo:
        n = max(value_sums["n_tokens"], 1.0)
        spread = float(np.var(columns["returns_CT"][mask_NT]))
        metrics["value_loss"] = value_sums["loss"] / len(norms)
        metrics["value_explained"] = 1.0 - value_sums["value_error_sq"] / n / max(spread, 1e-12)
    return params, opt_state, critic, critic_opt, {k: _plain(v) for k, v in metrics.items()}


def _histogram(data: RoundData, bins: int = 5) -> list[int]:
    """Prompts by share of their completions whose total is above the round's midpoint of totals."""
    totals = data.totals_N[data.valid_N]
    if not len(totals):
        return [0] * bins
    middle = (totals.min() + totals.max()) / 2
    counts = [0] * bins
    for group in np.unique(data.groups_N):
        mine = data.totals_N[(data.groups_N == group) & data.valid_N]
        if len(mine):
            counts[min(bins - 1, int((mine > middle).mean() * bins))] += 1
    return counts


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, np.floating | jax.Array) else value
