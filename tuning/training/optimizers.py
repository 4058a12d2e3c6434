"""Optimizers and learning-rate schedules by name, from Optax.

Every optimizer is the same chain: clipping, the direction of its rule, decoupled weight decay (Loshchilov and Hutter,
2019), the scheduled learning rate; and a guard around it that skips a step with non-finite gradients.

An optimizer keeps its moments in one of three ways:

    float32     as the rule computes them, with the parameters
    bfloat16    half of that; stored by stochastic rounding, computed with in float32
    host        as the rule makes them, in the host's memory; an update reads and writes them one parameter at a time

A moment is a leaf of the state whose path ends in a parameter's and which has its shape. Adafactor's factors have other
shapes: they are small, and stay as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from rlhf.tuning.device import check_host_memory, memory_kinds
from rlhf.tuning.precision import real
from rlhf.tuning.settings import OptimizerSettings

Path = tuple[Any, ...]

_SEED = 0x6D6F6D


class RoundedState(NamedTuple):
    """State of a rule whose moments are stored in bfloat16."""

    number: jax.Array
    """Updates so far, which seed the random bits."""
    inner: Any


def rounded(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """The rule with its moments in bfloat16 between updates; an update is computed in the rule's own type.

    Rounding is stochastic: to the next value up or down, so that the mean is the value itself (Gupta et al.,
    arXiv:1502.02551). To the nearest would not do: with a decay of 0.999 a second moment shrinks by at most a
    thousandth in an update, a step of bfloat16 is 1/128 to 1/256 of the value, and the moment would stay where it is.
    Bits are drawn from the number of the update and the place of the leaf, so that a run that resumes, and any mesh,
    draws the same.
    """

    def init(params: Any) -> RoundedState:
        inner = rule.init(params)
        whose = owners(inner, params)
        narrow = jax.tree.map(lambda x, own: x.astype(jnp.bfloat16) if own.moment else x, inner, whose)
        return RoundedState(jnp.zeros([], jnp.int32), narrow)

    def update(updates: Any, state: RoundedState, params: Any = None) -> tuple[Any, RoundedState]:
        types = jax.eval_shape(rule.init, updates)
        wide = jax.tree.map(lambda x, like: x.astype(like.dtype), state.inner, types)
        key = jax.random.fold_in(jax.random.key(_SEED, impl="threefry2x32"), state.number)
        changed, inner = rule.update(updates, wide, params)
        leaves, tree = jax.tree.flatten(inner)
        whose = jax.tree.leaves(owners(inner, updates))
        narrow = [
            stochastically_rounded(x, jax.random.fold_in(key, i)) if own.moment else x
            for i, (x, own) in enumerate(zip(leaves, whose, strict=True))
        ]
        return changed, RoundedState(optax.safe_increment(state.number), jax.tree.unflatten(tree, narrow))

    return optax.GradientTransformation(init, update)


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    """x in bfloat16, of any float type: up or down at random, such that the expected value is x.

    Values that are not finite, or that bfloat16 represents exactly, stay unchanged.
    """
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # A float32 is a bfloat16 and 16 bits more: their sum with 16 random bits carries as often as they say.
    carried = (bits + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)
    chosen = jax.lax.bitcast_convert_type(carried, jnp.float32)
    return jnp.where(jnp.isfinite(x), chosen, x).astype(jnp.bfloat16)


class HostState(NamedTuple):
    """State of a rule whose moments are in the host's memory."""

    on_host: Any
    """The moments; None in place of all else."""
    rest: Any
    """All else; None in place of the moments."""


def on_host(
    clip: optax.GradientTransformation, rule: optax.GradientTransformation, max_skipped: int
) -> optax.GradientTransformation:
    """`optax.apply_if_finite(optax.chain(clip, rule), max_skipped)` with the moments of `rule` in the host's memory.

    `clip` has no state. `rule` treats each parameter by itself, as all of `optimizers.OPTIMIZERS` do: it is applied to
    one after another, so that the moments of one alone are on the device. A step that is not finite is skipped by
    selection and not by a branch, which would want all moments at once.
    """

    def init(params: Any) -> optax.ApplyIfFiniteState:
        zero, yes = jnp.zeros([], jnp.int32), jnp.array(True)
        state = rule.init(params)
        return optax.ApplyIfFiniteState(zero, yes, zero, (clip.init(params), _split(state, owners(state, params))))

    def update(updates: Any, state: optax.ApplyIfFiniteState, params: Any = None) -> tuple[Any, Any]:
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(updates)]))
        skipped = jnp.where(finite, 0, optax.safe_increment(state.notfinite_count))
        clipped, clip_state = clip.update(updates, state.inner_state[0], params)
        taken = finite | (skipped > max_skipped)
        updates, new = _one_by_one(rule, clipped, state.inner_state[1], params, taken)
        total = jnp.where(finite, state.total_notfinite, optax.safe_increment(state.total_notfinite))
        return updates, optax.ApplyIfFiniteState(skipped, finite, total, (clip_state, new))

    return optax.GradientTransformation(init, update)


