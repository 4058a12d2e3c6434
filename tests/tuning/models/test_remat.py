"""Rematerialisation changes what the backward pass keeps, and neither the loss nor a gradient."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.device import Compute, choose
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.remat import NAMES
from rlhf.tuning.settings import Remat
from rlhf.tuning.training.batch import Group, Layout, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from tests.tuning.models.support import BATCH, PARAMS
from tests.tuning.tiny import CONFIG


def loss(params, remat):
    logps, _ = logps_and_entropy(decoder_graph(CONFIG), params, BATCH, 1.0, Compute("float64", remat))
    return -logps.sum()


def wide():
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), PARAMS)


@functools.cache
def differentiated(remat):
    with jax.enable_x64():
        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss), static_argnums=1)(wide(), remat))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [name for name in NAMES if name != "products"])
def test_every_policy_has_the_same_loss_and_gradient(remat):
    (value, gradient), (wanted, theirs) = differentiated(remat), differentiated("products")
    assert value == pytest.approx(wanted, rel=1e-12)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * np.abs(b).max())


def stacked(remat):
    """Elements on the device and on the host that the loop over layers keeps, of each token of a long row."""
    prompt, completion = list(range(100)), list(range(90)) * 4
    packed = micro_batches([Group(prompt, [completion], [0])], layout=Layout(512, 1), completion_tokens=384)
    batch = packed[0].arrays()

    def long(params):
        return logps_and_entropy(decoder_graph(CONFIG), params, batch, 1.0, Compute(remat=remat))[0].sum()

    traced = jax.make_jaxpr(jax.grad(long))(PARAMS)
    layers = (e for e in traced.eqns if e.primitive.name == "scan" and e.params["length"] == CONFIG.num_layers)
    forward = next(e for e in layers if not e.params["reverse"])
    # What is kept of each layer has an axis more outside than within.
    pairs = zip(forward.outvars, forward.params["jaxpr"].out_avals, strict=True)
    outputs = [v.aval for v, of_layer in pairs if v.aval.shape != of_layer.shape]
    tokens = CONFIG.num_layers * batch["tokens_BL"].size
    on_host = [x.memory_space == jax.memory.Space.Host for x in outputs]
    return tuple(sum(x.size for x, h in zip(outputs, on_host, strict=True) if h == side) / tokens for side in (0, 1))


@pytest.mark.slow
def test_what_is_kept_of_a_token_is_what_the_table_says():
    c = CONFIG
    d, f, a = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim
    # Attention in blocks also keeps a normaliser of each head.
    w, attended = a + 2 * c.num_kv_heads * c.head_dim, a + c.num_heads
    assert stacked("products") == (d + w + attended + d + 2 * f, 0)
    assert stacked("dots") == (d + w + d + 2 * f, 0)
    assert stacked("attention") == (d + attended, 0)
    assert stacked("full") == (d, 0)
    assert stacked("offload") == (0, d)
    assert stacked("none")[0] > stacked("products")[0]


def test_the_settings_name_what_there_is():
    assert set(typing.get_args(Remat)) == {"auto", *NAMES}
    assert all(choose(remat=name).compute.remat == name for name in NAMES)
