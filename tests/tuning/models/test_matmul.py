"""Products of rounded factors by our own kernel: those of XLA, and the same bits whatever else is in the product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from tests.tuning.compilers import compiler_without
from tuning.cpu import kernels
from tuning.models.matmul import across, contract, matmul
from tuning.precision import using

AXES = {"x W": (1, 0), "g W^T": (1, 1), "x^T g": (0, 0), "g^T x^T": (0, 1)}
"""Axes that are summed, of the first and of the second factor."""


@pytest.fixture(params=["", "no matrix unit"])
def kernel(request, tmp_path, monkeypatch):
    if request.param:
        if "amx_bf16" not in kernels._processor():
            pytest.skip("this processor has no matrix unit to leave out")
        monkeypatch.setenv("CC", compiler_without(request.param, tmp_path))
    if jax.default_backend() != "cpu" or kernels.build().matmul is None:
        pytest.skip("this processor has no products of bfloat16")


@pytest.fixture(autouse=True)
def mixed():
    with using("mixed"):
        yield


def factors(rows, depth, columns, axes, kind="float32"):
    """Two arrays whose product over these axes is [rows, columns]."""
    rng = np.random.default_rng(0)
    shapes = (rows, depth) if axes[0] == 1 else (depth, rows), (depth, columns) if axes[1] == 0 else (columns, depth)
    return [jnp.asarray(rng.normal(size=shape), kind) for shape in shapes]


def product(x, y, axes):
    return np.asarray(jax.jit(lambda x, y: contract(x, y, *axes, jnp.float32))(x, y))


def rounded(x):
    return np.asarray(x.astype(jnp.bfloat16)).astype(np.float64)


def calls(function, *args):
    """How often a function calls the kernel."""
    return str(jax.make_jaxpr(function)(*args)).count("ffi_call[")


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("shape", [(192, 128, 192), (257, 800, 529), (65, 1700, 51), (2500, 65, 31)], ids=str)
def test_a_product_is_that_of_the_rounded_factors(kernel, shape, axes, kind):
    x, y = factors(*shape, axes, kind)
    assert calls(lambda x, y: contract(x, y, *axes, jnp.float32), x, y) == 1
    expected = np.tensordot(rounded(x), rounded(y), axes=([axes[0]], [axes[1]]))
    # By the size of the sums.
    np.testing.assert_allclose(product(x, y, axes), expected, rtol=0, atol=5e-6 * np.sqrt(shape[1]))


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_a_number_has_the_same_bits_whatever_rows_and_columns_are_beside_it(kernel, axes):
    x, y = factors(300, 2000, 200, axes)
    whole = product(x, y, axes)
    few = jnp.take(x, jnp.arange(37, 90), axis=1 - axes[0]), jnp.take(y, jnp.arange(11, 60), axis=1 - axes[1])
    np.testing.assert_array_equal(product(*few, axes), whole[37:90, 11:60])


def test_numbers_that_are_not_finite_stay_in_their_rows_and_columns(kernel):
    x, y = factors(150, 300, 100, (1, 0))
    found = product(x.at[3, 5].set(jnp.nan), y.at[7, 9].set(jnp.inf), (1, 0))
    broken = ~np.isfinite(found)
    assert broken[3].all() and broken[:, 9].all() and broken.sum() == 249


def test_a_step_calls_it_forward_and_for_both_gradients(kernel):
    x, weight = factors(128, 256, 192, (1, 0))
    x = x.reshape(4, 32, 256)

    def loss(x, weight):
        return jnp.sum(jnp.square(matmul(x, weight)))

    gradients = jax.grad(loss, argnums=(0, 1))
    assert calls(gradients, x, weight) == 3
    found = gradients(x, weight)
    flat = rounded(x).reshape(-1, 256)
    g = rounded(jnp.asarray(2 * flat @ rounded(weight), jnp.float32))
    expected = (g @ rounded(weight).T).reshape(x.shape), flat.T @ g
    for one, other in zip(found, expected, strict=True):
        # A number of g near the middle of two of bfloat16 may be rounded to either.
        assert np.linalg.norm(one - other) < 1e-3 * np.linalg.norm(other)


def test_a_mapped_product_is_one_for_each(kernel):
    x, y = factors(3 * 256, 128, 128, (1, 0))
    x = x.reshape(3, 256, 128)
    mapped = jax.vmap(lambda x: contract(x, y, 1, 0, jnp.float32))(x)
    np.testing.assert_array_equal(mapped, np.stack([product(one, y, (1, 0)) for one in x]))


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_small_products_and_exact_ones_are_left_to_xla(axes):
    run = functools.partial(contract, of_x=axes[0], of_y=axes[1], kind=jnp.float32)
    assert calls(run, *factors(16, 32, 16, axes)) == 0
    assert calls(run, *factors(512, 0, 512, axes)) == 0 and not product(*factors(512, 0, 512, axes), axes).any()
    with using("float32"):
        assert calls(run, *factors(128, 256, 192, axes)) == 0


def test_each_kernel_lies_beside_a_module_of_its_name_whose_key_holds_it():
    assert [p for p in kernels.SOURCES if not p.with_suffix(".py").exists()] == []


def test_what_xla_cuts_over_a_mesh_is_left_to_it():
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))):
        assert calls(lambda x, y: across(x, y, jnp.float32), *factors(256, 256, 192, (0, 0))) == 0
