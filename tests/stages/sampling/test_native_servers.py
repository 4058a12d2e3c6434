"""Rollouts by `rlhf serve` servers: each policy goes to them over HTTP, and each proves the weights that it holds."""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest

from stages.serving.app import make_app
from stages.serving.guard import Bounds
from stages.serving.weights import BODY_BYTES, Pushes
from tests.stages.sampling.http_server import serve
from tests.stages.sampling.native_server import Forgetful, app_over, server_over
from tests.stages.sampling.support import GREEDY, OPTIONS, Unheard, remote, run, same, small, tensors, until
from tuning.rollout.servers.fleet import Fleet
from tuning.rollout.servers.native import Native
from tuning.rollout.servers.protocol import ServerLost, ServerRefused, StalePolicy
from tuning.rollout.servers.pushes import Everywhere, fingerprint
from tuning.rollout.servers.server import RemoteServer

FLOAT32 = {"dtype": "float32"}


@pytest.fixture
def native_server(folders):
    """Makes servers in this process, with the policy `first`: (server, URL)."""
    made = []

    def make(**options):
        server = server_over(folders["first"], "first", **options)
        web, thread, url = serve(app_over(server))
        made.append((server, web, thread))
        return server, url

    yield make
    for server, web, thread in made:
        web.should_exit = True
        thread.join()
        server.live.close()


def test_policies_go_to_two_servers_over_http_and_none_is_sent_twice(native_server, policy, native):
    places = [native_server()[1] for _ in range(2)]
    engine = remote(*map(RemoteServer, places), kind="native")
    sent = []

    def counted(types):
        sent.append(1)
        yield from tensors("second")(types)

    engine.load(policy("first", **FLOAT32))
    same(run(engine, GREEDY), native["first"])
    engine.load(policy("second", tensors=counted, **FLOAT32))
    assert set(engine.gaps) == set(places) and max(engine.gaps.values()) < 1e-5
    same(run(engine, GREEDY), native["second"])
    assert len(sent) == 2
    # A trainer that was started again computes the fingerprint, and sends nothing.
    again = remote(*map(RemoteServer, places), kind="native", sync="none")
    again.load(policy("second", **FLOAT32))
    same(run(again, GREEDY), native["second"])


def test_buckets_and_commits_whose_answers_are_lost_are_sent_again(native_server, policy, native, monkeypatch):
    monkeypatch.setattr("tuning.rollout.servers.server.FIRST_PAUSE", 0.0)
    server = small(native_server()[1], Unheard)
    engine = remote(server, kind="native")
    engine.load(policy("second", **FLOAT32))
    assert len(server.lost) > 10 and server.lost[-1].endswith("/commit")
    same(run(engine, GREEDY), native["second"])


def test_the_weights_of_a_policy_are_read_once_for_all_servers_that_ask_whose_they_are(policy):
    read = []

    def counted(types):
        read.append(1)
        yield from tensors("second")(types)

    made = policy("second", tensors=counted)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: fingerprint(made, Everywhere("float32")), range(8)))
    assert len(found) == len(read) == 1


def test_a_server_whose_requests_are_as_many_as_it_answers_takes_a_policy(folders, policy, native):
    server = server_over(folders["first"], "first")
    bounds = Bounds(requests=2, bucket_bytes=BODY_BYTES)
    web, thread, url = serve(make_app(server, bounds, pushes=Pushes(server)))
    place = urlsplit(url)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{"
    slow = [socket.create_connection((place.hostname, place.port)) for _ in range(2)]
    try:
        for sock in slow:
            sock.sendall(head.encode())
        until(lambda: httpx.post(f"{url}/v1/completions", json={}).status_code == 429)
        server_of = RemoteServer(url)
        Native().reload(server_of, policy("second", **FLOAT32))
        assert server.policy == "second"
    finally:
        for sock in slow:
            sock.close()
        web.should_exit = True
        thread.join()
        server.live.close()


def test_a_server_that_keeps_its_old_weights_under_the_new_name_is_found_out(native_server, policy):
    _, url = native_server(kind=Forgetful)
    with pytest.raises(StalePolicy, match=f"{url} says that it has policy second by name, with other weights, wanted"):
        remote(RemoteServer(url), kind="native").load(policy("second", **FLOAT32))

    # Its answers alone, by the trainer's log-probabilities, would be found out too.
    class Trusting(Native):
        def weights(self, server, policy):
            return policy.weights

    engine = Fleet(Trusting(), [RemoteServer(url)], OPTIONS)
    with pytest.raises(StalePolicy, match=r"log-probabilities are [\d.]+ from the trainer's on average"):
        engine.load(policy("second", **FLOAT32))


def test_answers_of_a_policy_that_somebody_else_has_pushed_are_thrown_away(native_server, policy, native):
    server, url = native_server()
    engine = remote(RemoteServer(url), kind="native", concurrency=2)
    engine.load(policy("first", **FLOAT32))
    stream = engine.run(GREEDY)
    found = dict([next(stream)])
    remote(RemoteServer(url), kind="native").load(policy("second", **FLOAT32))
    found |= dict(stream)
    assert any("was given policy second while it sampled from first" in line for line in engine.lines)
    same([found[i] for i in range(len(GREEDY))], native["first"])
    assert server.policy == "first"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bfloat16"}, "it computes in float32, and dtype is bfloat16: say the server's"),
        ({"config": dict}, r"it serves another model: config\.\w+ is .* there and None here"),
    ],
)
def test_a_server_of_another_type_or_model_is_refused_before_anything_is_sent(native_server, policy, change, message):
    _, url = native_server()
    with pytest.raises(ServerRefused, match=message):
        remote(RemoteServer(url), kind="native").load(policy("second", **FLOAT32 | change))


