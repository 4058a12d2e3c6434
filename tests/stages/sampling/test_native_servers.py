"""Rollouts by `rlhf serve` servers: each reads the policy by name below a root that it shares with the trainer."""

import contextlib
import dataclasses
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rlhf.tuning.rollout.servers.protocol import ServerRefused, StalePolicy
from rlhf.tuning.rollout.servers.server import RemoteServer
from tests.stages.sampling.native_server import Forgetful, app_over, server_over
from tests.stages.sampling.support import GREEDY, remote, run, same
from tests.stages.support import running
from tests.support import free_port

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
