"""The train step: exact under micro-batching (R1), and safe against non-finite gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf.tuning.device import Compute
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.batch import Layout, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from rlhf.tuning.training.optimizers import optimizer_of
from rlhf.tuning.training.step import NonFinite, copy, make_step
from tests.tuning.tiny import CONFIG, PARAMS, ragged_groups

GRAPH = decoder_graph(CONFIG)


def loss_fn(params, batch, frozen):
    logps, _ = logps_and_entropy(GRAPH, params, batch, 1.0, Compute())
    return -jnp.sum(logps) / batch["n_tokens"], {"tokens": jnp.sum(batch["mask_CT"])}


def optimizer():
    return optimizer_of(OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, max_skipped=2))


def batches_of(layout):
    groups = ragged_groups(7, count=8)
    n = np.float32(sum(len(c) for g in groups for c in g.completions))
    return [p.arrays() | {"n_tokens": n} for p in micro_batches(groups, layout=layout, completion_tokens=8)]


def sgd_step(layout):
    # SGD keeps the update proportional to the gradient; Adam would hide a wrong scale.
    sgd = optax.apply_if_finite(optax.sgd(1.0), 3)
    params = copy(PARAMS)
    return make_step(loss_fn, sgd, 2)(params, sgd.init(params), batches_of(layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(64, 1), *(one for one in (Layout(128, 1), Layout(64, 3)))])
def test_every_split_into_micro_batches_gives_the_same_step(layout):
    whole, _, sums = sgd_step(Layout(64, 100))
    split, _, split_sums = sgd_step(layout)
    assert len(batches_of(layout)) > len(batches_of(Layout(64, 100))) == 1
    assert split_sums["tokens"] == sums["tokens"]
    assert split_sums["loss"] == pytest.approx(sums["loss"], rel=1e-6)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_a_non_finite_step_changes_nothing_and_too_many_stop():
    def poisoned(params, batch, frozen):
        value, sums = loss_fn(params, batch, frozen)
        return value * batch["poison"], sums

    opt = optimizer()
    step = make_step(poisoned, opt, max_skipped=2)
    params = copy(PARAMS)
    state = opt.init(params)
    (batch,) = batches_of(Layout(64, 100))
    before = fingerprint(params)
    for _ in range(2):
        params, state, metrics = step(params, state, [batch | {"poison": np.float32("nan")}])
        assert metrics["skipped"] == 1.0 and fingerprint(params) == before
    params, state, metrics = step(params, state, [batch | {"poison": np.float32(1)}])
    assert metrics["skipped"] == 0.0 and fingerprint(params) != before
    with pytest.raises(NonFinite, match="3 steps in a row"):
        for _ in range(3):
            params, state, _ = step(params, state, [batch | {"poison": np.float32("inf")}])


@pytest.mark.slow
def test_the_sums_of_a_step_may_be_read_when_the_next_one_has_started():
    opt, batches = optimizer(), batches_of(Layout(64, 3))
    step = make_step(loss_fn, opt, 2)
    params, other = copy(PARAMS), copy(PARAMS)
    state, other_state = opt.init(params), opt.init(other)
    told, waiting = [], []
    for _ in range(3):
        params, state, sums = step(params, state, batches)
        told.append(sums)
        # The next step donates what this one has left.
        other, other_state, sums = step.start(other, other_state, batches, None)
        waiting.append(sums)
    assert [sums() for sums in waiting] == told and len({sums["loss"] for sums in told}) == 3
    assert fingerprint(params) == fingerprint(other)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "host"])
def test_a_step_that_has_started_when_too_many_are_found_out_changes_nothing(moments):
    def poisoned(params, batch, frozen):
        return jnp.sum(params["w"] * batch["poison"]), {}

    opt = optimizer_of(OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, max_skipped=1, moments=moments))
    params = {"w": jnp.arange(4.0)}
    state, step, waiting = jax.jit(opt.init)(params), make_step(poisoned, opt, 1), []
    for _ in range(3):
        params, state, sums = step.start(params, state, [{"poison": np.float32("nan")}], None)
        waiting.append(sums)
    assert waiting[0]()["skipped"] == 1.0
    # Read when the third has started, as a round does.
    with pytest.raises(NonFinite, match="2 steps in a row"):
        waiting[1]()
    np.testing.assert_array_equal(params["w"], np.arange(4.0))