def _one_by_one(
    rule: optax.GradientTransformation, updates: Any, state: HostState, params: Any, taken: jax.Array
) -> tuple[Any, HostState]:
    """The updates of a rule and its state after them; zeros and the old state unless `taken`."""
    whole = _joined(state)
    whose = owners(whole, updates)
    changed: dict[Path, jax.Array] = {}
    after: dict[Path, jax.Array] = {}
    before: Any = ()
    for path in _paths(updates):
        mine, theirs, old = (_alone(tree, path, updates) for tree in (updates, params, whole))
        # In turn: a parameter's moments leave the host when those of the one before it are back.
        mine, old, before = jax.lax.optimization_barrier((mine, old, before))
        old = jax.tree.map(lambda x: _to(jax.memory.Space.Device, x), old)
        update, new = rule.update(mine, old, theirs)
        (changed[path],) = (jnp.where(taken, x, jnp.zeros_like(x)) for x in jax.tree.leaves(update))
        new = jax.tree.map(lambda x, y: jnp.where(taken, x, y), new, old)
        new = _joined(_split(new, _alone(whose, path, updates)))
        after |= dict(jax.tree_util.tree_leaves_with_path(new))
        before = (changed[path], new)
    new = jax.tree_util.tree_map_with_path(lambda path, _: after[path], whole)
    return jax.tree_util.tree_map_with_path(lambda path, _: changed[path], updates), _split(new, whose)


def _joined(state: HostState) -> Any:
    return jax.tree.map(lambda x, y: y if x is None else x, *state, is_leaf=lambda x: x is None)


def _split(state: Any, whose: Any) -> HostState:
    moments = jax.tree.map(lambda x, own: _to(jax.memory.Space.Host, x) if own.moment else None, state, whose)
    return HostState(moments, jax.tree.map(lambda x, own: None if own.moment else x, state, whose))


def _to(space: Any, x: jax.Array) -> jax.Array:
    return jax.device_put(x, space)


@dataclasses.dataclass(frozen=True)
class Owner:
    """Whose a leaf of an optimizer's state is."""

    path: Path | None
    """Of the parameter; None: it is of all."""
    moment: bool


def owners(state: Any, params: Any) -> Any:
    """An `Owner` for each leaf of a state."""
    shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def one(path: Path, leaf: Any) -> Owner:
        own = _own(path, shapes)
        return Owner(own, own is not None and leaf.shape == shapes[own])

    return jax.tree_util.tree_map_with_path(one, state)


def _own(path: Path, params: Collection[Path]) -> Path | None:
    # Longest path first: ('mu', 'layers', 'q') -> ('layers', 'q') -> ('q',).
    return next((path[start:] for start in range(len(path)) if path[start:] in params), None)


def _paths(tree: Any) -> list[Path]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _alone(tree: Any, path: Path, params: Any) -> Any:
    """The tree without the leaves of other parameters than the one at `path`: in their places is None, no leaf."""
    paths = set(_paths(params))

    def one(at: Path, leaf: Any) -> Any:
        return leaf if _own(at, paths) in (None, path) else None

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))


Rule = Callable[[float, float, float], optax.GradientTransformation]

MUON_RMS = 0.2
"""Root mean square of Muon's updates: that of AdamW's, so learning rates carry over (Liu et al., arXiv:2502.16982)."""


def _sgd(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    return optax.trace(b1) if b1 else optax.identity()


def _rmsprop(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_rms(b2, eps, eps_in_sqrt=False), _sgd(b1, b2, eps))


def _adafactor(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    momentum = [optax.ema(b1, debias=False)] if b1 else []
    return optax.chain(optax.scale_by_factored_rms(), _clip_by_matrix(), *momentum)


def _clip_by_matrix() -> optax.GradientTransformation:
    """Scales the update of each matrix down to a root mean square of 1 (Shazeer and Stern, 2018, section 6)."""

    def one(path: Any, x: jax.Array) -> jax.Array:
        # Layers are stacked: each has one matrix or vector.
        axes = tuple(range(1 if "layers" in jax.tree_util.keystr(path) else 0, x.ndim))
        rms = jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))
        return x / jnp.maximum(1.0, rms)

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


def schedule_of(settings: OptimizerSettings, total_steps: int) -> optax.Schedule:
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
    """Which parameters weight decay applies to: matrices, not norms, biases, sinks or scalar heads."""
    return jax.tree_util.tree_map_with_path(_is_matrix, params)


def _is_matrix(path: Any, leaf: Any) -> bool:
    # Layers are stacked, so a norm's or a bias's weights have two axes as well.
    name = jax.tree_util.keystr(path)
    return leaf.ndim >= 2 and not any(word in name for word in ("norm", "bias", "score", "sinks"))


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
