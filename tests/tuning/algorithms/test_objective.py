"""One ragged batch, every split: micro-batches, packing and meshes give one loss and one gradient (R1)."""

import json
import subprocess
import sys

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
from rlhf.tuning.training.batch import micro_batches
from rlhf.tuning.training.forward import logps_and_entropy
from tests.support import with_devices
from tests.tuning.algorithms.objective_program import (
    LAYOUTS,
    MESHES,
    OBJECTIVES,
    columns,
    difference,
    loss_and_gradient,
)
from tests.tuning.tiny import CONFIG, PARAMS, ragged_groups


@pytest.mark.parametrize(
    "name", ["token-mean", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gspo", "constant"))]
)
def test_micro_batches_and_packing_change_nothing(name):
    wanted = loss_and_gradient(OBJECTIVES[name], LAYOUTS["one"])
    # The second and third objective take one other split each: every split is compiled.
    others = ["rows", "long"] if name == "token-mean" else [list(LAYOUTS)[1 + (name == "gspo")]]
    assert wanted[2] == 1
    for other in others:
        found = loss_and_gradient(OBJECTIVES[name], LAYOUTS[other])
        assert found[2] > 1
        assert max(difference(found, wanted)) < 1e-6


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
    objective, graph = Objective(kl_coef=0.0, correction=correction), decoder_graph(CONFIG)
    loss = policy_loss(graph, find(objective), objective, Compute())

    def wanted(params):
        logps, _ = logps_and_entropy(graph, params, batch, 1.0, Compute())
        rho = jnp.minimum(jnp.exp(jax.lax.stop_gradient(logps) - batch["mu_CT"]), 2.0) if correction != "none" else 1.0
        return -jnp.where(packed.mask_CT > 0, rho * batch["advantages_CT"] * logps, 0.0).sum() / tokens

    found, expected = jax.grad(lambda p: loss(p, batch, None)[0])(PARAMS), jax.grad(wanted)(PARAMS)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    assert largest > 1e-3
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * largest)


@pytest.mark.slow
def test_meshes_change_nothing():
    environment = with_devices(8)
    command = [sys.executable, "-m", "tests.tuning.algorithms.objective_program", *OBJECTIVES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(OBJECTIVES) * len(MESHES)
    for name, differences in found.items():
        assert max(differences) < 1e-6, name


def sums_of(surrogate):
    """The sums of a micro-batch's metrics, as shapes, for an algorithm with this surrogate."""
    groups = ragged_groups(7, count=3)
    (packed,) = micro_batches(groups, layout=LAYOUTS["one"], completion_tokens=8)
    made_up, counts = columns(groups), {"n_tokens": np.float32(9), "n_completions": np.float32(3)}
    batch = packed.arrays() | counts | {name: packed.gather(made_up[name]) for name in ("mu_CT", "advantages_CT")}
    objective = Objective(kl_coef=0.0)
    loss = policy_loss(decoder_graph(CONFIG), Algorithm(every_valid, surrogate), objective, Compute())
    return jax.eval_shape(loss, PARAMS, batch, None)[1]


def test_a_surrogate_may_leave_out_the_metrics():
    for surrogate in (
        lambda t: (-t.logps_CT * t.advantages_CT, {}),
        lambda t: reinforce(t),
    ):
        sums = dict.fromkeys(sums_of(surrogate), 1.0)
        found = summarise(sums) | mismatch_means(sums)
        assert {"approx_kl", "entropy", "mismatch_kl"} <= found.keys()
    own = sums_of(lambda t: (-t.logps_CT, {"mine": t.mask_CT.sum()}))
    assert "mine" in own and "ratio" in own


def test_a_loss_that_is_not_of_tokens_is_refused():
    with pytest.raises(ValueError, match="losses of shape"):
        sums_of(lambda t: (-t.logps_CT.sum(), {}))