@pytest.mark.parametrize("sync", ["auto", "none"])
def test_a_server_that_can_show_no_weights_is_refused_though_it_names_the_policy(native_server, policy, sync):
    _, url = native_server(quantization="int8")
    with pytest.raises(ServerRefused, match="can be neither pushed nor proven: serve without --quantization"):
        remote(RemoteServer(url), kind="native", sync=sync).load(policy("first", **FLOAT32))


def test_a_byte_that_flips_on_its_way_is_refused_and_the_old_policy_stays(native_server, policy, native):
    server, url = native_server()

    class Flipping(RemoteServer):
        def send(self, path, bodies):
            changed = [bytearray(body) for body in bodies]
            changed[-1][-1] ^= 1
            super().send(path, map(bytes, changed))

    engine = remote(Flipping(url), kind="native")
    with pytest.raises(ServerRefused, match=r"/weights/\w+ answered 400: the checksum of the bucket's \d+ bytes"):
        engine.load(policy("second", **FLOAT32))
    # The push is given up, and its memory.
    for thread in threading.enumerate():
        if thread.name == "push":
            thread.join(timeout=15)
            assert not thread.is_alive()
    assert server.policy == "first"
    engine = remote(RemoteServer(url), kind="native", sync="none")
    engine.load(policy("first", **FLOAT32))
    same(run(engine, GREEDY), native["first"])


@pytest.fixture
def program(folders, tmp_path):
    """Starts servers as processes, on a port that stays: (process, URL)."""
    made = []

    def start(port=None):
        if port is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        words = ["tests.stages.sampling.native_server", str(folders["first"]), "--name", "first", "--port", str(port)]
        with (tmp_path / "log").open("ab") as log:
            made.append(subprocess.Popen([sys.executable, "-m", *words], stdout=log, stderr=log))
        RemoteServer(f"http://127.0.0.1:{port}").wait(120)
        return made[-1], port

    yield start
    for process in made:
        process.kill()
        process.wait()


@pytest.fixture
def wire():
    """Makes a proxy of bytes before a server's port: (its URL, what cuts it)."""
    listeners, cut = [], threading.Event()

    def pumped(source, target, counted):
        try:
            while not cut.is_set() and (data := source.recv(65536)):
                counted[0] += len(data)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def make(port, after):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        counted = [0]

        def accept():
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                server = socket.create_connection(("127.0.0.1", port))
                threading.Thread(target=pumped, args=(client, Limited(server), counted), daemon=True).start()
                threading.Thread(target=pumped, args=(server, client, [0]), daemon=True).start()

        class Limited:
            """The server's side, which is cut after so many bytes of all connections."""

            def __init__(self, to):
                self.to = to

            def sendall(self, data):
                if counted[0] > after:
                    self.to.sendall(data[: len(data) // 2])
                    raise OSError
                self.to.sendall(data)

            def close(self):
                self.to.shutdown(socket.SHUT_RDWR)
                self.to.close()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield make
    cut.set()
    for listener in listeners:
        listener.close()


def test_a_connection_that_is_cut_in_mid_stream_leaves_the_old_policy(native_server, wire, policy, native):
    server, url = native_server()
    place = wire(int(url.rpartition(":")[2]), after=100_000)
    with pytest.raises(ServerLost, match=r"/weights/\w+: \w+"):
        remote(small(place), kind="native").load(policy("second", **FLOAT32))
    assert httpx.get(f"{url}/weight_info").json() == {"weight_version": "first"}
    old = remote(RemoteServer(url), kind="native", sync="none")
    old.load(policy("first", **FLOAT32))
    same(run(old, GREEDY), native["first"])
    # The next push takes the place of the one that was cut.
    engine = remote(small(url), kind="native")
    engine.load(policy("second", **FLOAT32))
    same(run(engine, GREEDY), native["second"])


@pytest.mark.slow
def test_a_server_that_is_killed_in_mid_stream_has_its_old_policy_when_it_is_back(program, policy, native):
    process, port = program()
    url = f"http://127.0.0.1:{port}"

    def killing(types):
        for number, tensor in enumerate(tensors("second")(types)):
            if number == 4:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            yield tensor

    with pytest.raises(ServerLost, match=r"/weights/\w+: ConnectError"):
        remote(small(url), kind="native").load(policy("second", tensors=killing, **FLOAT32))
    program(port)
    assert httpx.get(f"{url}/weight_info").json() == {"weight_version": "first"}
    engine = remote(small(url), kind="native")
    engine.load(policy("second", **FLOAT32))
    same(run(engine, GREEDY), native["second"])


@pytest.mark.slow
def test_a_policy_that_was_acknowledged_and_lost_by_a_restart_is_pushed_again(program, policy, native):
    process, port = program()
    engine = remote(RemoteServer(f"http://127.0.0.1:{port}"), kind="native", concurrency=1, wait_seconds=120)
    engine.load(policy("second", **FLOAT32))
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
    assert httpx.get(f"http://127.0.0.1:{port}/weight_info").json() == {"weight_version": "second"}
