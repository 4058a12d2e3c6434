"""Group-relative advantages from sequence rewards.

Axes: B completions, T completion tokens.

Sequence rewards come as [B] with `group_ids` [B]: any integers, any order, ragged groups. `valid` marks the samples
that count: failed ones leave every statistic and get advantage 0. Statistics use the whole group, so compute them
before filtering or sharding. Groups whose rewards are all equal get exactly 0; `rlhf.tuning.losses.groups` says which
groups are trained on.
Advantages per token (GAE, whitening) are in `rlhf.tuning.losses.returns`.

| function | advantage | used by |
| --- | --- | --- |
| `group_advantages` | (r - mean) / (std + eps), or without the division | GRPO, Dr. GRPO and their kin |
| `rloo_advantages` | r - mean of the group's other rewards | RLOO |
| `reinforce_pp_baseline_advantages` | r - mean, whitened over the round's tokens | REINFORCE++ with baseline |
| `opo_advantages` | r - mean weighted by length | OPO |
| `passk_advantages` | the best reward's lead over the second best, the others 0 | pass@k |

Defaults where implementations disagree: ddof 1, eps 1e-4 added to the standard deviation, a group of one gets 0.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.losses.masks import masked
from rlhf.tuning.losses.returns import whiten

Normalisation = Literal["std", "none", "batch-std"]
Singleton = Literal["zero", "reward"]
Ids = jax.Array | np.ndarray


def _grouped(rewards_B: jax.Array, group_ids_B: Ids, valid_B: Ids | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rewards [B] with 0 for invalid ones, dense group numbers [B], validity [B]."""
    _, numbers = np.unique(np.asarray(group_ids_B), return_inverse=True)
    keep = jnp.ones(rewards_B.shape, bool) if valid_B is None else jnp.asarray(valid_B) > 0
    return masked(rewards_B, keep), jnp.asarray(numbers, jnp.int32), keep


@jax.jit
def _group_sum(x_B: jax.Array, groups_B: jax.Array) -> jax.Array:
    """The sum over each sample's group, [B]. As many segments as samples: a shape that jit knows."""
    return jax.ops.segment_sum(x_B, groups_B, num_segments=x_B.shape[0])[groups_B]


@jax.jit
def _group_max(x_B: jax.Array, groups_B: jax.Array, keep_B: jax.Array) -> jax.Array:
    """The maximum over the kept samples of each sample's group, [B]; -inf where the group has none."""
    return jax.ops.segment_max(masked(x_B, keep_B, -jnp.inf), groups_B, num_segments=x_B.shape[0])[groups_B]


