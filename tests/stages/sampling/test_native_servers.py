"""Rollouts by `rlhf serve` servers: each reads the policy by name below a root that it shares with the trainer."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import jax
import numpy as np
import pytest

from rlhf.stages import base as base_model
from rlhf.stages import rollout
from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.sampling import servers
from rlhf.stages.sampling.settings import EngineSettings
from rlhf.tuning import multihost
from rlhf.tuning.device import Compute
from rlhf.tuning.models.huggingface import load_decoder, save_decoder
from rlhf.tuning.rollout.servers.protocol import ServerRefused, StalePolicy
from rlhf.tuning.rollout.servers.server import RemoteServer
from rlhf.tuning.rows import CompletionRow, read_table
from rlhf.tuning.training.completions import token_logps
from tests.stages.sampling.native_server import Forgetful, app_over, server_over
from tests.stages.sampling.support import GREEDY, remote, run, same
from tests.stages.support import running
from tests.stages.training.support import Folder, data, ids, perform
from tests.support import free_port, with_devices

pytestmark = pytest.mark.slow


@pytest.fixture
def native_server(folders):
    """Makes servers in this process, with the policy `first`: (server, URL)."""
    with contextlib.ExitStack() as stack:

        def make(**options):
            server = server_over(folders["first"], "first", **options)
            stack.callback(server.live.close)
            return server, stack.enter_context(running(app_over(server, folders["first"].parent)))

        yield make


def test_policies_go_to_two_servers_and_none_is_read_twice(native_server, shared, native):
    places = [native_server()[1] for _ in range(2)]
    engine = remote(*map(RemoteServer, places), kind="native")
    engine.load(shared("first"))
    same(run(engine, GREEDY), native["first"])
    engine.load(shared("second"))
    assert set(engine.gaps) == set(places) and max(engine.gaps.values()) < 1e-5
    same(run(engine, GREEDY), native["second"])
    # A trainer that was started again gives nothing.
    again = remote(*map(RemoteServer, places), kind="native", sync="none")
    again.load(shared("second"))
    same(run(again, GREEDY), native["second"])


def test_a_server_that_keeps_its_old_weights_under_the_new_name_is_found_out(native_server, shared):
    _, url = native_server(kind=Forgetful)
    with pytest.raises(StalePolicy, match=r"log-probabilities are [\d.]+ from the trainer's on average"):
        remote(RemoteServer(url), kind="native").load(shared("second"))


@pytest.mark.parametrize("sync", ["auto", "none"])
@pytest.mark.parametrize(("dtype", "computes"), [("bfloat16", "float32"), ("float32", "int8")])
def test_a_server_that_computes_in_another_type_is_refused(native_server, shared, sync, dtype, computes):
    server, url = native_server(quantization="int8" if computes == "int8" else "none")
    with pytest.raises(ServerRefused, match=f"it computes in {computes}, and dtype is {dtype}"):
        remote(RemoteServer(url), kind="native", sync=sync).load(shared("second", dtype=dtype))
    assert server.policy == "first"


def test_clients_that_give_policies_at_once_end_with_one_of_them_whole(native_server, shared, native):
    server, url = native_server()

    def give(name):
        body = dataclasses.asdict(shared(name).transfer()) | {"policy": name}
        del body["root"]
        return httpx.post(f"{url}/weights", json=body, timeout=60).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(give, ["first", "second"] * 4)) == {200}
    engine = remote(RemoteServer(url), kind="native", sync="none")
    engine.load(shared(server.policy))
    same(run(engine, GREEDY), native[server.policy])


@pytest.fixture
def program(folders, tmp_path):
    """Starts servers as processes, on a port that stays: (process, URL)."""
    made = []

    def start(port=None):
        port = port or free_port()
        words = ["tests.stages.sampling.native_server", str(folders["first"]), "--name", "first", "--port", str(port)]
        with (tmp_path / "log").open("ab") as log:
            made.append(subprocess.Popen([sys.executable, "-m", *words], stdout=log, stderr=log))
        RemoteServer(f"http://127.0.0.1:{port}").wait(120)
        return made[-1], port

    yield start
    for process in made:
        process.kill()
        process.wait()


def test_a_policy_that_was_acknowledged_and_lost_by_a_restart_is_given_again(program, shared, native):
    process, port = program()
    engine = remote(RemoteServer(f"http://127.0.0.1:{port}"), kind="native", concurrency=1, wait_seconds=120)
    engine.load(shared("second"))
    stream = engine.run(GREEDY)
    found = dict([next(stream)])
    process.kill()
    process.wait()
    # A supervisor starts it again, with the policy that it was made with.
    back = threading.Thread(target=program, args=(port,))
    back.start()
    found |= dict(stream)
    back.join()
    same([found[i] for i in range(len(GREEDY))], native["second"])
    assert sum("has policy second" in line for line in engine.lines) == 2
    assert httpx.get(f"http://127.0.0.1:{port}/weight_info").json()["weight_version"] == "second"


QUESTIONS = ["1+1=", "some words?", "2*3="]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Two random policies of one model, and three prompts."""
    configure_jax()
    folder, memory = tmp_path_factory.mktemp("round"), {}
    _, served = perform(base_model, base_model.Config(source="random:tiny"), folder / "served", memory)
    model, params = load_decoder(served.local("model/"))
    other = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params)
    save_decoder(folder / "trained" / "model", model, other, {})
    trained = Folder(folder / "trained", "trained")
    table = [
        {"id": f"p{i}", "prompt_ids": ids(text, end=False), "prompt": text, "answer": str(i), "metadata": "{}"}
        for i, text in enumerate(QUESTIONS)
    ]
    return folder, memory, served, trained, data(folder / "data", prompts=table)


