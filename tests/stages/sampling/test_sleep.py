"""Servers that sleep between stages: the order of calls, failures in each phase, arrays of the worker, and GPUs."""

import json
import sys

import jax
import numpy as np
import psutil
import pytest

from rlhf.stages import base as base_model
from rlhf.stages import rollout
from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.sampling import servers
from rlhf.stages.sampling.settings import EngineSettings
from rlhf.tuning.rollout.servers.child import Child, gpus_of_servers
from rlhf.tuning.rollout.servers.kinds import KINDS
from rlhf.tuning.rollout.servers.protocol import ServerLost, ServerRefused
from rlhf.tuning.rollout.servers.server import RemoteServer
from tests.faults.support import Run
from tests.stages.sampling.http_server import VERSION
from tests.stages.sampling.support import GREEDY, PARAMS, remote, run, same
from tests.stages.support import context
from tests.stages.training.support import data, ids, perform

TAGS = ["weights", "kv_cache"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_wakes_up_for_its_weights_gets_the_new_policy_and_then_takes_its_cache(
    kind, url, state, policy, native
):
    engine = remote(RemoteServer(url), kind=kind)
    engine.load(policy("first"))
    state.slept.clear()
    for name in ("second", "second", "first"):
        engine.sleep()
        # A second call, as after a stage that failed before it woke the server, changes nothing.
        engine.sleep()
        assert (state.version, state.asleep) == ("unknown", TAGS)
        engine.load(policy(name))
        assert state.asleep == []
        same(run(engine, GREEDY), native[name])
    assert state.slept == ["sleep weights kv_cache discard", "wake weights", "load", "wake kv_cache"] * 3


@pytest.mark.slow
def test_weights_under_an_adapter_stay_in_the_hosts_memory(url, state, policy, native):
    engine = remote(RemoteServer(url), sync="adapter")
    engine.load(policy("first"))
    state.slept.clear()
    engine.sleep()
    engine.load(policy("first"))
    assert state.slept == ["sleep weights kv_cache", "wake weights", "wake kv_cache"]
    same(run(engine, GREEDY), native["first"])


@pytest.mark.slow
def test_a_request_that_still_runs_does_not_wake_its_server_up(url, state, policy):
    engine = remote(RemoteServer(url, retries=0), concurrency=1)
    engine.load(policy("first"))
    stream = engine.run(GREEDY)
    next(stream)
    engine.sleep()
    with pytest.raises(ServerLost, match="sleeps: its stage has ended"):
        list(stream)
    assert state.asleep == TAGS


@pytest.fixture
def child(tmp_path):
    def command(folder, port):
        words = ["-m", "tests.stages.sampling.http_server", "--pids", str(tmp_path / "pids")]
        words += ["--fail", str(tmp_path / "fail")]
        return [sys.executable, *words, *KINDS["vllm"].arguments(folder, port, "float32", 256, False)]

    made = Child(command, {}, tmp_path / "server.log")
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/sleep", "/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"])
def test_a_failure_of_any_phase_leaves_a_server_that_the_next_policy_gets(path, child, tmp_path, policy, native):
    server = RemoteServer(child=child)
    engine = remote(server, sync="weights")
    engine.load(policy("first"))
    (tmp_path / "fail").write_text(path)
    engine.sleep()
    if path == "/sleep":
        # Its memory is free in another way.
        assert not child.alive
        assert any("a server does not sleep, and is ended" in line for line in engine.lines)
    else:
        # With sync weights no server is started again in the same call.
        with pytest.raises((ServerLost, ServerRefused), match="answered 500"):
            engine.load(policy("second"))
        assert not child.alive
    (tmp_path / "fail").unlink()
    engine.load(policy("second"))
    same(run(engine, GREEDY), native["second"])
    assert child.starts == 2
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert [psutil.pid_exists(pid) for pid in pids] == [False, True]


@pytest.mark.slow
def test_a_server_that_dies_asleep_is_started_again(child, tmp_path, policy, native):
    engine = remote(RemoteServer(child=child))
    engine.load(policy("first"))
    engine.sleep()
    psutil.Process(int((tmp_path / "pids").read_text())).kill()
    engine.load(policy("second"))
    same(run(engine, GREEDY), native["second"])
    assert child.starts == 2


def test_the_workers_arrays_leave_the_devices_and_come_back_with_their_bits():
    shared = jax.numpy.arange(6.0)
    opt = {"mu": jax.tree.map(lambda x: x * 0.5, PARAMS["first"]), "count": jax.numpy.int32(3), "base": shared}
    memory = {"decoder:abc": ("config", PARAMS["first"]), "trainer:abc": opt, "decoder:b": ("config", [shared]), "t": 7}
    names, places = list(memory), jax.tree.map(lambda x: getattr(x, "sharding", None), memory)
    before = jax.tree.map(np.asarray, memory)
    back = servers._off_devices(memory, "decoder:abc")
    held = {name for name, value in memory.items() for x in jax.tree.leaves(value) if isinstance(x, jax.Array)}
    assert held == {"decoder:abc"}
    back()
    assert list(memory) == names
    assert jax.tree.map(lambda x: getattr(x, "sharding", None), memory) == places
    assert memory["trainer:abc"]["base"] is memory["decoder:b"][1][0]
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, memory))


