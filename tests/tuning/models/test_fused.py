"""Attention by the kernel for CPUs equals its formula in float64, value and gradient, for every kind of mask."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.compile_target import compiling_for
from rlhf.tuning.cpu import kernels
from rlhf.tuning.models import attention as att
from rlhf.tuning.models import fused
from rlhf.tuning.models.blocked import Segments
from rlhf.tuning.models.decoder import AttentionSpec
from tests.tuning.compilers import compiler_for
from tests.tuning.models.formulas import attention_formula
from tests.tuning.models.rows import segments_of

pytestmark = pytest.mark.skipif(
    not kernels.has_compiler() or "avx512f" not in kernels._processor(), reason="no C compiler, or no AVX-512"
)

SIZES = {
    "two heads": (2, 40, 2, 2, 16), "the model's": (2, 130, 9, 3, 64), "one block": (1, 64, 3, 3, 64),
    "a token more": (1, 65, 3, 1, 64), "one token": (2, 1, 2, 1, 16), "wide heads": (1, 200, 8, 1, 128),
    "many that share": (1, 150, 40, 2, 80), "long": (1, 700, 3, 1, 32),
}  # fmt: skip
"""Rows, tokens, query heads, key-value heads, their size."""


def arrays(rows, length, heads, shared, size, kind=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(rows, length, n, size)), kind) for n in (heads, shared, shared, heads)]


def value_and_gradients(attention, q, k, v, g):
    out, back = jax.vjp(attention, q, k, v)
    return out, *back(g)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_those_of_the_formula(size, window):
    inputs = arrays(*SIZES[size])
    segments = segments_of(*inputs[0].shape[:2])

    def ours(q, k, v):
        return fused.fused_attention(q, k, v, segments, window, 0.3)

    def exact(q, k, v):
        return attention_formula(q, k, v, segments, window, 0.3, None)

    found = jax.jit(lambda *x: value_and_gradients(ours, *x))(*inputs)
    with jax.enable_x64():
        doubles = [jnp.asarray(np.asarray(x), jnp.float64) for x in inputs]
        expected = jax.jit(lambda *x: value_and_gradients(exact, *x))(*doubles)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        largest = max(1.0, float(np.max(np.abs(b))))
        np.testing.assert_allclose(a, b, atol=4e-6 * largest, rtol=0, err_msg=name)


def test_a_window_may_be_traced():
    q, k, v, _ = arrays(2, 40, 4, 2, 16)
    segments = segments_of(2, 40)
    run = jax.jit(lambda window: fused.fused_attention(q, k, v, segments, window, 0.3))
    for window in (1, 9, 2**31 - 1):
        np.testing.assert_allclose(run(window), attention_formula(q, k, v, segments, window, 0.3, None), atol=1e-5)


@pytest.mark.parametrize("kind", [int, np.int64, "an array"])
def test_a_window_of_more_than_a_column_may_be_is_none(kind):
    q, k, v, _ = arrays(2, 40, 4, 2, 16)
    segments = segments_of(2, 40)
    expected = fused.fused_attention(q, k, v, segments, None, 0.3)
    with jax.enable_x64():
        for window in (2**31, 2**40):
            window = jnp.asarray(window) if kind == "an array" else kind(window)
            assert np.array_equal(fused.fused_attention(q, k, v, segments, window, 0.3), expected)


def test_large_logits_and_keys_that_nobody_sees_do_not_overflow():
    q, k, v, g = arrays(1, 70, 2, 1, 16)
    segments = segments_of(1, 70)._replace(group_BL=jnp.ones((1, 70), jnp.int32))
    # The last key is seen by one query alone; its logits with the others would be infinite weights.
    q, k = 6 * q, (2 * k).at[0, -1].set(1e4)

    found = value_and_gradients(lambda *x: fused.fused_attention(*x, segments, None, 1.0), q, k, v, g)
    expected = value_and_gradients(lambda *x: attention_formula(*x, segments, None, 1.0, None), q, k, v, g)
    for a, b in zip(found, expected, strict=True):
        assert np.isfinite(a).all() and np.abs(b).max() > 1
        np.testing.assert_allclose(a, b, atol=2e-3)


def test_what_is_not_a_number_stays_so():
    q, k, v, _ = arrays(1, 40, 2, 1, 16)
    segments = segments_of(1, 40)._replace(
        group_BL=jnp.ones((1, 40), jnp.int32), branch_BL=jnp.zeros((1, 40), jnp.int32)
    )
    out = fused.fused_attention(q, k.at[0, 20, 0, 3].set(jnp.nan), v, segments, None, 0.3)
    # Queries before it do not see it.
    assert np.isfinite(out[0, :20]).all() and np.isnan(out[0, 20:]).all()


def test_keys_behind_a_row_are_zeros_whatever_was_in_memory():
    q, k, v, g = arrays(1, 40, 9, 1, 64)
    segments = segments_of(1, 40)

    @jax.jit
    def run(q, k, v, g):
        return value_and_gradients(lambda *x: fused.fused_attention(*x, segments, None, 0.3), q, k, v, g)

    for _ in range(3):
        run(*(jnp.full_like(x, jnp.nan) for x in (q, k, v, g)))
        assert all(np.isfinite(x).all() for x in run(q, k, v, g))


@pytest.mark.parametrize("window", [None, 30, 100])
def test_blocks_that_do_not_meet_are_left_out_and_others_are_not(window):
    length = 400
    q, k, v, g = arrays(1, length, 2, 1, 16)
    # Groups of all lengths that begin and end within blocks, in an order that ranges do not tell, and long branches.
    ends = np.cumsum([5, 60, 64, 70, 3, 130, 68])
    group = np.searchsorted(ends, np.arange(length), side="right")
    start = np.concatenate([[0], ends])[group]
    group = np.asarray([4, 1, 7, 1, 3, 2, 6])[group]
    position = np.arange(length) - start
    branch = np.where(position < 20, 0, position // 40 + 1)
    segments = Segments(*(jnp.asarray(x, jnp.int32)[None] for x in (group, branch, position)))
    found = value_and_gradients(lambda *x: fused.fused_attention(*x, segments, window, 0.3), q, k, v, g)
    expected = value_and_gradients(lambda *x: attention_formula(*x, segments, window, 0.3, None), q, k, v, g)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_rows_have_the_same_bits_whatever_lies_beside_them():
    # A single head has its gradients of queries and of keys made apart, so that all cores have work.
    q, k, v, g = arrays(5, 150, 3, 1, 32)
    segments = segments_of(5, 150)

    @jax.jit
    def run(q, k, v, g, segments):
        return value_and_gradients(lambda *x: fused.fused_attention(*x, segments, None, 0.3), q, k, v, g)

    whole = run(q, k, v, g, segments)
    alone = run(*(x[3:4] for x in (q, k, v, g)), Segments(*(x[3:4] for x in segments[:3])))
    for a, b in zip(whole, alone, strict=True):
        assert np.array_equal(a[3:4], b)


@pytest.mark.slow
def test_as_many_threads_as_a_machine_may_have_compute_the_same():
    """How a gradient is divided follows from XLA's threads: where they are few heads are whole, else they are not."""
    threads = "1" if len(os.sched_getaffinity(0)) >= 10 else "16"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"NPROC": threads}
    tests = "values_and_gradients or same_bits or do_not_meet"
    command = [sys.executable, "-m", "pytest", "--numprocesses=0", __file__, "-k", tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]


