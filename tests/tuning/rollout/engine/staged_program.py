"""Policies that arrive at engines on meshes of this program's devices; run by `test_staged`."""

import json

import jax
import numpy as np
from flax import nnx

from tests.tuning.rollout.engine.support import CONFIG
from tuning.axes import Axes
from tuning.models.huggingface import random_params, tensors_from_params
from tuning.rollout.engine.limits import Limits
from tuning.rollout.engine.placement import sampling_mesh
from tuning.rollout.engine.replicas import Replicas, engine_over
from tuning.rollout.engine.staged import Layout, Staged, take, weights_of
from tuning.rollout.inside.rlhf_weights.frames import Fingerprint, buckets, opened

LIMITS = Limits(slots=2, context=64, chunks=(16,))
MESHES = {
    "two": (Axes(data=2, fsdp=1), 2),
    "halved": (Axes(data=2, fsdp=1, tensor=2), 4),
    "whole": (Axes(tensor=2), 2),
}


def arrived(engine, params):
    """(fingerprint of what was sent, of what is held) of a policy that arrives."""
    layout, seen = Layout(CONFIG, weights_of(engine)), Fingerprint()
    staged = Staged(layout)
    for bucket in buckets(tensors_from_params(nnx.to_pure_dict(params)), 3000, seen):
        for piece, data in opened(bucket):
            staged.write(piece, data)
    take(engine, layout, staged.state())
    return seen.hexdigest(), layout.fingerprint(weights_of(engine).now[1])


def on(axes, count):
    """[fingerprints are equal, weights and where they are are those of a load, devices, engines]."""
    mesh = sampling_mesh(axes, jax.devices()[-count:])
    engine, other = (engine_over(mesh, CONFIG, "float32", LIMITS) for _ in range(2))
    engine.load(random_params(CONFIG, 1))
    other.load(random_params(CONFIG, 2))
    sent, held = arrived(engine, random_params(CONFIG, 2))
    all_ = [[e.weights.now[1] for e in (x._engines if isinstance(x, Replicas) else [x])] for x in (engine, other)]
    pairs = list(zip(*map(jax.tree.leaves, all_), strict=True))
    same = all(a.sharding == b.sharding and np.array_equal(a, b) for a, b in pairs)
    return [sent == held, same, len({d for a, _ in pairs for d in a.devices()}), len(all_[0])]


if __name__ == "__main__":
    print(json.dumps({name: on(*mesh) for name, mesh in MESHES.items()}))
