"""Optimizers by name: each goes down, and decays what it should."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf.tuning.settings import OptimizerSettings
from rlhf.tuning.training.optimizers import MUON_RMS, OPTIMIZERS, SCHEDULES, decays, optimizer_of, schedule_of
from tests.tuning.tiny import PARAMS
from tests.tuning.training.descent import IS_SHAPE, SHAPES, normal, run, settings


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_rule_goes_down(name):
    _, losses = run(optimizer_of(settings(name), 12), 12)
    assert losses[-1] < 0.8 * losses[0]


def test_adamw_is_that_of_optax():
    params, gradients = normal(0), normal(1)
    chosen = OptimizerSettings(learning_rate=1e-2, schedule="cosine", warmup_steps=2, weight_decay=0.1)
    mine, schedule = optimizer_of(chosen, 10), schedule_of(chosen, 10)
    clip = optax.clip_by_global_norm(1.0)
    theirs = optax.chain(clip, optax.adamw(schedule, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=decays))
    found = []
    for optimizer in (mine, theirs):
        state, now = optimizer.init(params), params
        for _ in range(3):
            updates, state = jax.jit(optimizer.update)(gradients, state, now)
            now = optax.apply_updates(now, updates)
        found.append(now)
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_muon_turns_kernels_into_rotations_and_leaves_the_rest_to_adam():
    optimizer = optimizer_of(settings("muon", learning_rate=1.0), 1)
    updates, _ = optimizer.update(normal(1), optimizer.init(normal(0)), normal(0))
    spectra = np.linalg.svd(updates["layers"]["q"]["kernel"], compute_uv=False) / (MUON_RMS * np.sqrt(136))
    assert spectra.shape == (2, 128) and spectra.min() > 0.5 and spectra.max() < 1.3
    for leaf in (updates["embedding"], updates["layers"]["q"]["bias"], updates["layers"]["mlp_norm"]):
        np.testing.assert_allclose(np.abs(leaf), 1.0, rtol=1e-3)


def test_decay_is_of_matrices_unless_all_are_asked_for():
    marks = decays(SHAPES_AS_ARRAYS := jax.tree.map(jnp.zeros, SHAPES, **IS_SHAPE))
    assert marks == {
        "embedding": True,
        "layers": {"q": {"kernel": True, "bias": False}, "mlp_norm": False},
        "score": False,
    }
    ones, still = jax.tree.map(jnp.ones_like, SHAPES_AS_ARRAYS), SHAPES_AS_ARRAYS
    for decay in ("matrices", "all"):
        optimizer = optimizer_of(settings("sgd", learning_rate=0.5, weight_decay=0.1, decay=decay), 1)
        updates, _ = optimizer.update(still, optimizer.init(ones), ones)
        wanted = jax.tree.map(lambda x, m: jnp.full_like(x, -0.05 * (m or decay == "all")), ones, marks)  # noqa: B023
        jax.tree.map(np.testing.assert_allclose, updates, wanted)
    # The names of a real model's parameters say the same.
    real = {jax.tree_util.keystr(p): m for p, m in jax.tree_util.tree_leaves_with_path(decays(PARAMS))}
    assert {p for p, m in real.items() if not m} == {p for p in real if "norm" in p}


@pytest.mark.parametrize(
    ("kind", "at_warmup", "late", "at_end"),
    [("constant", 1.0, 1.0, 1.0), ("linear", 1.0, 0.45, 0.1), ("cosine", 1.0, 0.41, 0.1), ("wsd", 1.0, 1.0, 0.1)],
)
def test_schedules_warm_up_and_end_where_they_say(kind, at_warmup, late, at_end):
    chosen = OptimizerSettings(learning_rate=1.0, schedule=kind, warmup_steps=4, end_fraction=0.1)
    schedule = schedule_of(chosen, 24)
    assert float(schedule(0)) == pytest.approx(0.2)
    assert float(schedule(4)) == pytest.approx(at_warmup)
    assert float(schedule(16)) == pytest.approx(late, abs=0.02)
    assert float(schedule(24)) == pytest.approx(at_end, abs=1e-6)


def test_the_recipe_names_what_there_is():
    hints = typing.get_type_hints(OptimizerSettings)
    assert set(typing.get_args(hints["name"])) == set(OPTIMIZERS)
    assert set(typing.get_args(hints["schedule"])) == set(SCHEDULES)


@pytest.mark.slow
def test_adafactor_limits_the_update_of_each_layer():
    """As of one matrix (Shazeer and Stern, 2018, section 6), not of all layers together."""
    rule = OPTIMIZERS["adafactor"](0.0, 0.95, 1e-8)
    calm = {"layers": {"q": {"kernel": jnp.ones((8, 128, 136))}}, "embedding": jnp.ones((128, 136))}
    state = rule.init(calm)
    for _ in range(3):
        _, state = rule.update(calm, state, calm)
    # The gradient of one layer jumps.
    jump = jax.tree.map(lambda x: x.at[0].multiply(100.0), calm)
    updates, _ = rule.update(jump, state, calm)
    each = np.sqrt(np.mean(np.square(updates["layers"]["q"]["kernel"]), axis=(1, 2)))
    assert each.max() == pytest.approx(1.0) and each[1:] == pytest.approx(each[1])
    # The embedding is one matrix.
    assert np.sqrt(np.mean(np.square(updates["embedding"]))) == pytest.approx(1.0)
