"""Samples with engines on meshes of this program's eight devices and prints what they gave; run by `test_meshes`."""

import contextlib
import dataclasses
import json
import re
import tempfile
from pathlib import Path

import jax
import numpy as np

from rlhf.tuning.axes import Axes
from rlhf.tuning.mesh import make_mesh, put_params
from rlhf.tuning.models.huggingface import save_decoder
from rlhf.tuning.rollout.engine.folder import load_folder
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.live import EngineStopped, Live
from rlhf.tuning.rollout.engine.placement import cache_shardings, sampling_mesh
from rlhf.tuning.rollout.engine.replicas import engine_over
from rlhf.tuning.rollout.requests import Request, Sampling
from tests.tuning.rollout.engine.support import PARAMS, lowered, requests_of
from tests.tuning.tiny import CONFIG

# One capacity and one chunk: each program is compiled for each device.
LIMITS = Limits(slots=4, context=80, steps=4, chunks=(32,), page_tokens=20)
SMALL = {"quantization": "int8", "kv_cache_dtype": "bfloat16"}
PAGED = {"cache": "paged"}
ENGINES = {
    "one": (None, 1, {}),
    "two": (Axes(data=2, fsdp=1), 2, {}),
    "eight": (Axes(fsdp=-1), 8, {}),
    "tensor": (Axes(data=2, fsdp=1, tensor=-1), 4, {}),
    "whole": (Axes(tensor=2), 2, {}),
    "small one": (None, 1, SMALL),
    "small tensor": (Axes(data=2, fsdp=1, tensor=-1), 4, SMALL),
    "paged one": (None, 1, PAGED),
    "paged two": (Axes(data=2, fsdp=1), 2, PAGED),
    "paged eight": (Axes(fsdp=-1), 8, PAGED),
    "paged tensor": (Axes(data=2, fsdp=1, tensor=-1), 4, PAGED),
}


def engines_of(engine):
    return getattr(engine, "engines", [engine])


def bytes_by_device(arrays):
    found = {}
    for x in arrays:
        for shard in x.addressable_shards:
            found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
    return found


def sampled(engine, requests):
    done = dict(engine.run(requests))
    return [done[i] for i in range(len(requests))]


def engine_of(axes, count, **options):
    # The last devices: the first of them all is nobody's default.
    mesh = sampling_mesh(axes, jax.devices()[-count:]) if axes else None
    return engine_over(mesh, CONFIG, limits=LIMITS, **options)


def same_samples():
    requests = requests_of(12, seed=5, max_tokens=12)
    found = {}
    for name, (axes, count, options) in ENGINES.items():
        engine = engine_of(axes, count, **options)
        # A trainer divides its parameters over all devices, or over the first four.
        trainers = jax.devices() if count == 8 else jax.devices()[:4]
        trained = put_params(PARAMS, make_mesh(Axes(), trainers)) if axes else PARAMS
        engine.load(trained)
        done = sampled(engine, requests)
        weights = bytes_by_device(x for e in engines_of(engine) for x in jax.tree.leaves(e.weights.now[1]))
        held = bytes_by_device(x for e in engines_of(engine) for x in jax.tree.leaves(e._pool.cache))
        found[name] = {
            "weights": weights,
            "cache_devices": sorted(held),
            "tokens": [[c.tokens for c in samples] for samples in done],
            "logps": [[c.logps for c in samples] for samples in done],
        }
        if name == "two":
            # Weights of the next round go the same way, and the samples of a seed come again to the bit.
            compiled = set(engine.programs)
            engine.load(jax.tree.map(lambda x: x * 1.0, trained))
            again = [[c.logps for c in samples] for samples in sampled(engine, requests)]
            found["again"] = again == found[name]["logps"]
            found["compiled"] = len(set(engine.programs) - compiled)
    return found


def steps_of_skewed_lengths(engine):
    """Decoding steps of each engine for many short runs and a few long ones, which come last."""
    lengths = [3] * 40 + [24] * 4
    before = list(engine.steps)
    list(engine.run([Request([1, 2, i], n, counter=i) for i, n in enumerate(lengths)]))
    return {"lengths": lengths, "steps": [b - a for a, b in zip(before, engine.steps, strict=True)]}


def broken(tokens):
    raise ZeroDivisionError("of this request")


def served(engine):
    """Requests through a server's thread, with weights that the engine reads from a folder; one cannot be served."""
    requests = [dataclasses.replace(r, samples=1) for r in requests_of(6, seed=3, max_tokens=16, stop_ids=())]
    alone = [c.tokens for (c,) in sampled(engine, requests)]
    with tempfile.TemporaryDirectory() as folder:
        save_decoder(Path(folder), CONFIG, PARAMS, {})
        load_folder(engine, Path(folder))
    with contextlib.closing(Live(engine)) as live:
        streams = [live.submit(r) for r in requests]
        ended = [stream.result()[0].tokens for stream in streams]
        failed = False
        try:
            live.submit(Request([5, 6], 16, find_stop=broken)).result()
        except EngineStopped:
            failed = True
        cancelled = live.submit(requests[1])
        cancelled.cancel()
        later = live.submit(requests[0]).result()[0].tokens
        stop = cancelled.result()[0].stop
    return {"failed": failed, "equal": ended == alone, "later": later == alone[0], "cancelled": stop}


def turns_stay(engine):
    """Where three turns of four episodes are sampled, and how many of their slots are left when they are given up."""
    places, last = {}, {}
    for _ in range(3):
        for i in range(4):
            # All but the last token of the turn before is in the slot that is kept.
            prompt = [i + 1, 2, 3] if i not in last else [*last[i][1], 4]
            request = Request(prompt, 4, Sampling(0.0), after=last[i][0] if i in last else None, keep=True)
            last[i] = engine.submit(request), prompt
        while not engine.idle:
            for update in engine.step():
                if update.completion:
                    (i,) = [i for i, (number, _) in last.items() if number == update.number]
                    places.setdefault(i, []).append(engine.replicas.index(engine._kept[update.number]))
                    last[i] = update.number, last[i][1] + update.completion.tokens
    for number, _ in last.values():
        engine.release(number)
    return {"places": places, "taken": sum(e._pool.taken for e in engines_of(engine))}


def gathered():
    """Bytes of the largest all-gather of each program of a replica over two devices, with a cache of 16 MiB a layer."""
    engine = engine_of(Axes(tensor=2), 2)
    engine.load(PARAMS)
    cache = jax.eval_shape(lambda: engine._pool.empty(64, 2048))
    cache = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), cache, cache_shardings(cache, engine._place)
    )
    kinds = "none", "one", "many"
    programs = lowered(engine, 64, 2048, 32, kinds, engine.weights.now[1], cache)
    return {name: largest_gather(program.compile().as_text()) for name, program in programs.items()}


def largest_gather(text):
    assert "all-reduce" in text
    sizes = [0]
    for kind, shape in re.findall(r"= \(?(\w+)\[([\d,]*)\][^=]* all-gather", text):
        bits = int(re.sub(r"\D", "", kind) or 8)
        sizes.append(int(np.prod([int(n) for n in shape.split(",") if n])) * bits // 8)
    return max(sizes)


def main() -> None:
    found = same_samples()
    engine = engine_of(Axes(data=2, fsdp=1), 2)
    engine.load(PARAMS)
    found["skewed"] = steps_of_skewed_lengths(engine)
    found["turns"] = turns_stay(engine)
    found["served"] = served(engine)
    found["gathered"] = gathered()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