def test_overflowing_logits_are_no_numbers():
    q, k, v, g = arrays(1, 40, 2, 1, 16)
    segments = segments_of(1, 40)
    # The first token of a group sees only itself, by a logit of minus infinity.
    q, k = q.at[0, 0].set(1e20), k.at[0, 0].set(-1e20)
    out, dq, *_ = value_and_gradients(lambda *x: fused.fused_attention(*x, segments, None, 0.3), q, k, v, g)
    assert np.isnan(out[0, 0]).all() and np.isnan(dq[0, 0]).all()


def test_keys_of_no_weight_take_none_from_those_behind_them():
    """A whole block of keys whose logits are minus infinity, and more keys."""
    length = 130
    q, k, v, _ = arrays(1, length, 1, 1, 16)
    ones = jnp.ones((1, length), jnp.int32)
    segments = Segments(ones, 0 * ones, jnp.arange(length)[None])
    q, k = q.at[0, -1].set(1e20), k.at[0, :64].set(-1e20)
    k = k.at[0, 64:].set(1e-20 * k[0, 64:])
    out = fused.fused_attention(q, k, v, segments, None, 0.3)
    expected = attention_formula(q, k, v, segments, None, 0.3, None)
    assert np.isfinite(expected[0, -1]).all()
    np.testing.assert_allclose(out[0, -1], expected[0, -1], atol=1e-5)


