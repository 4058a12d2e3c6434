"""Policies as streams over HTTP to two real vLLM servers on the CPU, which see no folder: `make test-vllm`.

SmolLM2-135M in float32, on loopback. Figures are printed.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import httpx
import jax
import psutil
import pytest

from tests.faults.support import Run
from tests.faults.vllm_servers import SETTINGS, child, command, gap, remote, run, smollm
from tuning.models.huggingface import random_params, save_decoder
from tuning.models.tokenizer import save_tokenizer
from tuning.rollout.servers.fleet import Options
from tuning.rollout.servers.protocol import ServerRefused, StalePolicy
from tuning.rollout.servers.server import RemoteServer

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
    yield made
    for one in made:
        one.child.end()


def streamed(model: Any, name: str, **changes: Any) -> Any:
    """A policy without a folder."""

    def none() -> Path:
        raise AssertionError("nobody sees a folder")

    return model.policy(name, folder=none, **changes)


def started(one: Any, folder: Path, key: str = "") -> RemoteServer:
    """A server by its address, as others see it, once it is healthy."""
    owner = RemoteServer(child=one)
    owner.start(folder)
    owner.wait(900)
    return RemoteServer(owner.url, key=key)


def kill(one: Any) -> None:
    """Kills a server's processes, all at once."""
    family = psutil.Process(one.child.pid).children(recursive=True)
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=30)


def test_policies_go_to_two_servers_and_log_probabilities_are_the_trainers(model, pair):
    engine, requests = remote(*(RemoteServer(one.url) for one in pair)), model.requests(8, 0.8, samples=2, tokens=24)
    sent = []
    for name in ("first", "second", "third"):
        began = time.monotonic()
        engine.load(streamed(model, name))
        seconds = time.monotonic() - began
        found = run(engine, requests)
        near = gap(model, name, requests, found, 0.8)
        others = {n: gap(model, n, requests, found, 0.8) for n in model.params if n != name}
        print(f"{name}: at both after {seconds:.1f} s, {near:.2g} from its trainer, {others} from the others'")
        assert len(engine.gaps) == 2
        assert near < 5e-4
        assert min(others.values()) > 20 * near
        told = [httpx.get(f"{one.url}/weights").json() for one in pair]
        tensors = len(list(model.policy(name).tensors({})))
        # Read again from the models, fused and packed as they are; the servers' head is a matrix of its own.
        assert [t["compared"] for t in told] == [tensors + 1] * 2
        assert told[0]["fingerprint"] == told[1]["fingerprint"]
        assert {t["policy"] for t in told} == {name}
        sent.append(told[0]["fingerprint"])
    assert len(set(sent)) == 3

    # A trainer that was started again computes the fingerprint, and pushes nothing.
    class Idle(RemoteServer):
        def send(self, path: str, bodies: Any) -> None:
            raise AssertionError("it has the policy")

    remote(*(Idle(one.url) for one in pair)).load(streamed(model, "third"))


def test_old_weights_under_a_new_name_are_found_out(model, pair):
    server = RemoteServer(pair[0].url)
    remote(server).load(streamed(model, "first"))
    with pytest.raises(StalePolicy, match="says that it has policy first, wanted is second"):
        remote(server, sync="none").load(streamed(model, "second"))
    server.post("/update_weight_version", {"new_version": "second"})
    with pytest.raises(StalePolicy, match="says that it has policy second by name, with other weights, wanted is"):
        remote(server, sync="none").load(streamed(model, "second"))
    # Without a fingerprint, as after a folder, the log-probabilities tell.
    server.delete("/weights")
    with pytest.raises(StalePolicy, match=r"wanted is second; .* log-probabilities are [\d.]+ from the trainer's"):
        remote(server, sync="none").load(streamed(model, "second"))
    # A folder takes the place of a stream, and a stream that of a folder.
    for name, sync in (("third", "weights"), ("second", "stream")):
        engine, requests = remote(server, sync=sync), model.requests(4, 0.8, samples=1, tokens=24)
        engine.load(model.policy(name))
        assert gap(model, name, requests, run(engine, requests), 0.8) < 5e-4


class Vanishing(RemoteServer):
    """A trainer that is gone in the middle of a push, and gives nothing up."""

    def send(self, path: str, bodies: Any) -> None:
        super().send(path, [body for body, _ in zip(bodies, range(10), strict=False)])
        raise KeyboardInterrupt

    def delete(self, path: str) -> Any:
        return None


class Flipping(RemoteServer):
    """A wire that changes a bit of the twentieth bucket."""

    def send(self, path: str, bodies: Any) -> None:
        def changed() -> Any:
            for number, body in enumerate(bodies):
                value = bytearray(body)
                value[-1] ^= number == 20
                yield bytes(value)

        super().send(path, changed())