@pytest.fixture(scope="module")
def url(inputs):
    folder, _, served, *_ = inputs
    model = folder / "model"
    model.mkdir()
    for path in (*served.local("model/").iterdir(), *served.local("tokenizer/").iterdir()):
        (model / path.name).write_bytes(path.read_bytes())
    server = server_over(model, "served", context=512)
    with contextlib.closing(server.live), running(app_over(server, folder / "shared")) as url:
        yield url


def engine_at(url, folder, **changes):
    version = httpx.get(f"{url}/version").json()["version"]
    usual = {"kind": "native", "url": url, "version": version, "dtype": "float32", "folder": folder}
    return EngineSettings(**usual | changes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), [("trained", ""), ("served", "file://")])
def test_a_round_by_a_native_server_has_the_rows_of_the_trainer(inputs, url, name, scheme):
    folder, memory, served, trained, prompts = inputs
    policy = dataclasses.replace({"trained": trained, "served": served}[name], digest=name * 3)
    # Files of a URL are written there and copied.
    policy.store = SimpleNamespace(scratch=folder / "scratch")
    engine = engine_at(url, f"{scheme}{folder}/shared")
    config = rollout.Config(prompts=3, completions=2, max_tokens=6, engine=engine)
    given = {"policy": policy, "tokenizer": served, "data": prompts}
    metrics, made = perform(rollout, config, folder / f"rollout {name}", memory, **given)
    assert metrics["completions"] == 6
    rows = read_table(sorted(made.local("rollouts").glob("*.parquet")), CompletionRow)
    assert {row.policy for row in rows} == {policy.digest}
    assert httpx.get(f"{url}/weight_info").json()["weight_version"] == policy.digest
    model, params = load_decoder(policy.local("model/"))
    texts = {f"p{i}": ids(text, end=False) for i, text in enumerate(QUESTIONS)}
    pairs = [(texts[row.prompt_id], row.token_ids) for row in rows]
    for row, expected in zip(rows, token_logps(model, params, pairs, 1.0, Compute(), 512), strict=True):
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-5)
    # The server's root has the newest policy alone, and none when the worker ends.
    assert len(list((folder / "shared").rglob("*.safetensors"))) == 1
    servers.end_all()
    assert not list((folder / "shared").rglob("*.safetensors"))


@pytest.mark.slow
def test_process_0_of_a_group_asks_servers_with_a_policy_that_both_processes_hold(inputs, url):
    folder, memory, served, trained, prompts = inputs
    policy = dataclasses.replace(trained, digest="grouped")
    policy.store = SimpleNamespace(scratch=folder / "scratch")
    config = rollout.Config(prompts=3, completions=2, max_tokens=6, engine=engine_at(url, str(folder / "shared")))
    given = {"policy": policy, "tokenizer": served, "data": prompts}
    metrics, made = perform(rollout, config, folder / "alone", memory, **given)
    address = f"127.0.0.1:{free_port()}"
    asked = {
        "inputs": {name: (str(one.path), one.digest) for name, one in given.items()},
        "scratch": str(folder / "scratch"),
        "config": config.model_dump(mode="json"),
        "out": str(folder / "group"),
    }
    command = [sys.executable, "-m", "tests.stages.sampling.of_group", json.dumps(asked)]
    environment = with_devices(1)
    processes = [
        subprocess.Popen(command, env=environment | multihost.variables(address, 2, i), stdout=subprocess.PIPE)
        for i in range(2)
    ]
    found = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in processes]
    assert (found[0]["completions"], found[0]["tokens"], found[1]) == (6, metrics["tokens"], {})
    rows = [
        read_table(sorted(path.glob("rollouts/*.parquet")), CompletionRow)
        for path in (made.local(), folder / "group" / "0" / "out")
    ]
    assert [list(row.token_ids) for row in rows[1]] == [list(row.token_ids) for row in rows[0]]
    servers.end_all()
