"""Rollouts by a real vLLM server on the CPU: `make test-vllm`. SmolLM2-135M in float32, on loopback.

One server, started once, gets one policy after the other. Figures are printed.
"""

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlhf.stages.common.tables import read_rows
from rlhf.stages.store.artifacts import Store
from rlhf.tuning.models.huggingface import save_decoder, untied
from rlhf.tuning.models.lora import LoraConfig, merge, tune
from rlhf.tuning.models.peft import save_adapter
from rlhf.tuning.models.tokenizer import save_tokenizer
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.servers.child import Child
from rlhf.tuning.rollout.servers.fleet import Fleet, Options
from rlhf.tuning.rollout.servers.kinds import KINDS
from rlhf.tuning.rollout.servers.protocol import StalePolicy
from rlhf.tuning.rollout.servers.server import RemoteServer
from tests.faults.support import Run, shards
from tests.faults.vllm_servers import ENVIRONMENT, SETTINGS, command, gap, remote, run, smollm
from tests.tuning.models.support import moved

LORA = LoraConfig(rank=8, alpha=16.0)
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return smollm(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    def words(folder: Path, port: int) -> list[str]:
        return [*command(), *KINDS["vllm"].arguments(folder, port, "float32", 1024, True), "--max-lora-rank", "8"]

    log = tmp_path_factory.mktemp("vllm") / "log"
    child = Child(words, KINDS["vllm"].environment() | ENVIRONMENT, log)
    yield RemoteServer(child=child)
    child.end()


def test_weights_follow_the_policy_and_log_probabilities_are_the_trainers(model, server):
    engine = remote(server)
    began = time.monotonic()
    engine.load(model.policy("first"))
    print(f"vLLM is healthy, and proven, after {time.monotonic() - began:.0f} s")
    requests = model.requests(8, 0.8, samples=2, tokens=24)
    before = run(engine, requests)
    for name in ("second", "third", "first"):
        began = time.monotonic()
        engine.load(model.policy(name))
        seconds = time.monotonic() - began
        found = run(engine, requests)
        near = gap(model, name, requests, found, 0.8)
        others = {n: gap(model, n, requests, found, 0.8) for n in model.params if n != name}
        print(f"{name}: in place after {seconds:.1f} s, {near:.2g} from its trainer, {others} from the others'")
        assert near < 5e-4
        assert min(others.values()) > 20 * near
    assert server.child.starts == 1
    # The same weights, seeds and prompts give the same samples, but for what is computed beside them.
    equal = [a.tokens == b.tokens for x, y in zip(before, found, strict=True) for a, b in zip(x, y, strict=True)]
    print(f"{sum(equal)} of {len(equal)} samples are as at first")
    assert sum(equal) >= len(equal) * 3 // 4
    assert all(len({tuple(c.tokens) for c in cs}) == 2 for cs in found)


def test_greedy_completions_are_the_native_engines(model, server):
    engine = remote(server)
    engine.load(model.policy("first", 0.0))
    requests = model.requests(8, 0.0, samples=2, tokens=32)
    found = run(engine, requests)
    native = Engine(model.config, limits=Limits(slots=8, context=256))
    native.load(model.params["first"])
    expected = run(native, requests)
    equal = 0
    for theirs, ours in zip(found, expected, strict=True):
        assert [c.tokens for c in theirs] == [theirs[0].tokens] * 2
        equal += theirs[0].tokens == ours[0].tokens
        if theirs[0].tokens == ours[0].tokens:
            np.testing.assert_allclose(theirs[0].logps, ours[0].logps, atol=2e-3)
            assert theirs[0].stop == ours[0].stop
    print(f"{equal} of 8 greedy completions are token for token the native engine's")
    assert equal >= 7


def test_stale_weights_are_refused(model, server):
    remote(server).load(model.policy("first"))
    with pytest.raises(StalePolicy, match="says that it has policy first, wanted is second"):
        remote(server, sync="none").load(model.policy("second"))
    server.post("/update_weight_version", {"new_version": "second"})
    with pytest.raises(StalePolicy, match="wanted is second; .* from the trainer's on average"):
        remote(server, sync="none").load(model.policy("second"))
    server.post("/update_weight_version", {"new_version": "first"})


def test_adapters_follow_the_policy(model, server):
    trainable, _ = tune(model.config, "decoder", model.params["first"], LORA, seed=0)
    engine = remote(server, sync="adapter")
    for number in (1, 2):
        # The second factor starts at zero: moved, the adapter does something.
        adapter = moved(trainable, 0.02 * number)
        name = f"adapted-{number}"
        save_adapter(model.folder / name, adapter, LORA, "first")
        model.params[name] = merge(model.config, "decoder", model.params["first"], adapter, LORA)
        began = time.monotonic()
        folders = {"adapter": lambda name=name: model.folder / name, "folder": lambda: model.place("first")}
        engine.load(model.policy(name, base="first", **folders))
        seconds = time.monotonic() - began
        requests = model.requests(6, 0.8, samples=2, tokens=16)
        found = run(engine, requests)
        near, far = gap(model, name, requests, found, 0.8), gap(model, "first", requests, found, 0.8)
        print(f"{name}: in place after {seconds:.1f} s, {near:.2g} from its trainer, {far:.2g} from the base's")
        assert near < 5e-4
        assert far > 20 * near
    assert server.child.starts == 1
    names = [m["id"] for m in server.get("/v1/models")["data"]]
    assert names == ["policy", "adapted-2"]


def test_a_server_that_slept_wakes_up_with_the_next_policy(model, server):
    """vLLM for CPU frees nothing, but keeps its state: awake in part it answers no request, and it counts as asleep."""
    engine = remote(server)
    engine.load(model.policy("first"))
    starts = server.child.starts
    requests = model.requests(8, 0.8, samples=2, tokens=24)
    for name in ("second", "second"):
        engine.sleep()
        assert server.get("/is_sleeping") == {"is_sleeping": True}
        assert server.get("/weight_info")["weight_version"] == "unknown"
        began = time.monotonic()
        engine.load(model.policy(name))
        print(f"{name}: awake and in place after {time.monotonic() - began:.1f} s")
        assert server.get("/is_sleeping") == {"is_sleeping": False}
        assert gap(model, name, requests, run(engine, requests), 0.8) < 5e-4
    assert server.child.starts == starts
    log = server.child.log.read_text()
    tags = [line.partition("with tags: ")[2][:12] for line in log.splitlines() if "wake up the engine" in line]
    assert tags == ["['weights']", "['kv_cache']"] * 2


def test_killed_in_the_middle_nothing_is_lost(model, server, tmp_path):
    engine = remote(server, concurrency=4)
    engine.load(model.policy("second"))
    requests = model.requests(24, 0.8, samples=4, tokens=64)
    stream = engine.run(requests)
    found = dict([next(stream), next(stream)])
    keeper = psutil.Process(server.child.pid)
    (api,) = [p for p in keeper.children() if "vllm" in " ".join(p.cmdline())]
    family = [api, *api.children(recursive=True)]
    os.kill(api.pid, signal.SIGKILL)
    began = time.monotonic()
    found |= dict(stream)
    print(f"killed after 2 of 24 prompts; all were there {time.monotonic() - began:.0f} s later")
    assert psutil.wait_procs(family, timeout=1)[1] == []
    assert server.child.starts == 2
    assert set(found) == set(range(24))
    assert gap(model, "second", requests, [found[i] for i in range(24)], 0.8) < 5e-4


def test_bfloat16_is_within_the_tolerance_and_other_weights_are_not(model, tmp_path):
    def place(name: str) -> Path:
        target = tmp_path / name
        if not target.exists():
            save_decoder(target, *untied(model.config, model.params[name]), model.ids, dtype="bfloat16")
            save_tokenizer(model.tokenizer, target)
        return target

    def words(folder: Path, port: int) -> list[str]:
        return [*command(), *KINDS["vllm"].arguments(folder, port, "bfloat16", 1024, False)]

    child = Child(words, KINDS["vllm"].environment() | ENVIRONMENT, tmp_path / "log")
    server, requests = RemoteServer(child=child), model.requests(8, 0.8, samples=2, tokens=24)
    try:
        for name in ("first", "second"):
            engine = Fleet(KINDS["vllm"], [server], Options())
            engine.load(model.policy(name, folder=lambda name=name: place(name)))
            found = run(engine, requests)
            near, far = (gap(model, n, requests, found, 0.8) for n in (name, "third"))
            print(f"bfloat16: {near:.2g} from its float32 trainer, {far:.2g} from another policy's")
            assert near < Options().tolerance / 2
            assert far > Options().tolerance
        assert child.starts == 1
    finally:
        child.end()


def test_rounds_of_rl_with_a_kill_of_the_server_in_the_first(tmp_path):
    store = tmp_path / "store"
    sets = SETTINGS | {"rl.rollout.engine.command": " ".join(command())}
    one = Run(store, "one", sets=sets)
    one.until(lambda: shards(store, "rollout", "rollouts") >= 2, seconds=900)
    (log,) = (store / "engines").glob("*/vllm-0.log")
    (worker, *others) = one.family()
    (api,) = [p for p in others if p.cmdline()[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]]
    os.kill(api.pid, signal.SIGKILL)
    output = one.ends(0, seconds=1500)
    print(output)
    assert "its prompts go to the next free server" in output
    assert not psutil.pid_exists(api.pid)
    assert psutil.wait_procs(others, timeout=1)[1] == []
    assert not log.exists()
    nodes, place = one.record()["nodes"], Store(str(store))
    for number, policy in enumerate(("base", "round-000.update")):
        entry = nodes[f"round-{number:03d}.rollout"]
        rows = read_rows(place.get(entry["stage"], entry["key"]), "rollouts/")
        assert sorted((r["place"], r["sample"]) for r in rows) == [(p, s) for p in range(16) for s in range(4)]
        assert {r["policy"] for r in rows} == {nodes[policy]["digest"]}
        metrics = nodes[f"round-{number:03d}.update"]["metrics"]
        print(f"round {number}: mismatch KL {metrics['mismatch_kl']:.2g}")
        assert metrics["mismatch_kl"] < 1e-4


def test_rounds_of_rl_that_send_adapters_alone(tmp_path):
    sets = SETTINGS | {
        "rl.rounds": 3,
        "rl.update.lora.rank": 8,
        "rl.rollout.engine.sync": "adapter",
        "rl.rollout.engine.arguments": "[--max-lora-rank, '8']",
        "rl.rollout.engine.command": " ".join(command()),
    }
    one = Run(tmp_path / "store", "one", sets=sets)
    output = one.ends(0, seconds=1500)
    print(output)
    assert output.count("has policy") == 3
    assert "it is started again" not in output
    for number in range(3):
        metrics = one.record()["nodes"][f"round-{number:03d}.update"]["metrics"]
        print(f"round {number}: mismatch KL {metrics['mismatch_kl']:.2g}")
        assert metrics["mismatch_kl"] < 1e-4
