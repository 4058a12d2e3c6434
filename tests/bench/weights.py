"""A policy to two servers, by a folder that all see and by HTTP: seconds, processor seconds, bytes and memory of each.

`python -m tests.bench.weights --repeats 4` starts two servers of this project's engine on loopback and gives them a
policy in turn: by a folder on the disk, by a folder in the memory of the machine (/dev/shm), and as a stream of
buckets. Each push is a whole one, as of a round's new policy: the folder is written again, the fingerprint computed
again. A folder is read straight into the layout of decoding. `proof_s` is the comparison of fingerprints behind a
stream; a folder has none. What is printed are JSON lines, one a push, and the medians of each way.

`--vllm .venv-vllm` starts two vLLM servers of that environment on the CPU instead, whose folders have a head of its own
and whose streams have not. Peaks and memory are then those of the largest process of a server.

The policy is SmolLM2-135M of the demo (`--model tiny`: a random one, to see that it works), in float32.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx

from stages.base import Config as BaseConfig
from stages.base import locate
from tests.bench.measure import emit
from tuning.models.byte_tokenizer import byte_tokenizer
from tuning.models.config import DecoderConfig, tiny
from tuning.models.config_json import from_hugging_face
from tuning.models.gguf import GGUFCheckpoint, GGUFFile
from tuning.models.huggingface import params_from_tensors, random_params, save_decoder, tensors_from_params, untied
from tuning.models.tokenizer import save_tokenizer, tokenizer_from_gguf
from tuning.rollout.servers.child import Child
from tuning.rollout.servers.kinds import KINDS
from tuning.rollout.servers.protocol import Policy, ServerStart, Way
from tuning.rollout.servers.server import RemoteServer

WAYS: dict[str, Way] = {"disk": "folder", "memory": "folder", "stream": "stream"}
SHARED = Path("/dev/shm")


def policy_of(model: str) -> tuple[DecoderConfig, Any, Any]:
    """Config, parameters and tokenizer. Prompts are token ids: any tokenizer would do, but for vLLM's look at it."""
    if model == "tiny":
        config = tiny(len(byte_tokenizer()))
        return config, random_params(config, 0), byte_tokenizer()
    path = locate(BaseConfig().source)
    file = GGUFFile(path)
    checkpoint = GGUFCheckpoint(file)
    config = from_hugging_face(checkpoint.config(), str(path))
    return config, params_from_tensors(config, checkpoint.tensors(), str(path)), tokenizer_from_gguf(file)