def test_gpus_are_divided_over_servers_by_the_size_of_their_parallelism():
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert gpus_of_servers(["vllm", "serve", "-tp", "2"], 3, eight) == [["0", "1"], ["2", "3"], ["4", "5"]]
    for words in (
        ["--tensor_parallel_size=2", "-dp", "2"],
        ["--tp", "2", "--pipeline-parallel-size", "2"],
        ["--tp-size=4"],
    ):
        assert gpus_of_servers(words, 2, eight) == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert gpus_of_servers([], 2, {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c"}) == [["GPU-a"], ["GPU-b"]]
    assert gpus_of_servers(["-tp", "2"], 2, {"CUDA_VISIBLE_DEVICES": ""}) == [[], []]
    assert gpus_of_servers(["-tp", "16"], 1, eight) == [[]]
    with pytest.raises(ValueError, match=r"3 servers with 4 GPUs each need 12, and there are 8 \(0, 1, 2"):
        gpus_of_servers(["--tensor-parallel-size", "4"], 3, eight)


@pytest.mark.slow
def test_a_stage_starts_servers_on_their_own_gpus_and_leaves_them_asleep(tmp_path):
    configure_jax()
    memory: dict[str, object] = {}
    _, base = perform(base_model, base_model.Config(source="random:tiny"), tmp_path / "base", {})
    config_file = base.path / "model" / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"max_position_embeddings": 80}))
    table = [
        {"id": f"p{i}", "prompt_ids": ids("1+1=", end=False), "prompt": "1+1=", "answer": "2", "metadata": "{}"}
        for i in range(4)
    ]
    given = {"policy": base, "tokenizer": base, "data": data(tmp_path / "data", prompts=table)}
    engine = EngineSettings(
        kind="vllm",
        version=VERSION,
        dtype="float32",
        command=f"{sys.executable} -m tests.stages.sampling.http_server",
        arguments=["--gpus", str(tmp_path / "gpus")],
        environment={"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
        servers=2,
        sleep=True,
        folder=str(tmp_path),
        tolerance=1e-3,
    )
    memory["trainer:old"] = jax.numpy.arange(3)
    logs: list[str] = []
    on_devices: list[bool] = []
    try:
        # The second context has a bucket of 96 tokens.
        for number, tokens in enumerate((4, 70)):
            config = rollout.Config(
                prompts=4, completions=2, max_tokens=tokens, shard_prompts=2, engine=engine, round=number
            )
            ctx = context(config, tmp_path / f"out-{number}", inputs=given, memory=memory, log=logs.append)
            ctx.progress = lambda *a, **k: on_devices.append(isinstance(memory["trainer:old"], jax.Array))
            assert rollout.run(ctx)["completions"] == 8
            assert on_devices and not any(on_devices)
            servers.rest()
            assert isinstance(memory["trainer:old"], jax.Array)
            ((_, started),) = servers._started.values()
            assert [server.asleep for server in started] == [TAGS, TAGS]
        assert [server.child.starts for server in started] == [1, 1]
        assert sorted((tmp_path / "gpus").read_text().split()) == ["4", "5"]
        assert sum("has policy" in line for line in logs) == 4
    finally:
        servers.end_all()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_worker_lays_its_server_to_sleep_after_each_stage(tmp_path):
    sets = {
        "sft": "null",
        "rl.rounds": 2,
        "rl.rollout.prompts": 4,
        "rl.score.rewards.model": "{function: matches, weight: 0.1, arguments: {pattern: x}}",
        "rl.rollout.engine.kind": "vllm",
        "rl.rollout.engine.version": VERSION,
        "rl.rollout.engine.dtype": "float32",
        "rl.rollout.engine.command": f"{sys.executable} -m tests.stages.sampling.http_server",
        "rl.rollout.engine.arguments": f"[--slept, {tmp_path / 'slept'}]",
        "rl.rollout.engine.sleep": "true",
        "reward": "null",
        "evaluate": "null",
        "export": "null",
    }
    Run(tmp_path / "store", "one", sets=sets).ends(0, seconds=1500)
    asleep = "sleep weights kv_cache discard"
    assert (tmp_path / "slept").read_text().split("\n") == [asleep, "wake weights", "load", "wake kv_cache", asleep]
