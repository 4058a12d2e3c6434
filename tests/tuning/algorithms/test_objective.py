"""One ragged batch, every split: micro-batches and packing give one loss and one gradient (R1)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.algorithms.algorithm import Algorithm, every_valid, find
from rlhf.tuning.algorithms.diagnostics import mismatch_means, summarise
from rlhf.tuning.algorithms.objective import policy_loss
from rlhf.tuning.algorithms.settings import Objective
from rlhf.tuning.device import Compute
from rlhf.tuning.losses.policy import reinforce
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.training.batch import Layout, micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from tests.tuning.tiny import CONFIG, PARAMS, ragged_groups

GRAPH = decoder_graph(CONFIG)
OBJECTIVES = {
    "token-mean": Objective(kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0),
    "gspo": Objective(algorithm="gspo", aggregation="sequence-mean-token-mean", kl_coef=0.1, kl_kind="k3-k2"),
    "constant": Objective(aggregation="constant", constant=8.0, correction="mask"),
}
LAYOUTS = {"one": Layout(64, 64), "rows": Layout(64, 2), "long": Layout(256, 1)}


def columns(groups):
    """Made-up log-probabilities near the model's own, with advantages of both signs."""
    rng = np.random.default_rng(5)
    shape = (sum(len(g.completions) for g in groups), 8)
    near = -4.6 + 0.3 * rng.normal(size=(3, *shape)).astype(np.float32)
    advantages = np.broadcast_to(rng.normal(size=(shape[0], 1)), shape).astype(np.float32)
    return {"old_CT": near[0], "mu_CT": near[1], "ref_CT": near[2], "advantages_CT": advantages}


def loss_and_gradient(objective, layout):
    """Summed over the micro-batches of a step, as the train step does, and their number."""
    groups = ragged_groups(7, count=24)
    lengths = [len(c) for g in groups for c in g.completions]
    counts = {"n_tokens": np.float32(sum(lengths)), "n_completions": np.float32(len(lengths))}
    packed, given, parts = micro_batches(groups, layout=layout, completion_tokens=8), columns(groups), []
    program = jax.jit(jax.value_and_grad(policy_loss(GRAPH, find(objective), objective, Compute()), has_aux=True))
    for p in packed:
        (loss, _), grads = program(PARAMS, p.arrays() | counts | {k: p.gather(v) for k, v in given.items()}, None)
        parts.append((float(loss), jax.tree.map(np.asarray, grads)))
    loss, grads = jax.tree.map(lambda *x: sum(x[1:], x[0]), *parts)
    return loss, np.concatenate([g.ravel() for g in jax.tree.leaves(grads)]), len(packed)


@pytest.mark.parametrize(
    "name", ["token-mean", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gspo", "constant"))]
)
def test_micro_batches_and_packing_change_nothing(name):
    wanted = loss_and_gradient(OBJECTIVES[name], LAYOUTS["one"])
    # One other split each: every split is compiled.
    found = loss_and_gradient(OBJECTIVES[name], LAYOUTS["long" if name == "gspo" else "rows"])
    assert wanted[2] == 1 < found[2] and np.abs(wanted[1]).max() > 1e-3
    assert abs(found[0] - wanted[0]) < 1e-6
    assert np.abs(found[1] - wanted[1]).max() < 1e-6 * np.abs(wanted[1]).max()


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_with_one_update_only_the_current_policy_is_differentiated(correction):
    """Without `old_CT` the gradient is that of -rho A log pi, with rho a constant (R4)."""
    groups = ragged_groups(7, count=6)
    (packed,) = micro_batches(groups, layout=LAYOUTS["one"], completion_tokens=8)
    made_up = columns(groups)
    given = {name: packed.gather(made_up[name]) for name in ("mu_CT", "advantages_CT")}
    tokens = np.float32(packed.mask_CT.sum())
    batch = packed.arrays() | given | {"n_tokens": tokens, "n_completions": np.float32(len(packed.ids_C))}
    objective = Objective(kl_coef=0.0, correction=correction)
    loss = policy_loss(GRAPH, find(objective), objective, Compute())

    def wanted(params):
        logps, _ = logps_and_entropy(GRAPH, params, batch, 1.0, Compute())
        rho = jnp.minimum(jnp.exp(jax.lax.stop_gradient(logps) - batch["mu_CT"]), 2.0) if correction != "none" else 1.0
        return -jnp.where(packed.mask_CT > 0, rho * batch["advantages_CT"] * logps, 0.0).sum() / tokens

    found, expected = jax.grad(lambda p: loss(p, batch, None)[0])(PARAMS), jax.grad(wanted)(PARAMS)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    assert largest > 1e-3
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * largest)


def sums_of(surrogate):
    """The sums of a micro-batch's metrics, as shapes, for an algorithm with this surrogate."""
    groups = ragged_groups(7, count=3)
    (packed,) = micro_batches(groups, layout=LAYOUTS["one"], completion_tokens=8)
    made_up, counts = columns(groups), {"n_tokens": np.float32(9), "n_completions": np.float32(3)}
    batch = packed.arrays() | counts | {name: packed.gather(made_up[name]) for name in ("mu_CT", "advantages_CT")}
    objective = Objective(kl_coef=0.0)
    loss = policy_loss(GRAPH, Algorithm(every_valid, surrogate), objective, Compute())
    return jax.eval_shape(loss, PARAMS, batch, None)[1]


def test_a_surrogate_may_leave_out_the_metrics():
    for surrogate in (lambda t: (-t.logps_CT * t.advantages_CT, {}), lambda t: reinforce(t)):
        sums = dict.fromkeys(sums_of(surrogate), 1.0)
        found = summarise(sums) | mismatch_means(sums)
        assert {"approx_kl", "entropy", "mismatch_kl"} <= found.keys()
    own = sums_of(lambda t: (-t.logps_CT, {"mine": t.mask_CT.sum()}))
    assert "mine" in own and "ratio" in own


def test_a_loss_that_is_not_of_tokens_is_refused():
    with pytest.raises(ValueError, match="losses of shape"):
        sums_of(lambda t: (-t.logps_CT.sum(), {}))
