"""Moments in half of the memory or in the host's: what is stored and computed, and that a run resumes bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf.tuning.device import HOST_MEMORY, check_host_memory
from rlhf.tuning.mesh import init_state, state_shapes
from rlhf.tuning.training.checkpoint import Checkpoints
from rlhf.tuning.training.optimizers import OPTIMIZERS, optimizer_of, rounded, stochastically_rounded
from rlhf.tuning.training.step import NonFinite, make_step
from tests.support import QUICK
from tests.tuning.programs import printed
from tests.tuning.training.descent import distance, noise, normal, run, settings

KEY = jax.random.key(0)
MOMENTS = {"adamw": 10, "adam": 10, "nadamw": 10, "radam": 10, "amsgrad": 15, "rmsprop": 5, "sgd": 0, "lion": 5}
# Of Adafactor those that it does not factor; of Muon one of the kernel, and Adam's of the rest.
MOMENTS |= {"adafactor": 3, "muon": 9}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name not in ("adamw", "muon", "adafactor")]


def with_moments(name, moments):
    return optimizer_of(settings(name, moments=moments, clip_norm=100.0, weight_decay=0.0), 8)


def test_rounding_is_right_in_the_mean_and_leaves_what_can_be_represented():
    x = jnp.float32(1 + 1 / 512)
    seen = np.asarray(stochastically_rounded(jnp.full(2**16, x), KEY), np.float32)
    assert set(seen) == {1.0, 1 + 1 / 128}
    # A quarter of the way up; the standard error of the share is 0.002.
    assert (seen > 1).mean() == pytest.approx(0.25, abs=0.01)
    as_they_are = jnp.array([0.0, -0.0, 1.5, -2.0, jnp.inf, -jnp.inf, jnp.nan, 2.0**-100])
    for key in jax.random.split(KEY, 8):
        np.testing.assert_array_equal(stochastically_rounded(as_they_are, key).astype(jnp.float32), as_they_are)
    negative = np.asarray(stochastically_rounded(jnp.full(2**16, -x), KEY), np.float32)
    assert -negative.mean() == pytest.approx(float(x), rel=1e-4)


def test_a_second_moment_moves_where_the_nearest_value_would_hold_it():
    """Its changes are a thousandth of it or less, and neighbours in bfloat16 are 1/128 apart."""
    gradient = {"w": jnp.full(2**14, 0.5)}
    exact = optax.scale_by_adam(b2=0.999)
    mine = rounded(exact)
    state, wide = mine.init(gradient), exact.init(gradient)
    held = jnp.bfloat16(1.0)
    state = state._replace(inner=state.inner._replace(nu={"w": jnp.full(2**14, 1.0, jnp.bfloat16)}))
    wide = wide._replace(nu={"w": jnp.ones(2**14)})
    update = jax.jit(mine.update)
    for _ in range(100):
        _, state = update(gradient, state)
        _, wide = exact.update(gradient, wide)
        held = jnp.bfloat16(0.999 * jnp.float32(held) + 0.001 * 0.25)
    assert held == 1.0
    found, wanted = state.inner.nu["w"], float(wide.nu["w"][0])
    assert found.dtype == jnp.bfloat16 and wanted == pytest.approx(0.93, abs=0.01)
    assert float(found.astype(jnp.float32).mean()) == pytest.approx(wanted, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", *SLOW])
def test_every_rule_goes_down_with_moments_in_bfloat16(name):
    (_, state), losses = run(with_moments(name, "bfloat16"), 8)
    assert losses[-1] == pytest.approx(run(with_moments(name, "float32"), 8)[1][-1], rel=0.02)
    assert sum(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state)) == MOMENTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", *SLOW])
def test_every_rule_computes_the_same_with_moments_in_the_hosts_memory(name):
    with jax.enable_x64():
        (params, state), _ = run(with_moments(name, "host"), 3)
        (plain, _), _ = run(with_moments(name, "float32"), 3)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    assert sum(x.sharding.memory_kind == HOST_MEMORY for x in jax.tree.leaves(state)) == MOMENTS[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moments"),
    [("adamw", "bfloat16"), ("adamw", "host"), ("adafactor", "float32")]
    + [(name, "float32") for name in ("muon", "lion")],
)
def test_a_run_that_was_cut_goes_on_bit_for_bit(name, moments, tmp_path):
    optimizer = with_moments(name, moments)
    whole, _ = run(optimizer, 4)
    half, _ = run(optimizer, 2)
    first = Checkpoints(tmp_path / "c")
    first.save(2, half, {"step": 2})
    first.close()
    again = Checkpoints(tmp_path / "c")
    restored, position = again.restore(tuple(state_shapes(optimizer, normal(0), None)))
    again.close()
    places = [{leaf.sharding for leaf in jax.tree.leaves(tree)} for tree in (half, restored)]
    assert places[0] == places[1]
    resumed, _ = run(optimizer, 4, restored, position["step"])
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_step_that_is_not_finite_leaves_moments_on_the_host_as_they_were():
    optimizer = optimizer_of(settings("adamw", moments="host", max_skipped=1))
    step = make_step(distance, optimizer, 1)
    params, state, _ = step(normal(0), init_state(optimizer, normal(0), None), noise(0), normal(1))
    before = jax.tree.map(np.asarray, (params, state.inner_state))
    bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), normal(1))
    params, state, sums = step(params, state, noise(1), bad)
    assert sums["skipped"] == 1.0 and int(state.total_notfinite) == 1
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves((params, state.inner_state)), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))
    with pytest.raises(NonFinite):
        step(params, state, noise(2), bad)


@pytest.mark.slow
def test_a_mesh_draws_the_same_and_keeps_its_parts_on_the_host():
    found = printed("training.moments_program", devices=4, flags=QUICK)
    assert found["four"] == found["one"]
    assert found["on_host"] and found["share"] == 0.25 and found["restored"]


def test_a_device_without_such_memory_refuses_by_the_settings_name():
    with pytest.raises(ValueError, match="moments host needs memory of the kind pinned_host; this device has device"):
        check_host_memory("optimizer.moments host", ("device", "unpinned_host"))
