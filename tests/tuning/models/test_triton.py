"""The kernels for GPUs agree with the plain form in Pallas' interpreter, and skip blocks in which no key is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.compile_target import compiling_for
from rlhf.tuning.models import triton
from rlhf.tuning.models.attention import packed_attention
from rlhf.tuning.models.blocked import Segments, visible
from rlhf.tuning.models.decoder import UNLIMITED, AttentionSpec
from rlhf.tuning.models.remat import POLICIES
from tests.tuning.models.rows import LENGTH, alone, packed, value_and_grads

pytestmark = pytest.mark.slow

SHARED, APART = packed(), alone()


def segments(rows):
    group, branch, positions = rows
    return Segments(group, jnp.zeros_like(group) if branch is None else branch, positions)


@pytest.mark.parametrize(
    ("rows", "softcap", "window"),
    [
        (SHARED, 3.0, 20),
        *(
            pytest.param(rows, softcap, window, marks=pytest.mark.slow)
            for rows, softcap, window in (
                (APART, None, None), (SHARED, None, None), (SHARED, None, 100), (APART, 3.0, 20),
                (APART, None, jnp.int32(20)), (SHARED, None, jnp.int32(UNLIMITED)),
            )
        ),
    ],
)  # fmt: skip
def test_outputs_and_gradients_are_those_of_the_plain_form(rows, softcap, window):
    """Packed rows of float32, with two query heads for each of keys."""
    spec = AttentionSpec(0.3, softcap, window, rows[2])
    out, grads = value_and_grads("triton", spec, rows=rows)
    expected, expected_grads = value_and_grads("plain", spec, rows=rows)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("rows", [SHARED, APART])
@pytest.mark.parametrize("window", [None, 1, 20, 100, UNLIMITED])
def test_limits_are_the_visible_keys(rows, window):
    where = segments(rows)
    seen = jax.vmap(lambda *x: triton._seen(x, 0, LENGTH))(*triton._limits(where, window).swapaxes(0, 1))
    # Padding has no positions: a window does not show in them.
    real = np.asarray(where.group_BL > 0)
    np.testing.assert_array_equal(seen[real], visible(where, window, 0, LENGTH, LENGTH)[real])


@pytest.mark.parametrize("first", [0, 128])
@pytest.mark.parametrize("window", [None, 20])
def test_blocks_that_nobody_sees_are_not_visited(window, first):
    """All blocks between the first and the last that are seen, of either kind; a window's first column is one more."""
    where, size = segments(APART), triton.BLOCK
    limits = triton._limits(where, window)[:, :, first:]
    of_queries, of_keys = (np.asarray(x) for x in triton._blocks(limits, LENGTH))
    seen = np.asarray(visible(where, window, 0, LENGTH, LENGTH))[:, first:]
    blocks = seen.reshape(2, -1, size, LENGTH // size, size).any((2, 4))
    for row in range(2):
        for block, keys in enumerate(blocks[row]):
            start, stop, own, last = of_queries[row, :, block]
            visited = {*range(start, stop), *range(max(stop, own), last + 1)}
            assert set(np.flatnonzero(keys)) <= visited
            # With a window, blocks in which a group of the queries begins; without, those in between at most.
            assert window or visited == set(range(np.flatnonzero(keys)[0], np.flatnonzero(keys)[-1] + 1))
        for block, queries in enumerate(blocks[row].T):
            first_query, stop = of_keys[row, :, block]
            there = np.flatnonzero(queries)
            assert (first_query, stop) == ((there[0], there[-1] + 1) if len(there) else (len(queries), 0)) or window
            assert not len(there) or first_query <= there[0] and there[-1] < stop


def test_a_head_of_any_size_is_filled_up_with_zeros():
    q, k, v = (jax.random.normal(jax.random.key(n), (2, LENGTH, n, 20)) for n in (4, 2, 2))
    found = triton.triton_attention(q, k, v, segments(APART), None, 0.3, None)
    attention = packed_attention(APART[0], None, "plain")
    expected = attention(q, k, v, AttentionSpec(0.3, None, None, APART[2]), None)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("policy", "again"), [("attention", False), ("products", False), ("full", True)])
def test_a_policy_that_keeps_attention_does_not_compute_it_again(policy, again):
    group = jnp.ones((1, 128), jnp.int32)
    q, k, v = (jax.ShapeDtypeStruct((1, 128, n, 64), jnp.bfloat16) for n in (4, 2, 2))

    def loss(*arrays):
        spec = AttentionSpec(0.3, None, None, group)
        return packed_attention(group, None)(*arrays, spec, None)[0].astype(jnp.float32).sum()

    with compiling_for("gpu"):
        traced = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=POLICIES[policy]), (0, 1, 2)))(q, k, v)
    (backward,) = (e.params["jaxpr"].eqns for e in traced.eqns if e.primitive.name == "remat2")
    (forward,) = (e for e in backward if e.primitive.name == "pallas_call" and "name=forward_kernel" in str(e))
    # XLA drops a call of which nothing is read.
    assert again == any(out is x for e in backward for x in e.invars for out in forward.outvars)
