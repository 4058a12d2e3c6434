"""Quantised kernels: the published levels and layout, stated error bounds, exact gradients, no dense copy kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm

from rlhf.tuning.models.quantize import BLOCK, FORMATS, NF4, NF4_LEVELS, Int8

pytestmark = pytest.mark.slow

# Whole blocks, and pieces of them in a stack; the others are between.
SHAPES = [(128, 24), (2, 100, 7), *(pytest.param(s, marks=pytest.mark.slow) for s in ((3, 128, 24), (48, 10)))]


def kernel(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape) * jnp.linspace(0.5, 2.0, shape[-1])


def test_the_levels_are_quantiles_of_a_normal_distribution():
    # Dettmers et al., 2023: 8 levels from 0 up and 7 down from it, the outermost at this average of two quantiles.
    offset = 0.5 * ((1 - 1 / 30) + (1 - 1 / 32))
    up = norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    down = -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([up, [0.0], down])) / np.max(up)
    np.testing.assert_allclose(levels, NF4_LEVELS, atol=1e-6)


def test_nf4_codes_and_packing_are_those_of_the_reference_layout():
    weight = np.asarray(kernel(128, 24)).T  # the layout of torch: (out, in), blocks along the flat order
    blocks = weight.reshape(-1, BLOCK)
    scaled = blocks / np.abs(blocks).max(axis=1, keepdims=True)
    codes = np.abs(scaled[..., None] - np.asarray(NF4_LEVELS, np.float32)).argmin(-1).astype(np.uint8).reshape(-1)
    packed = codes[::2] << 4 | codes[1::2]
    np.testing.assert_array_equal(np.asarray(NF4(kernel(128, 24)).codes[...]).reshape(-1), packed)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_errs_by_half_a_step_at_most(shape):
    w = kernel(*shape)
    bound = jnp.max(jnp.abs(w), axis=-2, keepdims=True) / 254
    error = jnp.abs(Int8(w).dense() - w)
    assert Int8(w).dense().shape == shape
    assert bool(jnp.all(error <= bound * 1.0001)) and float(jnp.max(error / bound)) > 0.9


@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_errs_by_half_a_gap_and_the_rounding_of_its_absmax_at_most(shape):
    w = kernel(*shape)
    back = NF4(w).dense()
    assert back.shape == shape
    rows = jnp.pad(jnp.swapaxes(w, -1, -2), [(0, 0)] * (w.ndim - 1) + [(0, -shape[-2] % BLOCK)])
    absmax = jnp.abs(rows.reshape(*rows.shape[:-1], -1, BLOCK)).max(-1)
    spread = absmax - absmax.mean(axis=(-1, -2), keepdims=True)
    gap = max(b - a for a, b in zip(NF4_LEVELS, NF4_LEVELS[1:], strict=False))
    bound = jnp.repeat(absmax * gap / 2, BLOCK, axis=-1) + jnp.abs(spread).max() / 254
    error = jnp.abs(back - w)
    assert bool(jnp.all(error <= jnp.swapaxes(bound, -1, -2)[..., : shape[-2], :] * 1.0001))


def test_nf4_of_normal_weights_has_the_expected_mean_error():
    # Of N(0, 1) in blocks of 64, exact absmax: 0.0728 by the published levels; double quantisation adds little.
    w = jax.random.normal(jax.random.key(1), (512, 512))
    assert 0.0720 < float(jnp.abs(NF4(w).dense() - w).mean()) < 0.0735


@pytest.mark.parametrize(("name", "most"), [("int8", 8.06), ("nf4", 4.13)])
def test_bits_a_weight(name, most):
    w = kernel(2, 576, 1536)
    stored = [v[...] for v in vars(FORMATS[name](w)).values() if hasattr(v, "get_metadata")]
    assert most - 0.07 < 8 * sum(x.nbytes for x in stored) / w.size < most


@pytest.mark.parametrize("name", FORMATS)
def test_a_stack_is_its_layers_and_zero_stays_zero(name):
    stack = kernel(3, 128, 24).at[1].set(0.0)
    together = FORMATS[name](stack).dense()
    for i in range(3):
        np.testing.assert_array_equal(together[i], FORMATS[name](stack[i]).dense())
    assert not together[1].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_and_its_gradient_are_those_of_the_dense_kernel(name, dtype):
    module, x = FORMATS[name](kernel(100, 24)), jax.random.normal(jax.random.key(2), (5, 100)).astype(dtype)
    dense = module.dense().astype(dtype)
    # Codes are up to 127: float32 rounds a sum of 100 such products by some 1e-5.
    tolerance = 5e-5 if dtype == "float32" else 0.05
    np.testing.assert_allclose(module(x).astype(float), (x @ dense).astype(float), rtol=tolerance, atol=tolerance)
    g = jax.random.normal(jax.random.key(3), (5, 24)).astype(dtype)
    (mine,) = jax.vjp(module, x)[1](g)
    assert mine.dtype == x.dtype
    np.testing.assert_allclose(mine.astype(float), (g @ dense.T).astype(float), rtol=tolerance, atol=tolerance)


def test_a_product_of_int8_rounds_its_result_alone():
    module, x = Int8(kernel(256, 24)), jax.random.normal(jax.random.key(2), (64, 256)).astype("bfloat16")
    codes, scale = (np.asarray(v[...], np.float64) for v in (module.codes, module.scale))
    exact = np.asarray(x, np.float64) @ codes * scale
    # Half a unit in the last of 8 bits, and sums in float32.
    np.testing.assert_allclose(np.asarray(module(x), np.float64), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_no_dense_kernel_is_kept_for_the_backward_pass(name):
    from flax import nnx

    graph, state = nnx.split(FORMATS[name](kernel(6, 64, 64)))

    def loss(x, state):
        return jnp.sum(jax.lax.scan(lambda x, s: (jnp.sin(nnx.merge(graph, s)(x)), None), x, state)[0])

    program = jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 64)), state)
    kept = [v.aval for eqn in program.eqns for v in eqn.outvars]
    assert any(a.shape == (6, 2, 64) for a in kept)  # the inputs of the layers are
    assert not [a for a in kept if a.size >= 6 * 64 * 64 and a.dtype == jnp.float32]
