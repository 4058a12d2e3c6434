"""Types and exactness by the compute dtype: what it sets for weights, and the precision that products ask for."""

import contextlib
import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from rlhf.tuning.algorithms.supervised import sft_loss
from rlhf.tuning.compile_target import compiling_for
from rlhf.tuning.device import choose
from rlhf.tuning.models.decoder import decoder_graph, scalar_graph
from rlhf.tuning.models.huggingface import load_decoder, random_params, save_decoder, scalar_head_params
from rlhf.tuning.models.matmul import matmul
from rlhf.tuning.models.quantize import NF4, Int8, int8_decode
from rlhf.tuning.precision import exact_forward, in_real, of_gradients, real, resolved, rounds_products, using
from rlhf.tuning.settings import ComputeSettings
from rlhf.tuning.training.batch import Layout, micro_batches
from tests.tuning.tiny import CONFIG, PARAMS, ragged_groups

BY_XLA = dataclasses.replace(CONFIG, attention_softcap=50.0)
"""With attention by XLA, whose products are seen; those of the kernel, which takes no softcap, are all in float32."""
HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


@pytest.fixture(autouse=True)
def processor(monkeypatch):
    """One that multiplies bfloat16: `fast` is another type than `auto` there."""
    monkeypatch.setattr("rlhf.tuning.precision.multiplies_bfloat16", lambda: True)


@contextlib.contextmanager
def computing(kind):
    """As a stage of this compute dtype; `update` is a round's update in `fast`."""
    with using("fast" if kind == "update" else kind), exact_forward() if kind == "update" else contextlib.nullcontext():
        yield


