"""Seconds and memory of a checkpoint and of the identity of a 1.5B model (float32) over two processes of four devices.

    python -m tests.bench.sharded_state FOLDER [LAYERS]

The parent starts both processes. Each prints the bytes of its shards, the seconds of a save, a restore and a
fingerprint, and its highest resident size in GB: after the arrays were made, after the save, and at the end.
"""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

from rlhf.tuning import multihost
from tests.support import with_devices


def peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(round(int(line.split()[1]) / 1e6, 2) for line in lines if line.startswith("VmHWM"))


def process(folder: Path, layers: int) -> None:
    multihost.initialize()
    import jax
    import numpy as np
    from flax import nnx

    from rlhf.stages.store.artifacts import Store
    from rlhf.stages.store.work import WorkFolder
    from rlhf.tuning.axes import Axes
    from rlhf.tuning.mesh import laid_out, make_mesh
    from rlhf.tuning.models.config import DecoderConfig
    from rlhf.tuning.models.decoder import abstract_decoder
    from rlhf.tuning.models.identity import fingerprint
    from rlhf.tuning.training.checkpoint import Checkpoints

    config = DecoderConfig(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_layers=layers, num_heads=12, num_kv_heads=2,
        head_dim=128, rope_theta=1e6, norm_eps=1e-6, tie_embeddings=True, max_positions=32768,
    )  # fmt: skip
    shapes = laid_out(abstract_decoder(config)[1], make_mesh(Axes(1, 8, 1)))

    def made(shape: jax.ShapeDtypeStruct) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            size = [len(range(*at.indices(n))) for at, n in zip(index, shape.shape, strict=True)]
            return np.random.default_rng(1).random(size, np.float32)

        return jax.make_array_from_callback(shape.shape, shape.sharding, part)

    params: nnx.State = jax.tree.map(made, shapes)
    shards = [shard.data for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
    found = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "shards_gb": sum(s.nbytes for s in shards) / 1e9,
    }
    found["peak_made"], baseline = peak(), peak() - found["shards_gb"]
    work = WorkFolder(Store(str(folder)), "sft", "k" * 64)
    checkpoints = Checkpoints(work.open() / "checkpoints", work.save, work.fetch)
    begun = time.monotonic()
    checkpoints.save(1, params, {"step": 1})
    found["save_returns"] = time.monotonic() - begun
    checkpoints.wait()
    found |= {"save": time.monotonic() - begun, "written_gb": checkpoints.bytes_written / 1e9, "peak_saved": peak()}
    for name in ("fingerprint", "fingerprint_again"):
        multihost.barrier()
        begun = time.monotonic()
        fingerprint(params)
        found[name] = time.monotonic() - begun
    checkpoints.close()
    del shards, params
    multihost.barrier()
    checkpoints = Checkpoints(work.open() / "checkpoints", work.save, work.fetch)
    begun = time.monotonic()
    checkpoints.restore(shapes)
    found |= {"restore": time.monotonic() - begun, "peak_restored": peak(), "without_shards": baseline}
    print(json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)
    checkpoints.close()


def main() -> None:
    folder, layers = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 28
    if multihost.in_group():
        process(folder, layers)
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.bench.sharded_state", str(folder), str(layers)]
    both = [subprocess.Popen(command, env=with_devices(4) | multihost.variables(address, 2, i)) for i in range(2)]
    try:
        sys.exit(max(abs(process.wait(1200)) for process in both))
    finally:
        for one in both:
            one.kill()


if __name__ == "__main__":
    main()
