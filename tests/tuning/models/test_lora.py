"""Adapters: exact where they start, the chain rule, merging, and a base that nothing changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf.tuning.device import Compute
from rlhf.tuning.models.decoder import decoder_graph, scalar_graph
from rlhf.tuning.models.huggingface import scalar_head_params
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.models.lora import (
    PROJECTIONS,
    LoraConfig,
    join,
    linears,
    merge,
    rounded,
    trainable_shapes,
    tune,
    tuned_graph,
)
from rlhf.tuning.precision import ROUNDED
from rlhf.tuning.training.forward import logps_and_entropy, scores
from tests.tuning.models.support import BATCH, PARAMS, gradient, logps, moved
from tests.tuning.tiny import CONFIG

KINDS = ("none", "int8", "nf4")
ONE_AND_SLOW = ("nf4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2]))


def kernels(layers):
    return {name: np.asarray(layers[name]["kernel"]) for name in PROJECTIONS}


def layers_of(tree):
    return nnx.to_pure_dict(tree)["layers"]


@pytest.mark.slow
def test_a_new_adapter_changes_no_bit():
    lora = LoraConfig(rank=4)
    np.testing.assert_array_equal(
        logps(lora, *tune(CONFIG, "decoder", PARAMS, lora, seed=1)), logps(None, PARAMS, None)
    )
    head = scalar_head_params(CONFIG, PARAMS, jax.random.normal(jax.random.key(0), (CONFIG.hidden_size,)))
    trainable, frozen = tune(CONFIG, "scalar", head, lora, seed=1)
    tuned = join(tuned_graph(CONFIG, "scalar", lora), trainable, frozen)
    score = jax.jit(lambda params: scores(scalar_graph(CONFIG), params, BATCH, Compute()))
    np.testing.assert_array_equal(score(tuned), score(head))
    assert "score" in trainable and "score" not in frozen


@pytest.mark.slow
def test_kernels_kept_in_the_type_of_computation_change_no_bit():
    lora = LoraConfig(rank=4)
    trainable, frozen = tune(CONFIG, "decoder", PARAMS, lora, seed=1, dtype="bfloat16")
    assert all(k.dtype == jnp.bfloat16 for k in kernels(layers_of(frozen)).values())
    wide = tune(CONFIG, "decoder", PARAMS, lora, seed=1)[1]
    trainable = moved(trainable)
    np.testing.assert_array_equal(logps(lora, trainable, frozen, "bfloat16"), logps(lora, trainable, wide, "bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=4, alpha=3.0),
        LoraConfig(rank=4, alpha=8.0, use_rslora=True, targets=("q", "down")),
        pytest.param(LoraConfig(rank=2, quantize="int8"), marks=pytest.mark.slow),
        pytest.param(LoraConfig(rank=2, quantize="nf4", targets=("v", "up")), marks=pytest.mark.slow),
    ],
)
def test_merged_and_unmerged_agree(lora):
    trainable, frozen = tune(CONFIG, "decoder", PARAMS, lora, seed=1)
    trainable = moved(trainable)
    merged = merge(CONFIG, "decoder", PARAMS, trainable, lora)
    assert jax.tree.structure(merged) == jax.tree.structure(PARAMS)
    apart, together = logps(lora, trainable, frozen), logps(None, merged, None)
    np.testing.assert_allclose(apart, together, atol=1e-4)
    assert np.abs(together - logps(None, PARAMS, None)).max() > 0.05
    if lora.quantize == "none":
        before, after = kernels(layers_of(PARAMS)), kernels(layers_of(merged))
        factors = layers_of(trainable)
        for name in PROJECTIONS:
            gain = 0.0
            if name in lora.targets:
                adapter = factors[name]["adapter"]
                gain = lora.scale * np.einsum("lir,lro->lio", np.float64(adapter["a"]), np.float64(adapter["b"]))
            np.testing.assert_allclose(after[name], before[name] + gain, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_AND_SLOW)
def test_the_gradient_is_that_of_the_merged_weights_by_the_chain_rule(kind):
    lora = LoraConfig(rank=4, alpha=6.0, quantize=kind)
    trainable, frozen = tune(CONFIG, "decoder", PARAMS, lora, seed=1)
    trainable = moved(trainable)
    merged = merge(CONFIG, "decoder", PARAMS, trainable, lora)
    mine, whole = gradient(lora, trainable, frozen), kernels(gradient(None, merged, None))
    factors = layers_of(trainable)
    for name in PROJECTIONS:
        a, b = (np.asarray(factors[name]["adapter"][x]) for x in "ab")
        want_a = lora.scale * np.einsum("lio,lro->lir", whole[name], b)
        want_b = lora.scale * np.einsum("lir,lio->lro", a, whole[name])
        assert np.abs(want_a).max() > 1e-3 and np.abs(want_b).max() > 1e-3
        np.testing.assert_allclose(mine[name]["adapter"]["a"], want_a, atol=1e-5)
        np.testing.assert_allclose(mine[name]["adapter"]["b"], want_b, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_an_argument_of_the_program_and_not_a_constant_in_it(kind):
    lora = LoraConfig(rank=4, quantize=kind)
    graph = tuned_graph(CONFIG, "decoder", lora)
    trainable, frozen = tune(CONFIG, "decoder", PARAMS, lora, seed=1)

    def loss(t, f, batch):
        return jnp.sum(logps_and_entropy(None, join(graph, t, f), batch, 1.0, Compute())[0])

    program = jax.make_jaxpr(jax.grad(loss))(trainable, frozen, BATCH)
    assert sum(np.size(c) for c in program.consts) < 100


def test_factors_start_uniform_within_bounds_each_on_its_own_stream():
    lora = LoraConfig(rank=8)
    found = layers_of(tune(CONFIG, "decoder", PARAMS, lora, seed=1)[0])
    for name, size_in in (("q", CONFIG.hidden_size), ("down", CONFIG.intermediate_size)):
        a, bound = np.asarray(found[name]["adapter"]["a"]), size_in**-0.5
        assert 0.97 * bound < np.abs(a).max() <= bound
        assert np.std(a) == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not found[name]["adapter"]["b"].any()
    assert not np.array_equal(found["q"]["adapter"]["a"], found["k"]["adapter"]["a"])
    assert not np.array_equal(found["q"]["adapter"]["a"][0], found["q"]["adapter"]["a"][1])
    # Which others are targets does not matter, the seed does.
    alone = tune(CONFIG, "decoder", PARAMS, dataclasses.replace(lora, targets=("down",)), seed=1)[0]
    np.testing.assert_array_equal(layers_of(alone)["down"]["adapter"]["a"], found["down"]["adapter"]["a"])
    other = layers_of(tune(CONFIG, "decoder", PARAMS, lora, seed=2)[0])
    assert not np.array_equal(other["q"]["adapter"]["a"], found["q"]["adapter"]["a"])
    normal = tune(CONFIG, "decoder", PARAMS, LoraConfig(rank=8, init="gaussian"), seed=1)[0]
    a = np.asarray(layers_of(normal)["gate"]["adapter"]["a"])
    assert np.std(a) == pytest.approx(1 / 8, rel=0.1) and np.abs(a).max() > 0.3


def test_shapes_are_known_without_making_arrays():
    lora = LoraConfig(rank=4, targets=("q", "o"))
    shapes = trainable_shapes(CONFIG, "decoder", lora)
    arrays = tune(CONFIG, "decoder", PARAMS, lora, seed=1)[0]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), arrays)
    assert sorted(layers_of(shapes)) == ["o", "q"]
    model = nnx.merge(decoder_graph(CONFIG), PARAMS)
    assert [name for name, _ in linears(model)] == sorted(PROJECTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "int8", "nf4"])
def test_what_an_adapter_starts_from_is_the_model_of_the_stored_kernels(kind):
    lora = LoraConfig(rank=2, quantize=kind)
    trainable, frozen = tune(CONFIG, "decoder", PARAMS, lora, seed=1)
    start = rounded(CONFIG, "decoder", PARAMS, kind)
    merged = merge(CONFIG, "decoder", PARAMS, trainable, lora)
    assert fingerprint(start) == fingerprint(merged)
    assert (fingerprint(start) == fingerprint(PARAMS)) == (kind == "none")
    np.testing.assert_allclose(logps(lora, trainable, frozen), logps(None, start, None), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE_AND_SLOW)
def test_in_fast_products_an_adapter_is_rounded_with_its_kernel_as_what_is_merged(kind):
    lora = LoraConfig(rank=4, alpha=6.0, quantize=kind)
    trainable, frozen = tune(CONFIG, "decoder", PARAMS, lora, seed=1)
    trainable = moved(trainable)
    merged = merge(CONFIG, "decoder", PARAMS, trainable, lora)
    plain, slope = logps(None, merged, None), gradient(lora, trainable, frozen)
    with jax.default_matmul_precision(ROUNDED):
        apart, together = logps(lora, trainable, frozen), logps(None, merged, None)
        rounded_slope = gradient(lora, trainable, frozen)
    # A weight in many is rounded the other way, where sums run in another order.
    assert np.abs(apart - together).mean() < 0.02 * np.abs(together - plain).mean()
    for name in PROJECTIONS:
        for factor in "ab":
            exact, found = (np.asarray(s[name]["adapter"][factor]) for s in (slope, rounded_slope))
            assert 0 < np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)
