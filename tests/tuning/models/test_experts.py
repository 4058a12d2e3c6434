"""Mixtures of experts: grouped products, the weighted sum, the balance loss, and replayed experts."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.axes import Axes
from rlhf.tuning.compile_target import compiling_for
from rlhf.tuning.models import grouped as gpu
from rlhf.tuning.models.experts import as_chosen, balance, counting, grouped, mixture, routed
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.models.lora import LoraConfig, trainable_shapes, tune
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.paged.engine import PagedEngine
from tests.aot.shapes import abstract_mesh
from tests.support import QUICK
from tests.tuning.models.lowering import lowered_for_tpu
from tests.tuning.models.mixtures import MIXTURE
from tests.tuning.programs import printed

EXACT = 1e-12
SIZES = [0, 70, 3, 0, 128, 1, 9, 0]
"""Rows of each expert: none, few, several blocks, and one block to the row."""


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_rows_meet_the_kernel_of_their_expert_and_give_it_their_gradient(platform):
    x, kernels, sizes = normal(sum(SIZES), 6), normal(len(SIZES), 6, 5, seed=1), jnp.asarray(SIZES)
    weight, expert = normal(sum(SIZES), 5, seed=2), np.repeat(np.arange(len(SIZES)), SIZES)

    def plain(x, kernels):
        return jnp.sum(jnp.einsum("ri,rio->ro", x, kernels[expert]) * weight)

    with compiling_for(platform):
        found = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(grouped(*a, sizes) * weight), (0, 1)))(x, kernels)
    expected = jax.value_and_grad(plain, (0, 1))(x, kernels)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=EXACT), found, expected)


@pytest.mark.usefixtures("float64")
def test_the_kernels_of_gpus_multiply_the_rows_of_each_expert_alone():
    x, g, kernels = normal(sum(SIZES), 32), normal(sum(SIZES), 48, seed=2), normal(len(SIZES), 32, 48, seed=1)
    sizes, experts = jnp.asarray(SIZES, jnp.int32), np.repeat(np.arange(len(SIZES)), SIZES)

    @jax.jit
    def found(x, g, kernels):
        ways = gpu.of_rows(x, kernels, sizes, False), gpu.of_rows(x, kernels.mT, sizes, True)
        return *ways, gpu.of_kernels(x, g, sizes, jnp.float64)

    product = np.einsum("ri,rio->ro", x, np.asarray(kernels)[experts])
    sums = np.stack([x[experts == e].T @ g[experts == e] for e in range(len(SIZES))])
    for ours, expected in zip(found(x, g, kernels), (product, product, sums), strict=True):
        np.testing.assert_allclose(ours, expected, atol=EXACT)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("normalise", [True, False])
def test_a_mixture_is_the_weighted_sum_of_its_experts(normalise):
    x, router, gate, up, back = (
        normal(2, 9, 6),
        normal(5, 6),
        *(normal(5, 6, 7, seed=s) for s in (1, 2)),
        normal(5, 7, 6),
    )

    def ours(x, router, gate, up, back):
        experts, weights, _ = routed(x, router, 2, normalise, as_chosen, None)
        into = [(gate, None), (up, None)]
        return mixture(x, experts, weights, into, (back, None), 5, lambda inner: jax.nn.silu(inner[0]) * inner[1])

    def plain(x, router, gate, up, back):
        probs = jax.nn.softmax(x @ router.T)
        kept = jnp.where(probs >= jnp.sort(probs)[..., -2:-1], probs, 0)
        kept = kept / kept.sum(-1, keepdims=True) if normalise else kept
        inner = jax.nn.silu(jnp.einsum("bld,edf->blef", x, gate)) * jnp.einsum("bld,edf->blef", x, up)
        return jnp.einsum("blef,efd,ble->bld", inner, back, kept)

    found, expected = (
        jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), range(5)))(x, router, gate, up, back)
        for f in (ours, plain)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=EXACT), found, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_the_balance_loss_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits, counted = normal(3, 2, 7, 5), jnp.arange(14).reshape(2, 7) % 7 < 5
    routing = counting(counted)
    each = [routing(p, jax.lax.top_k(p, 2)[1], None)[1] for p in jax.nn.softmax(logits)]
    sums = jax.tree.map(lambda *x: jnp.stack(x), *each)
    loss, metrics = balance(sums)
    gates = tuple(torch.tensor(np.asarray(layer).reshape(14, 5)) for layer in logits)
    expected = load_balancing_loss_func(gates, 5, 2, torch.tensor(np.asarray(counted, np.int64)))
    # transformers adds in float32.
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-6)
    assert metrics["router_tokens"] == 10 and metrics["router_other"] == 0
    assert 10 * 2 / 5 <= metrics["router_busiest"] <= 10
    assert 0 < metrics["router_entropy"] / 10 < np.log(5)


def test_recorded_experts_replace_the_chosen_ones():
    probs, chosen = jnp.full((1, 3, 4), 0.25), jnp.asarray([[[0, 1]] * 3])
    # Of the last token nothing is recorded.
    recorded = jnp.asarray([[[0, 3], [2, 3], [0, 0]]], jnp.uint8)
    experts, sums = counting(jnp.ones((1, 3), bool))(probs, chosen, recorded)
    np.testing.assert_array_equal(experts, [[[0, 3], [2, 3], [0, 1]]])
    np.testing.assert_array_equal(sums["hits_E"], [2, 1, 1, 2])
    assert sums["other"] == 1.5


def test_adapters_and_quantised_kernels_of_experts_are_refused_by_name():
    with pytest.raises(ValueError, match=r"lora.targets: gate is of experts.*name some of q, k, v, o"):
        trainable_shapes(MIXTURE, "decoder", LoraConfig())
    attention = LoraConfig(targets=("q", "v"))
    with pytest.raises(ValueError, match="quantize nf4: the experts"):
        tune(MIXTURE, "decoder", None, dataclasses.replace(attention, quantize="nf4"), seed=0)
    assert set(tune(MIXTURE, "decoder", random_params(MIXTURE, 0), attention, seed=0)[0]["layers"]) == {"q", "v"}
    with pytest.raises(ValueError, match="quantize int8: the experts"):
        Engine(MIXTURE, quantization="int8")
    with pytest.raises(ValueError, match="pages do not hold the experts.*cache: slots"):
        PagedEngine(MIXTURE)


@pytest.mark.slow
def test_a_training_pass_lowers_for_tpu_with_grouped_products():
    config = dataclasses.replace(MIXTURE, head_dim=128)
    text = lowered_for_tpu(abstract_mesh(Axes(1, 2, 2, context=2), 8), 1024, config)
    # Of each of three projections the gradient of the kernels, and two products by JAX's kernel: outputs are narrow.
    assert text.count('"chlo.ragged_dot"(') == 3 and len(re.findall(r"call @gmm", text)) >= 6


@pytest.mark.slow
def test_a_mixture_computes_the_same_on_every_mesh_and_loads_onto_it():
    found = printed("models.mixture_program", flags=QUICK)
    assert {name: gap for name, gap in found["gaps"].items() if gap > 1e-10} == {}
    assert found["loaded"] and found["share"] == 0.25
