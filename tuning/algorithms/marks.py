"""Numbers of a round's tokens that follow from its passes and hold for all of its steps: penalties, and marks of tokens
that a loss treats in another way.

A mark is decided on the host over all tokens of an optimizer step: micro-batches and devices change nothing (R1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from tuning.algorithms.flat import Column, Flat, blocks
from tuning.algorithms.settings import Objective
from tuning.losses.rewards import kl_penalty
from tuning.precision import real
from tuning.training.batch import Group

Mark = Callable[..., np.ndarray]
"""Numbers of all tokens of a step, [tokens] of each column -> 1 on those that are marked."""


def penalties(objective: Objective, scale: float, columns: Mapping[str, Column], sampled: Column) -> Flat:
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
