"""Samples with engines on meshes of this program's eight devices and prints what they gave; run by `test_meshes`."""

import json

import jax

from tests.tuning.rollout.engine.support import PARAMS, requests_of
from tests.tuning.tiny import CONFIG
from tuning.axes import Axes
from tuning.mesh import make_mesh, put_params
from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.limits import Limits
from tuning.rollout.engine.placement import sampling_mesh

LIMITS = Limits(slots=8, context=128, steps=4, chunks=(8, 32))
TENSOR = Axes(data=2, fsdp=1, tensor=-1)
SMALL = {"quantization": "int8", "kv_cache_dtype": "bfloat16"}
ENGINES = {
    "one": (None, {}),
    "replicas": (Axes(fsdp=-1), {}),
    "tensor": (TENSOR, {}),
    "both": (Axes(tensor=2), {}),
    "small one": (None, SMALL),
    "small tensor": (TENSOR, SMALL),
}


def share(arrays):
    """Of all bytes, those on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in arrays) / sum(x.nbytes for x in arrays)


def tokens(engine, requests):
    done = dict(engine.run(requests))
    return [done[i] for i in range(len(requests))]


def main() -> None:
    requests = requests_of(12, seed=5, max_tokens=12)
    found = {}
    for name, (axes, options) in ENGINES.items():
        # The trainer has the first four devices, sampling the other four.
        trained = put_params(PARAMS, make_mesh(Axes(), jax.devices()[:4])) if axes else PARAMS
        mesh = sampling_mesh(axes, jax.devices()[4:]) if axes else None
        engine = Engine(CONFIG, limits=LIMITS, mesh=mesh, **options)
        engine.load(trained)
        numbers = [engine.submit(r) for r in requests_of(8)]
        engine.step()
        weights = jax.tree.leaves(engine._decoding[1])
        held = [x for layer in engine._pool.state.cache for x in layer.values()]
        found[name] = {
            "mesh": dict(mesh.shape) if mesh else {},
            "devices": sorted({d.id for x in [*weights, *held] for d in x.devices()}),
            "share_of_weights": share(weights),
            "share_of_cache": share(held),
        }
        for number in numbers:
            engine.cancel(number)
        done = tokens(engine, requests)
        found[name]["tokens"] = [[c.tokens for c in samples] for samples in done]
        found[name]["logps"] = [[c.logps for c in samples] for samples in done]
        # Weights of the next round go the same way and compile nothing.
        compiled = set(engine.programs)
        engine.load(jax.tree.map(lambda x: x * 1.0, trained))
        again = tokens(engine, requests)
        found[name]["again"] = [[c.tokens for c in samples] for samples in again] == found[name]["tokens"]
        found[name]["compiled"] = len(set(engine.programs) - compiled)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