# Compiled as one: separate operations would take a program each, once for each number of completions.
@jax.jit
def _above_least(r_B: jax.Array, groups_B: jax.Array, keep_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rewards less the least of their group, 0 where not kept, and whether all of the group are equal; both [B].

    Sums of these are near 0: in float32 the mean of rewards such as 1000.01 is off by more than their differences.
    """
    least = -_group_max(-r_B, groups_B, keep_B)
    return masked(r_B - least, keep_B), _group_max(r_B, groups_B, keep_B) == least


@functools.partial(jax.jit, static_argnames="ddof")
def _group_deviations(
    rewards: jax.Array, groups: jax.Array, keep: jax.Array, ddof: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Deviation from the mean, standard deviation (0 for n <= ddof) and size of each sample's group, all [B].

    Deviations of a group of equal rewards are exactly 0, whatever the rounding of the mean.
    """
    n = _group_sum(keep.astype(rewards.dtype), groups)
    above, equal = _above_least(rewards, groups, keep)
    deviation = jnp.where(keep & ~equal, above - _group_sum(above, groups) / jnp.maximum(n, 1), 0)
    std = jnp.sqrt(_group_sum(deviation**2, groups) / jnp.maximum(n - ddof, 1))
    return deviation, std, n


@functools.partial(jax.jit, static_argnames="ddof")
def _batch_std(x_B: jax.Array, keep_B: jax.Array, ddof: int) -> jax.Array:
    """Standard deviation of the kept values, a scalar; 0 for n <= ddof."""
    n = keep_B.sum()
    # The least value as the origin, as in `_above_least`.
    above_B = masked(x_B - masked(x_B, keep_B, jnp.inf).min(initial=jnp.inf), keep_B)
    mean = above_B.sum() / jnp.maximum(n, 1)
    return jnp.sqrt(masked((above_B - mean) ** 2, keep_B).sum() / jnp.maximum(n - ddof, 1))


def group_advantages(
    rewards_B: jax.Array,
    group_ids_B: Ids,
    *,
    normalisation: Normalisation = "std",
    ddof: int = 1,
    eps: float = 1e-4,
    valid: Ids | None = None,
    singleton: Singleton = "zero",
) -> jax.Array:
    """Group-relative advantages, [B]: (r - mean_group) / (scale + eps).

    normalisation: "std" the group's standard deviation (GRPO, arXiv:2402.03300), "batch-std" that of all rewards of
    the batch, "none" no division and no eps (Dr. GRPO, arXiv:2503.20783). A group of one gets 0, or its raw reward
    (divided by 1 + eps unless "none") with singleton="reward".
    """
    r, groups, keep = _grouped(rewards_B, group_ids_B, valid)
    advantages, std, n = _group_deviations(r, groups, keep, ddof)
    if singleton == "reward":
        # A lone sample has no spread: 1 in its place leaves the raw reward.
        advantages, std = jnp.where(n == 1, r, advantages), jnp.where(n == 1, 1, std)
    if normalisation != "none":
        advantages = advantages / ((std if normalisation == "std" else _batch_std(r, keep, ddof)) + eps)
    return masked(advantages, keep)


def rloo_advantages(
    rewards_B: jax.Array,
    group_ids_B: Ids,
    *,
    valid: Ids | None = None,
    singleton: Singleton = "zero",
    reward_clip: tuple[float, float] | None = None,
) -> jax.Array:
    """Leave-one-out advantages (RLOO, arXiv:2402.14740): r minus the mean of the group's other rewards.

    reward_clip limits the rewards before the baseline.
    """
    r, groups, keep = _grouped(
        rewards_B if reward_clip is None else jnp.clip(rewards_B, *reward_clip), group_ids_B, valid
    )
    deviation, _, n = _group_deviations(r, groups, keep, 1)
    # r - mean of the others = (r - mean) n / (n - 1): no sum of each sample's others.
    advantages = deviation * n / jnp.maximum(n - 1, 1)
    if singleton == "reward":
        advantages = jnp.where(n == 1, r, advantages)
    return masked(advantages, keep)


def reinforce_pp_baseline_advantages(
    rewards_B: jax.Array,
    group_ids_B: Ids,
    mask_BT: jax.Array,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    variance_floor: float = 0.0,
    scale: bool = True,
    valid: Ids | None = None,
    singleton: Singleton = "zero",
) -> jax.Array:
    """REINFORCE++ with group baseline (arXiv:2501.03262): r - mean_group, whitened over all valid tokens, [B, T].

    Each sequence weighs by its length. ddof, eps, variance_floor, scale as in `whiten`.
    """
    advantages = group_advantages(rewards_B, group_ids_B, normalisation="none", valid=valid, singleton=singleton)
    mask = mask_BT if valid is None else mask_BT * (valid[:, None] > 0)
    tokens = jnp.broadcast_to(advantages[:, None], mask_BT.shape)
    return whiten(tokens, mask, ddof=ddof, eps=eps, variance_floor=variance_floor, scale=scale)


def opo_advantages(
    rewards_B: jax.Array,
    group_ids_B: Ids,
    lengths_B: Ids,
    *,
    valid: Ids | None = None,
    singleton: Singleton = "zero",
) -> jax.Array:
    """OPO (arXiv:2505.23585), [B]: r minus the group's mean reward weighted by length."""
    r, groups, keep = _grouped(rewards_B, group_ids_B, valid)
    weight = masked(jnp.asarray(lengths_B, r.dtype), keep)
    above, equal = _above_least(r, groups, keep)
    baseline = _group_sum(weight * above, groups) / jnp.maximum(_group_sum(weight, groups), 1)
    # The weighted mean of equal rewards is off by its rounding: their advantage is exactly 0.
    advantages = jnp.where(equal, 0, above - baseline)
    if singleton == "reward":
        advantages = jnp.where(_group_sum(keep.astype(r.dtype), groups) == 1, r, advantages)
    return masked(advantages, keep)


def passk_advantages(
    rewards_B: jax.Array,
    group_ids_B: Ids,
    *,
    normalisation: Literal["std", "none"] = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    valid: Ids | None = None,
) -> jax.Array:
    """Pass@k credit (arXiv:2503.19595): the best of a group gets its lead over the second best, the others 0."""
    r, groups, keep = _grouped(rewards_B, group_ids_B, valid)
    _, std, n = _group_deviations(r, groups, keep, ddof)
    is_best = keep & (r == _group_max(r, groups, keep))
    others = keep & ~is_best
    # Without others the maximum is -inf and the lead infinite; `unique` leaves those out.
    lead = r - _group_max(r, groups, others)
    # A tie at the top has no lead, and so has a group of one.
    unique = (_group_sum(is_best.astype(r.dtype), groups) == 1) & (n > 1)
    # Each of the others could be left out and the maximum would be the same: credit 0.
    advantages = jnp.where(is_best & unique, lead, 0)
    return advantages / (std + eps) if normalisation == "std" else advantages