class Servers:
    """Two servers as processes, which take policies by folders and by buckets."""

    def __init__(self, folder: Path, vllm: Path | None):
        """vllm: the environment of vLLM; None: this project's engine."""
        self.roots: list[psutil.Process] = []
        self.all: list[RemoteServer] = []
        self._ends = contextlib.ExitStack()
        for number in range(2):
            self.all.append(self._vllm(folder, number, vllm) if vllm is not None else self._own(folder, number))
        for server in self.all:
            server.wait(900)

    def _own(self, folder: Path, number: int) -> RemoteServer:
        port = folder / f"port-{number}"
        command = [sys.executable, "-m", "tests.stages.sampling.http_server", "--model", str(folder / "model")]
        command += ["--host", "127.0.0.1", "--port", "0", "--max-model-len", "256", "--port-file", str(port)]
        process = psutil.Popen([*command, "--take-weights"], stdout=subprocess.DEVNULL)
        self._ends.callback(process.wait)
        self._ends.callback(process.kill)
        self.roots.append(process)
        while not port.exists() or not port.read_text():
            if process.poll() is not None:
                raise RuntimeError("a server has ended before it had a port")
            time.sleep(0.1)
        return RemoteServer(f"http://127.0.0.1:{port.read_text()}")

    def _vllm(self, folder: Path, number: int, vllm: Path) -> RemoteServer:
        kind = KINDS["vllm"]

        def words(model: Path, port: int) -> list[str]:
            start = [str(vllm.absolute() / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
            return [*start, *kind.arguments(ServerStart(model, "float32", 256, False, True), port)]

        space = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
        child = Child(words, kind.environment(streams=True) | space, folder / f"log-{number}")
        self._ends.callback(child.end)
        server = RemoteServer(child=child)
        server.start(folder / "model")
        assert child.pid is not None
        self.roots.append(psutil.Process(child.pid))
        return server

    @property
    def processes(self) -> list[psutil.Process]:
        """Those of both servers."""
        return [p for root in self.roots for p in (root, *root.children(recursive=True))]

    def cpu_seconds(self) -> float:
        """Of both since they were started."""
        return sum(sum(p.cpu_times()[:2]) for p in self.processes)

    def forget_peaks(self) -> None:
        """Has the kernel begin anew with the peaks of `peak_mb` (Linux)."""
        for process in self.processes:
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_mb(self) -> float:
        """The largest resident size of one of their processes since then."""
        status = [Path(f"/proc/{process.pid}/status").read_text() for process in self.processes]
        return max(int(text.split("VmHWM:")[1].split()[0]) for text in status) / 2**10

    def memory(self) -> float:
        """Resident MB of the largest one."""
        return max(p.memory_info().rss for p in self.processes) / 2**20

    def end(self) -> None:
        """Ends both."""
        self._ends.close()


@dataclasses.dataclass
class Pusher:
    """A trainer with one policy."""

    config: DecoderConfig
    params: Any
    servers: Servers
    vllm: bool
    sent: int = 0
    written: int = 0

    def policy(self, name: str, place: Path) -> Policy:
        """The policy under a name of this push."""

        def folder() -> Path:
            if not place.exists():
                # As `stages.sampling.servers` does for vLLM's kernels of a CPU.
                model = untied(self.config, self.params) if self.vllm else (self.config, self.params)
                save_decoder(place, *model, {}, dtype="float32")
                self.written += sum(p.stat().st_size for p in place.iterdir())
            return place

        def tensors(types: Mapping[str, str]) -> Iterator[tuple[str, np.ndarray]]:
            for tensor, value in tensors_from_params(nnx.to_pure_dict(self.params)):
                self.sent += value.nbytes
                yield tensor, value.astype(jnp.dtype(types[tensor]), copy=False)

        return Policy(name, folder, lambda pairs, t: [], [], tensors, lambda: dataclasses.asdict(self.config))

    def push(self, way: str, number: int, root: Path) -> dict[str, Any]:
        """One push to all servers: its figures."""
        kind = KINDS["native" if way == "stream" and not self.vllm else "vllm"]
        place = root / f"policy-{number}"
        policy = self.policy(f"{way}-{number}", place)
        self.sent = self.written = 0
        self.servers.forget_peaks()
        mine = psutil.Process()
        before, server_before = sum(mine.cpu_times()[:2]), self.servers.cpu_seconds()
        began = time.perf_counter()
        # As stages do, whose folder is written once.
        if way != "stream":
            policy.folder()
        with concurrent.futures.ThreadPoolExecutor(len(self.servers.all)) as threads:
            list(threads.map(lambda server: kind.reload(server, policy, WAYS[way]), self.servers.all))
            seconds, sent = time.perf_counter() - began, self.sent
            told = list(threads.map(lambda server: kind.weights(server, policy), self.servers.all))
        assert told == [policy.digest] * len(told), told
        shutil.rmtree(place, ignore_errors=True)
        return {
            "seconds": round(seconds, 3),
            "proof_s": round(time.perf_counter() - began - seconds, 3),
            "trainer_cpu_s": round(sum(mine.cpu_times()[:2]) - before, 2),
            "servers_cpu_s": round(self.servers.cpu_seconds() - server_before, 2),
            "mb_over_http": round(sent / 2**20, 1),
            "mb_in_files": round(self.written / 2**20, 1),
            "server_mb": round(self.servers.memory()),
            "server_peak_mb": round(self.servers.peak_mb()),
        }


def medians(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure."""
    return {f"median_{name}": round(statistics.median(one[name] for one in found), 3) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.weights", description=__doc__)
    parser.add_argument("--model", default="smol135", choices=["smol135", "tiny"])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--vllm", type=Path, help="the environment of infra/vllm.sh")
    args = parser.parse_args()
    config, params, tokenizer = policy_of(args.model)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS if way != "memory" or SHARED.is_dir()}
    with (
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as fast,
    ):
        root = Path(disk)
        model = (config, params) if args.vllm is None else untied(config, params)
        save_decoder(root / "model", *model, {}, dtype="float32")
        save_tokenizer(tokenizer, root / "model")
        servers = Servers(root, args.vllm)
        try:
            pusher = Pusher(config, params, servers, args.vllm is not None)
            for number in range(args.repeats + 1):
                for way in found:
                    one = pusher.push(way, number, Path(fast) if way == "memory" else root)
                    # The first ones also read what programs need.
                    emit(f"weights by {way}", args.model, push=number, **one)
                    if number:
                        found[way].append(one)
        finally:
            servers.end()
    for way, all_ in found.items():
        print(json.dumps({"work": f"weights by {way}", "pushes": len(all_), **medians(all_)}))


if __name__ == "__main__":
    main()
