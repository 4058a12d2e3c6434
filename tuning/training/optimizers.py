"""Optimizers and learning-rate schedules by name, from Optax.

Every optimizer is the same chain: clipping, the direction of its rule, decoupled weight decay (Loshchilov and Hutter,
2019), the scheduled learning rate; and a guard around it that skips a step with non-finite gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from rlhf.tuning.device import check_host_memory, memory_kinds
from rlhf.tuning.precision import real
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.moments import on_host, rounded

Rule = Callable[[float, float, float], optax.GradientTransformation]

MUON_RMS = 0.2
"""Root mean square of Muon's updates: that of AdamW's, so learning rates carry over (Liu et al., arXiv:2502.16982)."""


def _sgd(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    return optax.trace(b1) if b1 else optax.identity()


def _rmsprop(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_rms(b2, eps, eps_in_sqrt=False), _sgd(b1, b2, eps))


def _adafactor(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    momentum = [optax.ema(b1, debias=False)] if b1 else []
    return optax.chain(optax.scale_by_factored_rms(), _clip_by_matrix(1.0), *momentum)


def _clip_by_matrix(limit: float) -> optax.GradientTransformation:
    """Scales the update of each matrix down to a root mean square of `limit` (Shazeer and Stern, 2018, section 6)."""

    def one(path: Any, x: jax.Array) -> jax.Array:
        # Layers are stacked: each has one matrix or vector.
        axes = tuple(range(1 if "layers" in jax.tree_util.keystr(path) else 0, x.ndim))
        rms = jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))
        return x / jnp.maximum(1.0, rms / limit)

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(one, updates))


def _muon(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    def axes(tree: Any) -> Any:
        # Layers are stacked: the last two axes are a kernel's, what stands before them is a batch.
        return jax.tree.map(lambda _: MuonDimensionNumbers(-2, -1), tree)

    def kinds(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, leaf: "muon" if _is_kernel(path, leaf) else "adam", params)

    def to_rms(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda x: MUON_RMS * math.sqrt(max(x.shape[-2:])) * x, updates)

    matrices = optax.chain(scale_by_muon(beta=b1, weight_dimension_numbers=axes), optax.stateless(to_rms))
    return optax.partition({"muon": matrices, "adam": optax.scale_by_adam(0.9, b2, eps)}, kinds)


OPTIMIZERS: dict[str, Rule] = {
    "adamw": optax.scale_by_adam,
    "adam": optax.scale_by_adam,
    "nadamw": lambda b1, b2, eps: optax.scale_by_adam(b1, b2, eps, nesterov=True),
    "radam": optax.scale_by_radam,
    "amsgrad": optax.scale_by_amsgrad,
    "rmsprop": _rmsprop,
    "sgd": _sgd,
    "lion": lambda b1, b2, eps: optax.scale_by_lion(b1, b2),
    "adafactor": _adafactor,
    "muon": _muon,
}
"""Rules by name, of (b1, b2, eps): the decay of the first moment or the momentum, of the second moment, and the summand
of its root. Adafactor (Shazeer and Stern, 2018) keeps the learning rate as it is, unscaled by the parameter's
norm; Muon (Jordan et al., 2024) moves kernels of layers, and Adam with 0.9 and b2 all else."""

SCHEDULES: dict[str, Callable[[float, float, int], optax.Schedule]] = {
    "constant": lambda peak, end, steps: optax.constant_schedule(peak),
    "linear": lambda peak, end, steps: optax.linear_schedule(peak, end, steps),
    "cosine": lambda peak, end, steps: optax.cosine_decay_schedule(peak, steps, end / peak),
    # Warm-up, stable, decay (Hu et al., arXiv:2404.06395): the last fifth goes down.
    "wsd": lambda peak, end, steps: optax.linear_schedule(peak, end, max(1, steps // 5), steps - max(1, steps // 5)),
}
"""Schedules by name, of (peak, end, steps after the warm-up)."""


def schedule_of(settings: OptimizerSettings, total_steps: int = 1) -> optax.Schedule:
    """A linear warm-up, then the schedule's decay; `total_steps` is the end of a schedule without `decay_steps`."""
    s, peak = settings, settings.learning_rate
    after = max(1, (s.decay_steps or total_steps) - s.warmup_steps)
    body = SCHEDULES[s.schedule](peak, peak * s.end_fraction, after)
    if s.warmup_steps > 0:
        # From 1 / (warm-up + 1) of the peak, not from 0: the first step moves the weights too.
        warmup = optax.linear_schedule(peak / (s.warmup_steps + 1), peak, s.warmup_steps)
        body = optax.join_schedules([warmup, body], [s.warmup_steps])
    # Optax makes a float32 rate of a count that is an integer, whatever the type of the weights.
    return lambda count: body(jnp.asarray(count, real()))


def decays(params: Any) -> Any:
    """Which parameters weight decay applies to: matrices, not norms, biases or scalar heads."""
    return jax.tree_util.tree_map_with_path(_is_matrix, params)


def _is_matrix(path: Any, leaf: Any) -> bool:
    # Layers are stacked, so a norm's or a bias's weights have two axes as well.
    name = jax.tree_util.keystr(path)
    return leaf.ndim >= 2 and not any(word in name for word in ("norm", "bias", "score"))


def _is_kernel(path: Any, leaf: Any) -> bool:
    return "layers" in jax.tree_util.keystr(path) and _is_matrix(path, leaf)


def optimizer_of(settings: OptimizerSettings, total_steps: int = 1) -> optax.GradientTransformation:
    """The optimizer of some settings; `total_steps` as in `schedule_of`.

    Gradients are clipped by global norm; a step with non-finite ones is skipped and counted. `weight_decay` times the
    learning rate shrinks what `decays` names, or with `decay: all` all parameters. Raises ValueError for
    `moments: host` without host memory.
    """
    s = settings
    clip = optax.identity() if s.clip_norm is None else optax.clip_by_global_norm(s.clip_norm)
    rule = OPTIMIZERS[s.name](s.beta1, s.beta2, s.epsilon)
    # After the rule and before the learning rate: decoupled, and scheduled with it.
    decay = optax.add_decayed_weights(s.weight_decay, None if s.decay == "all" else decays)
    rate = optax.scale_by_learning_rate(schedule_of(s, total_steps))
    # optax would apply the update after more than this. `make_step` stops at `max_skipped` + 1, which it may read when
    # one step more has started.
    max_errors = s.max_skipped + 2
    if s.moments == "host":
        check_host_memory("optimizer.moments host", memory_kinds())
        return on_host(clip, optax.chain(rule, decay, rate), max_errors)
    chain = optax.chain(clip, rounded(rule) if s.moments == "bfloat16" else rule, decay, rate)
    return optax.apply_if_finite(chain, max_consecutive_errors=max_errors)
