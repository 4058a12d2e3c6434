"""Products of rounded factors by our own kernel: those of XLA, and the same bits whatever else is in the product."""

import functools
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from rlhf.tuning.cpu import kernels
from rlhf.tuning.models.matmul import contract, matmul, thin
from rlhf.tuning.precision import ROUNDED
from rlhf.tuning.processor import multiplies_bfloat16
from tests.tuning.compilers import compiler_for

AXES = {"x W": (1, 0), "g W^T": (1, 1), "x^T g": (0, 0), "g^T x^T": (0, 1)}
"""Axes that are summed, of the first and of the second factor."""


@functools.cache
def compiler_knows_bfloat16():
    if not kernels.has_compiler():
        return False
    said = subprocess.run(["cc", "-march=native", "-dM", "-E", "-x", "c", os.devnull], capture_output=True, text=True)
    return "__AVX512BF16__" in said.stdout


@pytest.fixture(params=["", "no matrix unit", "a matrix unit"])
def kernel(request, tmp_path, monkeypatch, caplog):
    """As this processor has it; without its matrix unit; and with one that Linux denies, as there is none."""
    if jax.default_backend() != "cpu" or not multiplies_bfloat16() or not compiler_knows_bfloat16():
        pytest.skip("this machine has no products of bfloat16")
    has_unit = "amx_bf16" in kernels._processor()
    if request.param and has_unit != (request.param == "no matrix unit"):
        pytest.skip("that is this processor")
    if request.param:
        monkeypatch.setenv("CC", compiler_for(request.param, tmp_path))
        kernels._build.cache_clear()
    assert kernels.build().matmul is not None
    assert ("Linux denies the matrix unit" in caplog.text) == (request.param == "a matrix unit")


@pytest.fixture(autouse=True)
def rounding():
    with jax.default_matmul_precision(ROUNDED):
        yield


SHAPES = [(192, 128, 192), (257, 800, 529), (65, 1700, 51), (2500, 65, 31), (300, 800, 204), (205, 900, 77)]
"""Rows and columns end with one tile or two, whole or not, in each pair."""


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
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_the_rounded_factors(kernel, shape, axes, kind):
    x, y = factors(*shape, axes, kind)
    assert calls(lambda x, y: contract(x, y, *axes, jnp.float32), x, y) == 1
    expected = np.tensordot(rounded(x), rounded(y), axes=([axes[0]], [axes[1]]))
    np.testing.assert_allclose(product(x, y, axes), expected, atol=1e-4)


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_a_number_has_the_same_bits_whatever_rows_and_columns_are_beside_it(kernel, axes):
    x, y = factors(300, 2000, 200, axes)
    whole = product(x, y, axes)
    # The second is wider than it is high; with the others each pair of one or two tiles has a part in what is compared.
    for rows, columns in ((37, 90), (11, 60)), ((3, 60), (2, 200)), ((100, 300), (0, 74)), ((0, 75), (5, 80)):
        few = jnp.take(x, jnp.arange(*rows), axis=1 - axes[0]), jnp.take(y, jnp.arange(*columns), axis=1 - axes[1])
        np.testing.assert_array_equal(product(*few, axes), whole[slice(*rows), slice(*columns)])


def test_a_long_sum_is_as_near_as_a_short_one(kernel):
    """Of numbers of one sign, whose rounding errors do not cancel."""
    x, y = factors(40, 32768, 40, (0, 0))
    x, y = (1 + 0.01 * z for z in (x, y))
    expected = rounded(x).T @ rounded(y)
    # The matrix unit goes on from what was summed before.
    bound = 5e-6 if "amx_bf16" in kernels._processor() else 1e-6
    assert np.max(np.abs(product(x, y, (0, 0)) / expected - 1)) < bound


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
    assert calls(run, *factors(16, 128, 16, axes)) == 0 and calls(run, *factors(4096, 16, 1024, axes)) == 0
    assert calls(run, *factors(512, 0, 512, axes)) == 0 and not product(*factors(512, 0, 512, axes), axes).any()
    with jax.default_matmul_precision("highest"):
        assert calls(run, *factors(128, 256, 192, axes)) == 0


def test_each_kernel_lies_beside_a_module_of_its_name_whose_key_holds_it():
    assert [p for p in kernels.SOURCES if not p.with_suffix(".py").exists()] == []


def test_what_xla_cuts_over_a_mesh_is_left_to_it():
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))):
        assert calls(lambda x, y: contract(x, y, 0, 0, jnp.float32), *factors(256, 256, 192, (0, 0))) == 0


@pytest.mark.parametrize("sizes", [(24, 8), (8, 24)])
@pytest.mark.parametrize("product", [matmul, thin])
def test_gradients_are_those_of_the_product_whichever_side_is_wider(product, sizes):
    wide, narrow = sizes
    k = jax.random.split(jax.random.key(0), 3)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        x, weight, g = (
            jax.random.normal(key, s) for key, s in zip(k, [(2, 5, wide), sizes, (2, 5, narrow)], strict=True)
        )
        found = jax.vjp(product, x, weight)[1](g)
        for ours, theirs in zip(found, jax.vjp(lambda x, w: x @ w, x, weight)[1](g), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)