def products(jaxpr):
    """The precision of every product of a program, by the type of its first argument."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append((equation.invars[0].aval.dtype.name, equation.params["precision"]))
        for inner in jaxprs_in_params(equation.params):
            found += products(inner)
    return found


def products_of_a_step(dtype, loss, graph, params):
    (packed,) = micro_batches(ragged_groups(count=2), layout=Layout(64, 4), completion_tokens=8)
    # As many completions as pairs take.
    counts = {"n_tokens": np.float32(9), "n_groups": np.float32(2), "margin_C": np.zeros(len(packed.ids_C), np.float32)}
    with computing(dtype):
        of_batch = loss(graph, choose("fast" if dtype == "update" else dtype).compute)
        program = jax.make_jaxpr(jax.grad(lambda p: of_batch(p, packed.arrays() | counts, None)[0]))
        return products(program(params).jaxpr)


def test_float32_is_exact_in_every_product_of_a_step():
    """By default an H100 rounds the inputs to TF32 and a TPU to bfloat16: that is not the type that was asked for."""
    found = products_of_a_step("float32", sft_loss, decoder_graph(BY_XLA), PARAMS)
    assert len(found) > 20 and {kind for kind, _ in found} == {"float32"}
    assert {precision for _, precision in found} == {HIGHEST}
    assert HIGHEST not in {p for _, p in products_of_a_step("bfloat16", sft_loss, decoder_graph(BY_XLA), PARAMS)}


def test_the_score_of_a_reward_model_is_exact_in_bfloat16_too():
    model = nnx.merge(scalar_graph(CONFIG), scalar_head_params(CONFIG, PARAMS))
    hidden = jnp.ones((3, 64), jnp.bfloat16)
    assert products(jax.make_jaxpr(model.scores)(hidden).jaxpr) == [("float32", HIGHEST)]


@pytest.mark.slow
def test_float64_is_set_up_before_it_is_asked_for(tmp_path):
    assert real() == np.float32 and ComputeSettings("float64").dtype == "float64"
    with pytest.raises(ValueError, match="rlhf.tuning.precision.use"):
        choose("float64")
    with using("float64"):
        assert real().name == choose("float64").compute.dtype == "float64"
        params = random_params(CONFIG, 0)
        save_decoder(tmp_path, CONFIG, params, {})
        jax.tree.map(np.testing.assert_array_equal, load_decoder(tmp_path)[1], params)
        assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float64"}
    narrow = in_real(params)
    assert {x.dtype.name for x in jax.tree.leaves(narrow)} == {"float32"}
    # A worker without float64 reads the same folder in its own type.
    jax.tree.map(np.testing.assert_array_equal, load_decoder(tmp_path)[1], narrow)


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float64)


def exactly(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize(("dtype", "forward"), [("fast", rounded), ("update", exactly)])
def test_fast_products_are_those_of_rounded_inputs_forward_and_back(dtype, forward):
    """Against float64: only inputs are rounded, to bfloat16; sums and results are as exact as float32."""
    rng = np.random.default_rng(0)
    x, weight, g = (rng.normal(size=s).astype(np.float32) for s in ((3, 7, 33), (33, 20), (3, 7, 20)))
    with computing(dtype):
        out, back = jax.vjp(matmul, jnp.asarray(x), jnp.asarray(weight))
        dx, dweight = back(jnp.asarray(g))
    expected_out = forward(x) @ forward(weight)
    x, weight, g = map(rounded, (x, weight, g))
    expected = expected_out, g @ weight.T, np.einsum("abi,abo->io", x, g)
    for found, exact in zip((out, dx, dweight), expected, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_every_product_with_a_weight_is_rounded_and_nothing_else_is_narrow():
    found = products_of_a_step("fast", sft_loss, decoder_graph(BY_XLA), PARAMS)
    kinds = Counter(kind for kind, _ in found)
    exact = Counter(kind for kind, _ in products_of_a_step("float32", sft_loss, decoder_graph(BY_XLA), PARAMS))
    # 7 projections and the head, forward and two ways back; attention's own products stay in float32.
    assert kinds["bfloat16"] == 3 * (7 + 1)
    assert kinds["float32"] == exact["float32"] - kinds["bfloat16"] > 0
    backward = Counter(kind for kind, _ in products_of_a_step("update", sft_loss, decoder_graph(BY_XLA), PARAMS))
    assert backward["bfloat16"] == 2 * (7 + 1)
    assert backward["float32"] == exact["float32"] - backward["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fast", "update"])
def test_a_fast_step_is_near_the_exact_one_and_its_weights_stay_float32(dtype):
    (packed,) = micro_batches(ragged_groups(count=2), layout=Layout(64, 4), completion_tokens=8)
    batch = packed.arrays() | {"n_tokens": np.float32(9)}

    def step(dtype):
        with computing(dtype):
            loss = sft_loss(decoder_graph(CONFIG), choose("float32").compute)
            return jax.value_and_grad(lambda p: loss(p, batch, None)[0])(PARAMS)

    (exact, slope), (found, fast) = step("float32"), step(dtype)
    if dtype == "fast":
        assert 0 < abs(found - exact) < 2e-3 * exact
    else:
        # A trainer that agrees with its sampler goes on agreeing.
        assert found == exact
    flat, near = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (slope, fast))
    assert near.dtype == np.float32
    assert 0 < np.linalg.norm(near - flat) < 0.02 * np.linalg.norm(flat)


def test_a_setting_of_products_ends_with_its_block():
    assert not rounds_products()
    with using("fast"):
        assert rounds_products() and choose("fast").compute.dtype == "float32"
        with using("float32"):
            assert not rounds_products()
        assert rounds_products()
        with exact_forward():
            assert not rounds_products()
            with of_gradients():
                assert rounds_products()
            assert not rounds_products()
        assert rounds_products()
    with of_gradients():
        assert not rounds_products()


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [Int8, NF4])
def test_a_stored_kernel_rounds_gradients_alone_too(wrap):
    rng = np.random.default_rng(0)
    x, weight, g = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((7, 64), (64, 64), (7, 64)))
    kernel = wrap(weight)

    def of(dtype):
        with computing(dtype):
            out, back = jax.vjp(kernel, x)
            return out, back(g)[0]

    (exact, slope), (out, back), (_, fast) = of("float32"), of("update"), of("fast")
    np.testing.assert_array_equal(out, exact)
    np.testing.assert_allclose(back, fast, atol=1e-5)
    assert np.abs(back - slope).max() > 1e-4


@pytest.mark.parametrize("multiplies", [True, False])
def test_fast_rounds_on_a_processor_that_multiplies_bfloat16_and_is_auto_elsewhere(monkeypatch, multiplies):
    monkeypatch.setattr("rlhf.tuning.precision.multiplies_bfloat16", lambda: multiplies)
    assert resolved("fast") == ("fast" if multiplies else "float32")
    with using("fast"):
        assert rounds_products() is multiplies
    with compiling_for("tpu"):
        assert resolved("fast") == "bfloat16"


def test_other_products_of_a_fast_process_are_as_ever():
    """Integers, and products of which XLA makes no call of its own."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5)), jnp.float32)
    with using("fast"):
        assert int(jax.jit(jnp.matmul)(jnp.arange(4), jnp.arange(4))) == 14
        found = jax.jit(jnp.matmul)(x, x.T)
    np.testing.assert_allclose(found, np.asarray(x) @ np.asarray(x).T, rtol=1e-6)


def test_fast_products_with_a_quantised_matrix_round_what_it_stands_for():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((7, 64), (64, 20)))
    kernel = Int8(weight)
    dense = int8_decode((kernel.codes[...], kernel.scale[...]), jnp.float32)
    with using("fast"):
        out, back = jax.vjp(kernel, x)
        (dx,) = back(jnp.ones_like(out))
    # Codes are exact in bfloat16, and the scale is applied to the sums; the gradient's product rounds the kernel.
    np.testing.assert_allclose(out, rounded(x) @ dense, rtol=0, atol=5e-5)
    np.testing.assert_allclose(dx, np.ones(out.shape) @ rounded(dense).T, rtol=0, atol=1e-5)
