"""Buffers of a traced program: what is fused has none, what is read later stays, loops hold one body."""

import jax
import jax.numpy as jnp
import pytest

from tuning.fit.liveness import held

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
SIZE = 64 * 64 * 4


def of(function, *arguments, **options):
    return held(jax.make_jaxpr(function)(*arguments), **options)


def test_elementwise_operations_have_one_buffer_for_their_result():
    assert of(lambda x: jnp.tanh(x * 2 + 1) * x, X).peak == SIZE


def test_a_result_that_is_read_later_stays_until_then():
    def chain(x):
        a = x @ x
        b = a @ x
        c = b @ x
        return c @ a

    # a, b and c are there while c is made; then a, c and the result.
    assert of(chain, X).peak == 3 * SIZE


def test_what_nothing_reads_is_not_computed():
    def wasteful(x):
        _ = x @ x @ x
        return x @ x + 1

    assert of(wasteful, X).peak == SIZE


def test_a_loop_has_its_carry_once_and_the_most_of_its_body():
    def loop(x):
        return jax.lax.scan(lambda c, _: ((c @ x) @ x, None), x, None, length=10)[0]

    found = of(loop, X)
    assert found.peak == 3 * SIZE and found.within == 2 * SIZE
    assert found.moved == 10 * 6 * SIZE


def test_stacked_results_of_a_loop_are_there_from_its_start():
    def loop(x):
        return jax.lax.scan(lambda c, _: (c @ x, c @ x), x, None, length=10)[1]

    assert of(loop, X).peak >= 10 * SIZE


def test_an_argument_that_may_be_written_into_takes_the_result():
    def write(x):
        return jax.lax.dynamic_update_slice(x, jnp.ones((1, 64)), (0, 0))

    row = 64 * 4
    assert of(write, X, free=(0,)).peak == row
    assert of(write, X).peak == SIZE + row


def test_arrays_that_are_cut_over_devices_count_by_their_part():
    def size(aval, whole):
        return float(aval.size * 4) / (1 if whole else 8)

    assert of(lambda x: x + 1, X, size=size).peak == pytest.approx(SIZE / 8)
    assert of(lambda x: x @ x, X, size=size).peak == SIZE
