"""Loads models over eight devices and prints what each device and the host held; run by `test_loading`.

Usage: load_program.py FOLDER
"""

import dataclasses
import json
import sys
import threading
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from rlhf.tuning.axes import Axes
from rlhf.tuning.mesh import make_mesh
from rlhf.tuning.models.config import tiny
from rlhf.tuning.models.config_json import to_hugging_face
from rlhf.tuning.models.decoder import abstract_decoder
from rlhf.tuning.models.huggingface import (
    _places,
    load_decoder,
    load_scalar_head,
    random_params,
    save_decoder,
    scalar_head_params,
)
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.models.sharding import shardings

SMALL = dataclasses.replace(
    tiny(512), hidden_size=128, intermediate_size=256, num_heads=8, num_kv_heads=8, head_dim=16, tie_embeddings=False
)
LARGE = dataclasses.replace(
    tiny(32768), hidden_size=2048, intermediate_size=5632, num_layers=4, num_heads=16, num_kv_heads=16, head_dim=128
)
MESHES = {"fsdp": Axes(1, 8, 1), "tensor": Axes(1, 1, 8), "both": Axes(1, 4, 2), "copies": Axes(2, 2, 2)}


def on_each_device(tree):
    """Bytes of a tree on each device."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return list(held.values())


def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def small(folder):
    params = random_params(SMALL, 1)
    save_decoder(folder / "decoder", SMALL, params, {}, dtype="bfloat16", shard_bytes=200_000)
    save_decoder(folder / "scorer", SMALL, scalar_head_params(SMALL, params, params["norm"][...]), {})
    found = {"decoder": {}, "scorer": {}}
    for kind, load in (("decoder", load_decoder), ("scorer", load_scalar_head)):
        _, whole = load(folder / kind)
        for name, axes in MESHES.items():
            mesh = make_mesh(axes)
            _, cut = load(folder / kind, mesh)
            decoder = cut["decoder"] if kind == "scorer" else cut
            found[kind][name] = {
                "share": max(on_each_device(cut)) / size(cut),
                "same": fingerprint(cut) == fingerprint(whole),
                "placed": jax.tree.map(lambda x: x.sharding, decoder) == shardings(decoder, mesh),
            }
    return found


def write(folder):
    """A checkpoint of 1 GB, a layer in each file; every tensor has its own number in it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hugging_face(LARGE)))
    shapes = abstract_decoder(LARGE)[1]
    places = _places(LARGE)
    for number, (name, place) in enumerate(places.items()):
        leaf = shapes
        for key in place.path:
            leaf = leaf[key]
        shape = leaf.shape[len(place.part) :]
        value = np.full(shape[::-1] if place.transposed else shape, number, np.float32)
        save_file({name: value}, folder / f"part-{number:03}.safetensors")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def resident():
    with open("/proc/self/status") as status:
        # Anonymous pages alone: those of the files belong to the system's cache.
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


def large(folder):
    written = write(folder / "large")
    mesh = make_mesh(Axes(1, 8, 1))
    before, most, over = resident(), [0], threading.Event()

    def watch():
        while not over.wait(0.002):
            most[0] = max(most[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, params = load_decoder(folder / "large", mesh)
    over.set()
    watcher.join()
    leaves = jax.tree.leaves(params)
    numbers = sorted(float(v) for x in leaves for v in np.unique(np.asarray(x[..., 0])))
    return {
        "written": written,
        "loaded": size(params),
        "largest": max(x.nbytes for x in leaves),
        "grown": max(most[0], resident()) - before,
        "devices": on_each_device(params),
        "right": numbers == [float(n) for n in range(len(_places(LARGE)))],
    }


def main():
    folder = Path(sys.argv[1])
    print(json.dumps({"small": small(folder), "large": large(folder)}))


if __name__ == "__main__":
    main()
