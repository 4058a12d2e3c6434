"""Global normalisers of the policy, KL and value losses; masked junk behind completions and between their tokens."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.losses import importance, value
from rlhf.tuning.losses.aggregate import Counts, aggregate, count
from rlhf.tuning.losses.importance import RATIO_EDGES, log_ratio_bins, ratio_quantile
from rlhf.tuning.losses.kl import kl_per_token
from rlhf.tuning.losses.masks import sampled_mask
from rlhf.tuning.losses.returns import gae, whiten
from rlhf.tuning.losses.rewards import kl_penalty, sequence_rewards, token_rewards
from tests.tuning.losses.surrogates import LOSSES, MODES

B, T = 5, 6
PARTS = (slice(B), slice(2), slice(2, B))
LENGTHS = np.array([1, 6, 3, 5, 2])
MASK = (np.arange(T)[None] < LENGTHS[:, None]).astype(np.int32)
# Observations between sampled tokens.
MASK[1, 2:4] = MASK[3, 0] = 0
RANDOM = np.random.default_rng(0)
DATA = {
    "logps": -RANDOM.exponential(1.0, (B, T)),
    "old": -RANDOM.exponential(1.0, (B, T)),
    "adv": RANDOM.normal(size=B),
}


pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.slow
def test_counts_and_metric_sums_add_up_over_parts() -> None:
    added = Counts(*map(sum, zip(count(MASK[:2]), count(MASK[2:]), strict=True)))
    assert added == count(MASK) == (MASK.sum(), B)
    # A row that is marked counts although its tokens have gone; padding does not.
    assert count(np.zeros((3, T)), np.array([True, True, False])) == (0, 2)

    whole, *halves = ([jnp.asarray(x[rows]) for x in (*DATA.values(), MASK)] for rows in PARTS)
    sums, *cut = (LOSSES["clip"](*part)[1] for part in (whole, *halves))
    for name, total in sums.items():
        np.testing.assert_allclose(total, cut[0][name] + cut[1][name], rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_parts_add_up_to_that_of_the_batch(mode: str) -> None:
    constant = 24.0 if mode == "constant" else None
    whole, one, other = (
        aggregate(DATA["logps"][rows], MASK[rows], mode, **count(MASK)._asdict(), constant=constant) for rows in PARTS
    )
    np.testing.assert_allclose(one + other, whole, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_masked_junk_changes_nothing(name: str, junk: float) -> None:
    mask, adv = jnp.asarray(MASK), jnp.asarray(np.broadcast_to(DATA["adv"][:, None], (B, T)))

    def total(logps: jax.Array, old: jax.Array, adv: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        losses, sums = LOSSES[name](logps, old, adv, mask)
        loss = aggregate(losses, mask, "sequence-mean-token-mean", **count(MASK)._asdict())
        return loss, sums

    run = jax.value_and_grad(total, has_aux=True)
    (clean, clean_sums), clean_grad = run(jnp.asarray(DATA["logps"]), jnp.asarray(DATA["old"]), adv)
    dirty = [jnp.where(mask > 0, DATA[key], junk) for key in ("logps", "old")]
    (loss, sums), grad = run(*dirty, jnp.where(mask > 0, adv, junk))
    np.testing.assert_array_equal(loss, clean)
    np.testing.assert_array_equal(grad, clean_grad)
    jax.tree.map(np.testing.assert_array_equal, sums, clean_sums)
    assert np.isfinite(grad).all()


@pytest.mark.slow
@pytest.mark.parametrize("junk", [np.nan, np.inf])
def test_masked_junk_in_other_terms(junk: float) -> None:
    mask = jnp.asarray(MASK)
    dirty = {name: jnp.where(mask > 0, DATA[name], junk) for name in ("logps", "old")}
    clean = {name: jnp.where(mask > 0, DATA[name], 0.5) for name in ("logps", "old")}

    def results(data: dict[str, jax.Array]) -> dict[str, jax.Array]:
        a, b = data["logps"], data["old"]
        out = {
            f"kl-{kind}": jax.grad(lambda x, kind=kind: kl_per_token(x, b, kind, mask_BT=mask).sum())(a)
            for kind in ("k1", "k2", "k3", "abs")
        }
        out["kl-st"] = jax.grad(lambda x: kl_per_token(x, b, "k3", mask_BT=mask, straight_through="k2").sum())(a)
        out["value"] = jax.grad(lambda x: value.value_loss(x, b, mask, old_values_BT=b, clip=0.2)[0].sum())(a)
        out["tis"] = importance.importance_weights(a, b, mask, weight_max=2.0)
        out["mis"] = importance.importance_weights(
            a, b, mask, level="sequence", weight_max=2.0, outside="zero", batch_normalise=True
        )
        out["gate"] = importance.gated_weights(a, b, mask, band=(0.5, 2.0))
        out |= importance.mismatch_metrics(a, b, mask)
        penalty, scores = kl_penalty(a, b, mask, coef=0.1), jnp.asarray(DATA["adv"])
        out["token rewards"] = token_rewards(scores, penalty, mask)
        out["sequence rewards"] = sequence_rewards(scores, penalty)
        out["advantages"], out["returns"] = gae(a, b, mask, 0.9, 0.95)
        out["whitened"] = whiten(a, mask)
        return out

    got, want = results(dirty), results(clean)
    for name, expected in want.items():
        np.testing.assert_array_equal(got[name], expected, err_msg=name)
        assert np.isfinite(got[name]).all(), name


def test_gae_over_holes_is_that_of_a_plain_loop() -> None:
    rewards, values, after = DATA["logps"], DATA["old"], np.array([0.0, 0.7, 0.0, 0.3, 0.1])
    wanted = np.zeros((B, T))
    for b in range(B):
        following, a = after[b], 0.0
        for t in reversed(np.flatnonzero(MASK[b])):
            a = rewards[b, t] + 0.9 * following - values[b, t] + 0.9 * 0.8 * a
            wanted[b, t], following = a, values[b, t]
    found, _ = gae(rewards, values, MASK > 0, 0.9, 0.8, bootstrap_B=after)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_tokens_of_infinite_sampler_logprob_leave_both_sides() -> None:
    rollout = DATA["old"].copy()
    rollout[1, 2], rollout[3, 0] = -np.inf, np.nan
    mask = sampled_mask(LENGTHS, rollout)
    assert count(mask).n_tokens == LENGTHS.sum() - 2
    weights = importance.importance_weights(DATA["logps"], rollout, mask)
    assert np.isfinite(weights).all() and weights[1, 2] == 0 == weights[3, 0]


@pytest.mark.slow
def test_extreme_log_ratios_stay_finite() -> None:
    logps, old = jnp.array([[0.0, -1000.0]]), jnp.array([[-1000.0, 0.0]])
    for name, loss_fn in LOSSES.items():
        if name == "gmpo":
            continue
        grad = jax.grad(lambda x, f=loss_fn: f(x, old, jnp.array([-1.0]), jnp.ones((1, 2)))[0].sum())(logps)
        assert np.isfinite(grad).all(), name


@pytest.mark.parametrize("name", LOSSES)
def test_losses_trace_and_keep_float32(name: str) -> None:
    loss_fn = LOSSES[name]
    arrays = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in DATA.values()]
    losses, sums = jax.eval_shape(loss_fn, *arrays, jax.ShapeDtypeStruct((B, T), jnp.int32))
    assert losses.shape == (B, T) and losses.dtype == jnp.float32
    assert all(x.shape == () and x.dtype == jnp.float32 for x in sums.values())


def quantiles(log_ratios):
    old = jnp.asarray([log_ratios])
    found = log_ratio_bins(old, jnp.zeros_like(old), jnp.ones_like(old))
    bins = [float(found[f"ratio_bin_{i:02d}"]) for i in range(len(RATIO_EDGES) + 1)]
    return [ratio_quantile(bins, share) for share in (0.01, 0.5, 0.99)]


def test_a_trainer_that_agrees_with_the_sampler_has_ratios_of_1():
    assert quantiles([0.0] * 100) == [1.0, 1.0, 1.0]
    assert quantiles([5e-4, -5e-4] * 50) == [1.0, 1.0, 1.0]


def test_quantiles_lie_in_the_bin_of_what_they_are_of():
    low, middle, high = quantiles([-0.4] * 10 + [0.0] * 80 + [0.25] * 10)
    assert math.exp(-0.5) <= low <= math.exp(-0.3) and middle == 1.0 and math.exp(0.2) <= high <= math.exp(0.3)


def test_what_is_beyond_all_borders_counts_as_the_border():
    assert quantiles([9.0] * 100) == pytest.approx([math.exp(2.0)] * 3)


LOGITS = np.array([0.3, -1.2, 0.8, 0.1, -0.4])
REF = np.array([-0.5, 0.4, 0.2, 0.9, -1.0])


def logps(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.nn.log_softmax(logits), jax.nn.log_softmax(jnp.asarray(REF))


def of_policy(estimate: Callable[[jax.Array, jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Mean over tokens sampled from the policy, and its gradient; the sampling itself carries none."""

    def mean(logits: jax.Array) -> jax.Array:
        logp, logq = logps(logits)
        return (jax.lax.stop_gradient(jnp.exp(logp)) * estimate(logp[:, None], logq[:, None])[:, 0]).sum()

    return jax.value_and_grad(mean)(jnp.asarray(LOGITS))


