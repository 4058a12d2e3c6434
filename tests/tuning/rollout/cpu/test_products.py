"""The products of decoding in C: the same for a row whatever its neighbours, and none for rows of zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tuning.models.config import tiny
from tuning.rollout.cpu import kernels, products
from tuning.rollout.engine import Engine
from tuning.rollout.pool import Limits
from tuning.rollout.requests import Request

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a kernel for the CPU")


def operands(rows, size, outs, seed=0):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((rows, size), (outs, size)))


def by_kernel(x, weight):
    name = kernels.build().products
    assert name is not None, "this machine has no C compiler, or it cannot build the kernels"
    run = functools.partial(products.product, target=name)
    return np.asarray(jax.jit(run)(x, among_others(weight), 1))


def among_others(weight):
    """A stack of matrices, of which this is number 1."""
    return jnp.stack([jnp.full_like(weight, jnp.nan), weight, jnp.full_like(weight, jnp.inf)])


def exact(x, weight):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 32, 47, 101])
@pytest.mark.parametrize(
    ("size", "outs"),
    # Less than a vector, a vector and a part of one, no whole tile, tiles and a rest; on all cores; blocks of inputs.
    [(5, 3), (16, 8), (27, 9), (64, 192), (576, 577), (1601, 77)],
)
def test_it_is_the_product(rows, size, outs):
    x, weight = operands(rows, size, outs)
    found = by_kernel(x, weight)
    # Errors of float32 grow with the magnitudes that are added.
    most = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(weight, np.float64)).T
    assert np.all(np.abs(found - exact(x, weight)) <= 4e-7 * most)


def test_leading_axes_stay():
    x, weight = operands(6, 32, 40)
    found = by_kernel(x.reshape(2, 3, 32), weight)
    np.testing.assert_array_equal(found.reshape(6, 40), by_kernel(x, weight))


@pytest.mark.parametrize(("size", "outs"), [(70, 45), (1536, 576), (2003, 91)])
def test_a_row_has_the_same_bits_alone_and_among_others(size, outs):
    x, weight = operands(64, size, outs)
    together = by_kernel(x, weight)
    for i in (0, 31, 63):
        np.testing.assert_array_equal(by_kernel(x[i : i + 1], weight), together[i : i + 1])
    for part in (np.s_[5:37], np.s_[::3]):
        np.testing.assert_array_equal(by_kernel(x[part], weight), together[part])


def test_rows_of_zeros_are_zeros_and_others_stay():
    x, weight = operands(9, 80, 50)
    live = np.array([0, 3, 4, 8])
    found = by_kernel(jnp.zeros_like(x).at[live].set(x[live]), weight)
    np.testing.assert_array_equal(found[live], by_kernel(x, weight)[live])
    assert not np.delete(found, live, axis=0).any()
    assert not by_kernel(jnp.zeros_like(x), weight).any()


def test_rows_of_zeros_are_not_computed():
    x, weight = operands(4, 80, 50)
    found = by_kernel(x.at[1].set(0), jnp.full_like(weight, jnp.nan))
    assert not found[1].any() and np.isnan(found[[0, 2, 3]]).all()


def test_what_is_not_a_number_is_not_hidden():
    x, weight = operands(5, 80, 50)
    found = np.isnan(by_kernel(x.at[2, 79].set(jnp.nan), weight))
    assert found[2].all() and not np.delete(found, 2, axis=0).any()
    assert np.isnan(by_kernel(x, weight.at[49, 3].set(jnp.nan)))[:, 49].all()


@pytest.mark.parametrize("options", ["-mno-avx512f", "-mno-avx512f -mno-avx2 -mno-avx -mno-fma"], ids=["avx2", "sse"])
def test_it_is_the_product_with_shorter_vectors(tmp_path, options):
    if "avx512f" not in kernels._processor():
        pytest.skip("this processor has no longer ones")
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo {options}\nexec cc "$@" {options}\n')
    compiler.chmod(0o755)
    name = kernels.build(str(compiler)).products
    assert name not in (None, kernels.build().products)
    x, weight = operands(7, 91, 45)
    stack = among_others(weight)
    found = np.asarray(products.product(x, stack, 1, name))
    np.testing.assert_allclose(found, exact(x, weight), atol=2e-5)
    np.testing.assert_array_equal(np.asarray(products.product(x[3:4], stack, 1, name)), found[3:4])


@pytest.fixture
def lowered(monkeypatch):
    """The programs, prefill and decode, of an engine that prepares for some requests, before XLA has seen them."""
    config = tiny(97)
    engine = Engine(config, limits=Limits(slots=2, chunks=(16,)))
    texts = []
    monkeypatch.setattr(engine._ahead, "begin", lambda key, make: texts.append(make().as_text()))
    engine.prepare([Request([5, 6, 7], 4, counter=i) for i in range(2)])
    return texts


def test_all_products_with_weights_are_the_kernels(lowered):
    # Queries, keys and values; attention's output; gate and up; down: in one loop over layers. Then, for decoding, the
    # head. What prefill has beside is its attention.
    found = [text.count(f"@{kernels.build().products}(") for text in lowered]
    assert found == [4, 5]
    assert [text.count("dot_general") for text in lowered] == [2, 0]


@pytest.mark.parametrize("rows", [1, products.FEW_ROWS, products.FEW_ROWS + 1])
def test_without_the_kernel_it_is_the_same_product(rows):
    x, weight = operands(rows, 80, 50)
    found = products.product(x, among_others(weight), 1, None)
    np.testing.assert_allclose(found, by_kernel(x, weight), atol=2e-5)
