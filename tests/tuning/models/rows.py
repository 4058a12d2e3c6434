"""Packed rows for tests of attention, with prompts that completions share and without, and attention of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.models import attention as att
from rlhf.tuning.models.blocked import Segments

LENGTH = 384


def packed(length: int = LENGTH):
    """One row of two groups with branches, and padding; and a row that is one group."""
    group, branch, position = (np.zeros((2, length), np.int32) for _ in range(3))
    column = 0
    for number, (prompt, *completions) in enumerate([(70, 40, 90), (33, 101)], start=1):
        for arm, size in enumerate([prompt, *completions]):
            here = slice(column, column + size)
            group[0, here], branch[0, here] = number, arm
            position[0, here] = (prompt if arm else 0) + np.arange(size)
            column += size
    group[1], position[1] = 1, np.arange(length)
    return jnp.asarray(group), jnp.asarray(branch), jnp.asarray(position)


def segments_of(rows, length):
    """Columns of rows: two groups of a prompt and two branches, then padding; one group; branches of one token each."""
    group, branch = np.ones((rows, length)), np.zeros((rows, length))
    position = np.tile(np.arange(length), (rows, 1))
    third = length // 3
    if third > 4:
        group[0] = np.repeat([1, 2, 0], [third, third, length - 2 * third])
        branch[0, third // 2 : 3 * third // 4], branch[0, 3 * third // 4 : third] = 1, 2
        branch[0, third + third // 3 : 2 * third] = 1
        position[0] = np.concatenate([np.arange(third), np.arange(third), np.zeros(length - 2 * third)])
        branch[1:, third:] = np.arange(length - third) + 1
        position[1:, third:] = third
    return Segments(*(jnp.asarray(x, jnp.int32) for x in (group, branch, position)))


def alone():
    """One row of segments and padding, and a row that is one segment: no prompt is shared."""
    group, position = (np.zeros((2, LENGTH), np.int32) for _ in range(2))
    column = 0
    for number, size in enumerate([70, 140, 33], start=1):
        here = slice(column, column + size)
        group[0, here], position[0, here] = number, np.arange(size)
        column += size
    group[1], position[1] = 1, np.arange(LENGTH)
    return jnp.asarray(group), None, jnp.asarray(position)


def qkv(length: int = LENGTH, head_dim: int = 16):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, length, n, head_dim) for n in (4, 2, 2)]
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def value_and_grads(implementation, spec, length=LENGTH, rows=None):
    group, branch, _ = rows or packed(length)
    attention = att.packed_attention(group, branch, implementation)
    weight = jax.random.normal(jax.random.key(1), (2, length, 4, 16))
    real = (group > 0)[..., None, None]

    def loss(arrays):
        q, k, v, *sinks = arrays
        out = attention(q, k, v, dataclasses.replace(spec, sinks_N=sinks[0] if sinks else None), None)[0]
        return jnp.sum(jnp.where(real, out * weight, 0)), jnp.where(real, out, 0)

    given = qkv(length) + ([] if spec.sinks_N is None else [spec.sinks_N])
    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
    return out, grads