def both(**options: str) -> tuple[jax.Array, jax.Array]:
    return of_policy(lambda logp, logq: kl_per_token(logp, logq, **options))


def true() -> tuple[jax.Array, jax.Array]:
    def exact(logits: jax.Array) -> jax.Array:
        logp, logq = logps(logits)
        return (jnp.exp(logp) * (logp - logq)).sum()

    return jax.value_and_grad(exact)(jnp.asarray(LOGITS))


def test_gradient_of_k1_as_a_loss_is_zero() -> None:
    np.testing.assert_allclose(both(kind="k1")[1], 0, atol=1e-12)


def test_gradient_of_k2_is_exact_and_that_of_k3_is_not() -> None:
    np.testing.assert_allclose(both(kind="k2")[1], true()[1], rtol=1e-10)
    assert np.abs(both(kind="k3")[1] - true()[1]).max() > 0.05


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_straight_through_has_both(kind: str) -> None:
    np.testing.assert_allclose(both(kind=kind)[0], true()[0], rtol=1e-10)
    for found, wanted in zip(both(kind=kind, straight_through="k2"), true(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_weighted_k2_is_exact_off_policy() -> None:
    old = jax.nn.log_softmax(jnp.asarray([0.0, 0.5, -0.5, 0.2, 0.1]))

    def off_policy(logits: jax.Array) -> jax.Array:
        estimate = kl_per_token(*logps(logits), "k3", straight_through="weighted-k2", old_logps_BT=old)
        return (jnp.exp(old) * estimate).sum()

    np.testing.assert_allclose(jax.grad(off_policy)(jnp.asarray(LOGITS)), true()[1], rtol=1e-10)


def test_k1_in_the_reward_gives_the_exact_gradient() -> None:
    found = of_policy(lambda logp, logq: jax.lax.stop_gradient(kl_per_token(logp, logq, "k1")) * logp)
    np.testing.assert_allclose(found[1], true()[1], rtol=1e-10)
