"""Attention in blocks, and of whole rows, equals its formula, value and gradient, for every kind of mask."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.models.blocked import BLOCK, SHORT, Segments, blocked_attention, plain_attention, visible
from tests.tuning.models.formulas import attention_formula
from tests.tuning.models.rows import segments_of


def inputs(length):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, n, 8)), jnp.float32) for n in (6, 2, 2))
    return q, k, v, segments_of(2, length)


def attend(form, q, k, v, segments, window, scale, softcap):
    if form == "blocks":
        return blocked_attention(q, k, v, segments, window, scale, softcap)
    return plain_attention(q, k, v, visible(segments, window, 0, q.shape[1], q.shape[1]), scale, softcap)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "length", "window", "softcap"),
    [("blocks", 40, 17, 2.0), ("blocks", 300, 17, 2.0), ("whole rows", 40, 17, 2.0), ("whole rows", 40, None, None)]
    + [
        pytest.param("blocks", length, window, softcap, marks=pytest.mark.slow)
        for length in (40, 300, 1200)
        for window, softcap in ((17, 2.0), (None, None), (17, None), (None, 2.0))
        if (window, softcap) != (17, 2.0) or length == 1200
    ],
)
def test_each_form_equals_the_formula(form, length, window, softcap):
    q, k, v, segments = inputs(length)
    g = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)

    def of(function):
        out, back = jax.vjp(lambda q, k, v: function(q, k, v, segments, window, 0.3, softcap), q, k, v)
        return out, *back(g)

    found, expected = (jax.jit(lambda f=f: of(f))() for f in (functools.partial(attend, form), attention_formula))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_a_window_may_be_traced():
    q, k, v, segments = inputs(140)
    run = jax.jit(lambda w: blocked_attention(q, k, v, segments, w, 0.3, None))
    np.testing.assert_allclose(run(9), attention_formula(q, k, v, segments, 9, 0.3, None), atol=1e-5)
    gradient = jax.jit(jax.grad(lambda q, w: blocked_attention(q, k, v, segments, w, 0.3, None).sum()))
    assert np.isfinite(gradient(q, 9)).all()


@pytest.mark.slow
def test_a_long_row_needs_a_twentieth_of_the_logits_memory():
    length = 4096
    shape = jax.ShapeDtypeStruct((1, length, 4, 16), jnp.float32)
    keys = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    ids = Segments(*(jax.ShapeDtypeStruct((1, length), jnp.int32),) * 3)

    def temporary(function):
        def two_layers(q, k, v, s):
            # In a scan, as in the decoder: in a straight program XLA keeps the forward pass's blocks.
            return jax.lax.scan(lambda q, _: (function(q, k, v, s, None, 0.25, None), None), q, length=2)[0].sum()

        loss = jax.grad(two_layers, argnums=(0, 1, 2))
        return jax.jit(loss).lower(shape, keys, keys, ids).compile().memory_analysis().temp_size_in_bytes

    assert temporary(blocked_attention) < temporary(attention_formula) / 20


def test_masks_are_not_held_over_the_layers():
    length = 2 * SHORT
    q, k, v, segments = inputs(length)

    def layer(x, _):
        return blocked_attention(x, k, v, segments, None, 0.3, None), None

    def loss(q):
        return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), q, None, length=2)[0].sum()

    text = jax.jit(jax.grad(loss)).lower(q).as_text()
    masks = [math.prod(int(n) for n in shape.split("x")) for shape in re.findall(r"tensor<([\dx]+)xi1>", text)]
    # Those of one block of queries, for each head where they meet the logits.
    assert max(masks) == q.shape[0] * q.shape[2] * BLOCK * length


@pytest.mark.slow
@pytest.mark.parametrize(("common", "softcap"), [(30.0, None), (300.0, None), (30.0, 50.0)])
@pytest.mark.parametrize("form", ["whole rows", "blocks"])
def test_in_bfloat16_what_keys_have_in_common_does_not_disturb_the_gradient_of_queries(form, common, softcap):
    length = 200
    rng = np.random.default_rng(0)
    q, k, v, g = (jnp.asarray(rng.normal(size=(2, length, n, 64)), jnp.bfloat16) for n in (4, 2, 2, 4))
    # As a bias does, for whose part of a logit softmax does not care.
    k = k.at[..., :4].add(common)
    v = v + jnp.asarray(rng.normal(size=(1, 1, 2, 64)), jnp.bfloat16)
    ones = jnp.ones((2, length), jnp.int32)
    segments = Segments(ones, 0 * ones, jnp.arange(length)[None] * ones)

    def ours(q):
        return attend(form, q, k, v, segments, None, 0.125, softcap)

    found = np.asarray(jax.vjp(ours, q)[1](g)[0], np.float64)
    with jax.enable_x64():
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, g)]
        expected = jax.vjp(lambda q: attention_formula(q, *exact[1:3], segments, None, 0.125, softcap), exact[0])[1](
            exact[3]
        )
    error = np.linalg.norm(found - expected[0]) / np.linalg.norm(expected[0])
    # 0.003 of each number is its rounding to bfloat16.
    assert error < 0.006