def test_logits_far_below_zero_have_their_weights():
    q, k, v, _ = arrays(1, 3, 1, 1, 16)
    segments = Segments(jnp.ones((1, 3), jnp.int32), jnp.zeros((1, 3), jnp.int32), jnp.arange(3)[None])
    q, k = jnp.full_like(q, 1e16), jnp.full_like(k, -1e16) * jnp.asarray([3.0, 2.0, 1.0])[None, :, None, None]
    out = fused.fused_attention(q, k, v, segments, None, 1.0)
    np.testing.assert_allclose(out, v, rtol=1e-6)


def test_columns_of_all_rows_may_be_given_once():
    q, k, v, _ = arrays(2, 70, 6, 2, 16)
    segments = segments_of(1, 70)
    twice = Segments(*(jnp.tile(x, (2, 1)) for x in segments[:3]))
    once = fused.fused_attention(q, k, v, segments, 9, 0.3)
    assert np.array_equal(once, fused.fused_attention(q, k, v, twice, 9, 0.3))


def test_it_is_taken_where_it_suits():
    q, k, v, _ = arrays(1, 40, 2, 1, 16)
    assert fused.suits(q, k, v, None)
    assert not fused.suits(q, k, v, 30.0)
    for half in range(3):
        assert not fused.suits(*(x.astype(jnp.bfloat16) if i == half else x for i, x in enumerate((q, k, v))), None)
    # Queries that are some columns of their rows; values of another size.
    assert not fused.suits(q[:, :20], k, v, None)
    assert not fused.suits(q, k, jnp.concatenate([v, v], -1), None)
    assert not fused.suits(*arrays(1, 40, 2, 1, 24)[:3], None)
    # Query heads that share no key-value head evenly.
    assert not fused.suits(*arrays(1, 40, 3, 2, 16)[:3], None) and not fused.suits(*arrays(1, 40, 1, 2, 16)[:3], None)
    for platform in ("tpu", "gpu"):
        with compiling_for(platform):
            assert not fused.suits(q, k, v, None)


@pytest.mark.slow
@pytest.mark.parametrize("lacks", ["a compiler", "long vectors"])
def test_where_there_is_no_kernel_xla_computes_the_same(lacks, monkeypatch, tmp_path):
    q, k, v, _ = arrays(1, 40, 2, 1, 16)
    segments = segments_of(1, 40)
    spec = AttentionSpec(scale=0.3, softcap=None, window=None, positions_BL=segments.positions_BL)

    def run():
        return att.packed_attention(segments.group_BL, segments.branch_BL)(q, k, v, spec, None)[0]

    def calls():
        return "ffi_call" in str(jax.make_jaxpr(lambda: run())())

    assert calls()
    ours = run()
    monkeypatch.setenv("CC", "false" if lacks == "a compiler" else compiler_for("avx2", tmp_path))
    assert not calls()
    np.testing.assert_allclose(ours, run(), atol=1e-5)
    np.testing.assert_allclose(ours, attention_formula(q, k, v, segments, None, 0.3, None), atol=1e-5)
