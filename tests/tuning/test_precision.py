"""Types and exactness by the compute dtype: what it sets for weights, and the precision that products ask for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.tuning.tiny import CONFIG, PARAMS, ragged_groups
from tuning.algorithms.supervised import sft_loss
from tuning.device import Compute, choose
from tuning.models.decoder import decoder_graph, scalar_graph
from tuning.models.huggingface import load_decoder, random_params, save_decoder, scalar_head_params
from tuning.precision import in_real, real, using
from tuning.settings import ComputeSettings
from tuning.training.batch import Layout, micro_batches

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def products(jaxpr):
    """The precision of every product of a program, by the type of its first argument."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append((equation.invars[0].aval.dtype.name, equation.params["precision"]))
        for inner in jax.core.jaxprs_in_params(equation.params):
            found += products(inner)
    return found


def products_of_a_step(dtype, loss, graph, params):
    (packed,) = micro_batches(ragged_groups(count=2), layout=Layout(64, 4), completion_tokens=8)
    # As many completions as pairs take.
    counts = {"n_tokens": np.float32(9), "n_groups": np.float32(2), "margin_C": np.zeros(len(packed.ids_C), np.float32)}
    with using(dtype):
        program = jax.make_jaxpr(jax.grad(lambda p: loss(graph, Compute(dtype))(p, packed.arrays() | counts, None)[0]))
        return products(program(params).jaxpr)


def test_float32_is_exact_in_every_product_of_a_step():
    """By default an H100 rounds the inputs to TF32 and a TPU to bfloat16: that is not the type that was asked for."""
    found = products_of_a_step("float32", sft_loss, decoder_graph(CONFIG), PARAMS)
    assert len(found) > 20 and {kind for kind, _ in found} == {"float32"}
    assert {precision for _, precision in found} == {HIGHEST}
    assert HIGHEST not in {p for _, p in products_of_a_step("bfloat16", sft_loss, decoder_graph(CONFIG), PARAMS)}


def test_the_score_of_a_reward_model_is_exact_in_bfloat16_too():
    model = nnx.merge(scalar_graph(CONFIG), scalar_head_params(CONFIG, PARAMS))
    hidden = jnp.ones((3, 64), jnp.bfloat16)
    assert products(jax.make_jaxpr(model.scores)(hidden).jaxpr) == [("float32", HIGHEST)]


def test_float64_is_set_up_before_it_is_asked_for(tmp_path):
    assert real() == np.float32 and ComputeSettings("float64").dtype == "float64"
    with pytest.raises(ValueError, match="tuning.precision.use"):
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
