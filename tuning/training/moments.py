"""How an optimizer keeps its moments: their type, and the memory they are in.

    float32     as the rule computes them, with the parameters
    bfloat16    half of that; stored by stochastic rounding, computed with in float32
    host        as the rule makes them, in the host's memory; an update reads and writes them one parameter at a time

A moment is a leaf of the state whose path ends in a parameter's and which has its shape. Adafactor's factors have other
shapes: they are small, and stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

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
