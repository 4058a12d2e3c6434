"""Policies by vLLM's weight transfer to two real vLLM servers on the CPU: `make test-vllm`.

SmolLM2-135M in float32, on loopback. Figures are printed.
"""

import dataclasses
import functools
import http.server
import os
import threading
import time
from typing import Any

import httpx
import jax
import pytest

from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.servers.protocol import ServerLost, StalePolicy
from rlhf.tuning.rollout.servers.server import RemoteServer
from rlhf.tuning.rollout.servers.transfer import Transfer, digests
from tests.faults.vllm_servers import child, gap, remote, run, smollm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return smollm(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    """Two servers that were started on the policy `first`, and do not know its name."""
    folder = tmp_path_factory.mktemp("vllm")
    made = [RemoteServer(child=child(folder, number)) for number in range(2)]
    began = time.monotonic()
    for one in made:
        one.start(model.place("first"))
    for one in made:
        one.wait(900)
    print(f"two servers are healthy after {time.monotonic() - began:.0f} s")
    yield [one.url for one in made]
    for one in made:
        one.child.end()


@pytest.fixture(scope="module")
def web(model):
    """The URL of the policies' folder, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_request(self, *_: Any) -> None:
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(model.folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def sent(model: Any, name: str, root: str, **files: str) -> Any:
    """A policy whose files servers read below a root."""
    transfer = Transfer(root, name, digests(model.place(name)) | files)
    return model.policy(name, transfer=lambda: transfer)


def test_policies_go_to_two_servers_and_log_probabilities_are_the_trainers(model, pair, web):
    engine, requests = remote(*map(RemoteServer, pair)), model.requests(8, 0.8, samples=2, tokens=24)
    for name, root in (("second", str(model.folder)), ("third", web[0]), ("first", web[0])):
        policy = sent(model, name, root)
        began = time.monotonic()
        engine.load(policy)
        seconds = time.monotonic() - began
        found = run(engine, requests)
        near = gap(model, name, requests, found, 0.8)
        others = {n: gap(model, n, requests, found, 0.8) for n in model.params if n != name}
        print(f"{name} from {root}: at both after {seconds:.1f} s, {near:.2g} from its trainer, {others} from others'")
        assert set(engine.gaps) == set(pair)
        assert near < 5e-4
        assert min(others.values()) > 20 * near
        assert {httpx.get(f"{url}/weight_info").json()["weight_version"] for url in pair} == {name}
    # Each server has downloaded two policies.
    assert sum(path.endswith("/model.safetensors") for path in web[1]) == 4
    # A trainer that was started again transfers nothing.
    del web[1][:]
    remote(*map(RemoteServer, pair)).load(sent(model, "first", web[0]))
    assert web[1] == []


def test_files_that_are_damaged_or_missing_leave_a_server_that_claims_no_policy(model, pair, web):
    (url, _), requests = pair, model.requests(4, 0.8, samples=1, tokens=24)
    remote(RemoteServer(url)).load(sent(model, "first", web[0]))
    for damage in ({"model.safetensors": "0" * 64}, {"other.safetensors": "0" * 64}):
        with pytest.raises(ServerLost, match="/update_weights answered 500"):
            remote(RemoteServer(url)).load(sent(model, "second", web[0], **damage))
        with pytest.raises(StalePolicy, match="has policy unknown"):
            remote(RemoteServer(url), sync="none").load(sent(model, "second", web[0]))
    # The model has changed in nothing.
    RemoteServer(url).post("/update_weight_version", {"new_version": "first"})
    for name in ("first", "second"):
        engine = remote(RemoteServer(url))
        engine.load(sent(model, name, web[0]))
        assert gap(model, name, requests, run(engine, requests), 0.8) < 5e-4


def test_two_workers_of_tensor_parallelism_get_their_parts(model, tmp_path, web):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    config = dataclasses.replace(model.config, **shape)
    params = {
        n: jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(config, i)) for i, n in enumerate("ab")
    }
    small = dataclasses.replace(model, config=config, params=params, folder=model.folder / "small")
    one = child(tmp_path, more=["--tensor-parallel-size", "2", "--enforce-eager"])
    # A core each: by itself vLLM takes a memory node each.
    one.environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    server = RemoteServer(child=one)
    try:
        server.start(small.place("a"))
        server.wait(900)
        for name in "ba":
            engine, requests = remote(RemoteServer(server.url)), small.requests(6, 0.8, samples=2, tokens=16)
            del web[1][:]
            engine.load(sent(small, name, f"{web[0]}/small"))
            # The workers share one download.
            assert sum(path.endswith("/model.safetensors") for path in web[1]) == 1
            found = run(engine, requests)
            near, far = (gap(small, n, requests, found, 0.8) for n in (name, "ab".replace(name, "")))
            print(f"two workers: {near:.2g} from its trainer, {far:.2g} from another policy's")
            assert near < 5e-4
            assert far > 20 * near
    finally:
        one.end()