class Losing(RemoteServer):
    """A wire that loses a bucket."""

    def send(self, path: str, bodies: Any) -> None:
        super().send(path, (body for number, body in enumerate(bodies) if number != 12))


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Vanishing, KeyboardInterrupt, None),
        (Flipping, ServerRefused, r"answered 400: the checksum of the bucket's \d+ bytes"),
        (Losing, ServerRefused, r"answered 400: rows \d+ to \d+ of .* come where .* goes on from row \d+"),
    ],
)
def test_a_push_that_breaks_leaves_a_server_that_claims_nothing_and_serves_nothing(model, pair, kind, error, message):
    url = pair[0].url
    remote(RemoteServer(url)).load(streamed(model, "first"))
    with pytest.raises(error, match=message):
        remote(kind(url)).load(streamed(model, "second"))
    told = httpx.get(f"{url}/weights").json()
    assert (told["policy"], told["fingerprint"], told["paused"]) == ("unknown", None, True)
    for name in ("first", "second"):
        with pytest.raises(StalePolicy, match="has policy unknown"):
            remote(RemoteServer(url), sync="none").load(streamed(model, name))
    with pytest.raises(httpx.ReadTimeout):
        body = {"model": "policy", "prompt": [1, 2], "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=3)
    # The next push begins anew: nothing of the broken one is in it.
    engine, requests = remote(RemoteServer(url)), model.requests(4, 0.8, samples=1, tokens=24)
    engine.load(streamed(model, "third"))
    assert gap(model, "third", requests, run(engine, requests), 0.8) < 5e-4


def test_killed_in_the_middle_of_a_push_the_other_server_goes_on(model, pair):
    engine = remote(*(RemoteServer(one.url) for one in pair), wait_seconds=2.0)
    engine.load(streamed(model, "first"))

    def killing(types: Any) -> Any:
        for number, tensor in enumerate(model.policy("second").tensors(types)):
            if number == 40 and pair[1].child.alive:
                kill(pair[1])
            yield tensor

    engine.load(streamed(model, "second", tensors=killing))
    assert any("going on without a server" in line for line in engine.lines)
    requests = model.requests(6, 0.8, samples=2, tokens=24)
    assert gap(model, "second", requests, run(engine, requests), 0.8) < 5e-4
    # Its owner starts it again on what it had at first; the stream brings it up to the others.
    pair[1].start(model.place("first"))
    pair[1].wait(900)
    engine = remote(*(RemoteServer(one.url) for one in pair))
    engine.load(streamed(model, "second"))
    assert len(engine.gaps) == 2
    assert gap(model, "second", requests, run(engine, requests), 0.8) < 5e-4


def test_a_started_server_that_is_killed_in_the_middle_of_a_push_is_started_on_the_policy(model, pair):
    one = pair[1]
    starts = one.child.starts

    def killing(types: Any) -> Any:
        for number, tensor in enumerate(model.policy("third").tensors(types)):
            if number == 40:
                kill(one)
            yield tensor

    engine = remote(one, sync="stream", start_seconds=900.0)
    engine.load(model.policy("third", tensors=killing))
    assert one.child.starts == starts + 1
    assert any("it is started again" in line for line in engine.lines)
    requests = model.requests(6, 0.8, samples=2, tokens=24)
    assert gap(model, "third", requests, run(engine, requests), 0.8) < 5e-4


def test_bfloat16_a_head_that_is_the_embedding_and_a_server_with_a_key_and_no_development_mode(model, tmp_path):
    save_decoder(tmp_path / "model", model.config, model.params["first"], model.ids, dtype="bfloat16")
    save_tokenizer(model.tokenizer, tmp_path / "model")
    one, requests = child(tmp_path, dtype="bfloat16", key="secret"), model.requests(8, 0.8, samples=2, tokens=24)
    one.environment["VLLM_SERVER_DEV_MODE"] = "0"
    try:
        server = started(one, tmp_path / "model", key="secret")
        assert httpx.post(f"{server.url}/collective_rpc", json={"method": "rlhf_told"}).status_code == 404
        assert httpx.get(f"{server.url}/weights").status_code == 401
        for name in ("second", "first"):
            engine = remote(server, tolerance=Options().tolerance)
            engine.load(streamed(model, name, dtype="bfloat16"))
            found = run(engine, requests)
            near, far = (gap(model, n, requests, found, 0.8) for n in (name, "third"))
            told = server.get("/weights")
            print(f"bfloat16: {near:.2g} from its float32 trainer, {far:.2g} from another policy's; {told}")
            assert told["tied"]
            assert told["compared"] == len(list(model.policy(name).tensors({})))
            assert near < Options().tolerance / 2
            assert far > Options().tolerance
        other = dataclasses.replace(model.config, tie_embeddings=False)
        own = streamed(model, "second", digest="own head", config=lambda: dataclasses.asdict(other))
        with pytest.raises(ServerRefused, match="the policy has a head of its own"):
            remote(server).load(own)
    finally:
        one.end()


def test_two_workers_of_tensor_parallelism_get_their_parts(model, tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    config = dataclasses.replace(model.config, **shape)
    params = {
        n: jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(config, i)) for i, n in enumerate("ab")
    }
    small = dataclasses.replace(model, config=config, params=params, folder=tmp_path)
    one = child(tmp_path, more=["--tensor-parallel-size", "2", "--enforce-eager"])
    # A core each: by itself vLLM takes a memory node each.
    one.environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    try:
        server = started(one, small.place("a"))
        for name in "ba":
            engine, requests = remote(server), small.requests(6, 0.8, samples=2, tokens=16)
            engine.load(streamed(small, name))
            found = run(engine, requests)
            near, far = (gap(small, n, requests, found, 0.8) for n in (name, "ab".replace(name, "")))
            print(
                f"two workers: {near:.2g} from its trainer, {far:.2g} from another policy's; {server.get('/weights')}"
            )
            assert near < 5e-4
            assert far > 20 * near
            # The norms, which each has whole.
            assert server.get("/weights")["compared"] == 5
    finally:
        one.end()


def test_rounds_of_rl_by_a_server_that_the_stage_starts_and_streams_to(tmp_path):
    sets = SETTINGS | {"rl.rollout.engine.sync": "stream", "rl.rollout.engine.command": " ".join(command())}
    one = Run(tmp_path / "store", "one", sets=sets)
    output = one.ends(0, seconds=1500)
    print(output)
    assert output.count("has policy") == 2
    assert "it is started again" not in output
    for number in range(2):
        metrics = one.record()["nodes"][f"round-{number:03d}.update"]["metrics"]
        print(f"round {number}: mismatch KL {metrics['mismatch_kl']:.2g}")
        assert metrics["mismatch_kl"] < 1e-4
