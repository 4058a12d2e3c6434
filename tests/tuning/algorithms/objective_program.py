"""Loss and gradient of one ragged batch under every split; run by `test_objective` on eight devices, prints JSON."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.algorithms.algorithm import find
from rlhf.tuning.algorithms.objective import policy_loss
from rlhf.tuning.algorithms.settings import Objective
from rlhf.tuning.axes import Axes
from rlhf.tuning.device import Compute
from rlhf.tuning.mesh import make_mesh, put_batch, put_params, row_shards
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.training.batch import Layout, micro_batches
from tests.tuning.tiny import CONFIG, PARAMS, ragged_groups

OBJECTIVES = {
    "token-mean": Objective(kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0),
    "gspo": Objective(algorithm="gspo", aggregation="sequence-mean-token-mean", kl_coef=0.1, kl_kind="k3-k2"),
    "constant": Objective(aggregation="constant", constant=8.0, correction="mask"),
}
LAYOUTS = {"one": Layout(64, 64), "rows": Layout(64, 2), "long": Layout(256, 1)}
MESHES = {"data": Axes(8, 1, 1), "fsdp": Axes(1, 8, 1), "tensor": Axes(2, 2, 2)}


def columns(groups):
    """Made-up log-probabilities near the model's own, with advantages of both signs."""
    rng = np.random.default_rng(5)
    shape = (sum(len(g.completions) for g in groups), 8)
    near = -4.6 + 0.3 * rng.normal(size=(3, *shape)).astype(np.float32)
    advantages = np.broadcast_to(rng.normal(size=(shape[0], 1)), shape).astype(np.float32)
    return {"old_CT": near[0], "mu_CT": near[1], "ref_CT": near[2], "advantages_CT": advantages}


def loss_and_gradient(objective, layout, mesh=None):
    """Summed over the micro-batches of a step, as the train step does."""
    groups = ragged_groups(7, count=24)
    lengths = [len(c) for g in groups for c in g.completions]
    counts = {"n_tokens": np.float32(sum(lengths)), "n_completions": np.float32(len(lengths))}
    packed = micro_batches(groups, layout=layout, completion_tokens=8, shards=row_shards(mesh))
    program = jax.jit(
        jax.value_and_grad(policy_loss(decoder_graph(CONFIG), find(objective), objective, Compute()), has_aux=True)
    )
    params, given = put_params(PARAMS, mesh), columns(groups)
    parts = []
    for p in packed:
        arrays = p.arrays() | counts | {k: p.gather(v) for k, v in given.items()}
        (loss, _), grads = program(params, put_batch(arrays, mesh), None)
        parts.append((float(loss), jax.tree.map(np.asarray, grads)))
    total = jax.tree.map(lambda *x: sum(x[1:], x[0]), *parts)
    return total[0], np.concatenate([g.ravel() for g in jax.tree.leaves(total[1])]), len(packed)


def difference(found, wanted):
    """Of the losses, and the largest of the gradients against the largest gradient."""
    return [abs(found[0] - wanted[0]), float(np.abs(found[1] - wanted[1]).max() / np.abs(wanted[1]).max())]


def main(names):
    with jax.default_matmul_precision("highest"):
        out = {}
        for name in names:
            wanted = loss_and_gradient(OBJECTIVES[name], LAYOUTS["one"])
            assert jnp.isfinite(wanted[0]) and np.abs(wanted[1]).max() > 1e-3
            for label, axes in MESHES.items():
                found = loss_and_gradient(OBJECTIVES[name], LAYOUTS["one"], make_mesh(axes))
                out[f"{name} {label}"] = difference(found, wanted)
        print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1:])
