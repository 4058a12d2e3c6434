"""Policies as streams to servers that run `rlhf_weights.routes`, here over this project's engine.

vLLM itself takes them in `tests/faults/test_vllm_stream.py`.
"""

from __future__ import annotations

import asyncio
import threading
import types

import httpx
import pytest

from tests.stages.sampling.http_server import make_app, serve
from tests.stages.sampling.support import GREEDY, Unheard, remote, run, same, small, tensors, until
from tests.stages.sampling.vllm_engine import Client
from tuning.rollout.inside.rlhf_weights.routes import Weights
from tuning.rollout.servers.protocol import ServerLost, ServerRefused, StalePolicy
from tuning.rollout.servers.server import RemoteServer


@pytest.fixture
def url(state):
    server, thread, url = serve(make_app(state, Weights))
    yield url
    # A server that is paused would wait for its requests.
    state.running.set()
    server.should_exit = True
    thread.join()


def unseen():
    raise AssertionError("nobody sees a folder")


def test_weights_are_streamed_where_servers_take_that_and_no_folder_is_shared(url, state, policy, native):
    engine = remote(small(url))
    engine.load(policy("second", folder=unseen))
    same(run(engine, GREEDY), native["second"])
    assert state.version == "second"
    assert len([path for path in state.calls if path.startswith("/weights/")]) > 10
    assert "/collective_rpc" not in state.calls


@pytest.mark.parametrize("changes", [{"sync": "weights"}, {"shared": True}])
def test_a_folder_that_is_named_is_used_and_ends_what_was_streamed(url, state, policy, native, changes):
    remote(small(url)).load(policy("first", folder=unseen))
    assert httpx.get(f"{url}/weights").json()["fingerprint"]
    state.calls.clear()
    engine = remote(small(url), **changes)
    engine.load(policy("second"))
    assert "/collective_rpc" in state.calls
    assert httpx.get(f"{url}/weights").json()["fingerprint"] is None
    same(run(engine, GREEDY), native["second"])


def test_a_server_that_takes_no_stream_is_refused_where_one_is_asked_for(state, policy):
    server, thread, url = serve(make_app(state))
    try:
        with pytest.raises(ServerRefused, match="takes no stream of weights: start it with PYTHONPATH at a copy of"):
            remote(RemoteServer(url), sync="stream").load(policy("first"))
        remote(RemoteServer(url)).load(policy("second"))
        assert state.version == "second"
    finally:
        server.should_exit = True
        thread.join()


def test_other_weights_under_the_policys_name_are_found_out_by_the_fingerprint(url, state, policy):
    remote(small(url)).load(policy("first", folder=unseen))
    state.version = "second"
    # Nobody samples from them: the log-probabilities are not asked for.
    state.calls.clear()
    with pytest.raises(StalePolicy, match="says that it has policy second by name, with other weights, wanted is"):
        remote(small(url), sync="none").load(policy("second", folder=unseen))
    assert "/v1/completions" not in state.calls
    # A trainer that was started again knows the policy by its fingerprint, and sends nothing.
    state.version = "first"
    state.calls.clear()
    remote(small(url), sync="none").load(policy("first", folder=unseen))
    assert not any(path.startswith("/weights/") for path in state.calls)


class Losing(RemoteServer):
    def send(self, path, bodies):
        super().send(path, (body for number, body in enumerate(bodies) if number != 12))


class Returning(RemoteServer):
    """The first bucket comes again behind half of them."""

    def send(self, path, bodies):
        bodies = list(bodies)
        half = len(bodies) // 2
        super().send(path, [*bodies[:half], bodies[0], *bodies[half:]])


class Reversing(RemoteServer):
    def send(self, path, bodies):
        super().send(path, list(bodies)[::-1])


class Flipping(RemoteServer):
    def send(self, path, bodies):
        super().send(path, (bytes([*body[:-1], body[-1] ^ 1]) for body in bodies))


class Cutting(RemoteServer):
    def send(self, path, bodies):
        super().send(path, list(bodies)[:-1])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Losing, r"answered 400: rows \d+ to \d+ of .* come where .* goes on from row \d+"),
        (Returning, r"answered 400: .* come where .* goes on from|answered 400: .* comes a second time"),
        (Cutting, r"answered 400: .* ends with row \d+ of|answered 400: the fingerprint of what came is"),
    ],
)
def test_a_push_that_is_not_what_was_cut_leaves_a_server_that_claims_nothing(url, state, policy, native, kind, message):
    remote(small(url)).load(policy("first", folder=unseen))
    with pytest.raises(ServerRefused, match=message):
        remote(small(url, kind)).load(policy("second", folder=unseen))
    told = httpx.get(f"{url}/weights").json()
    assert (told["policy"], told["fingerprint"], told["paused"]) == ("unknown", None, True)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"model": "policy", "prompt": [1], "max_tokens": 1}, timeout=0.5)
    for name in ("first", "second"):
        with pytest.raises(StalePolicy, match=f"has policy unknown, wanted is {name}"):
            remote(small(url), sync="none").load(policy(name, folder=unseen))
    engine = remote(small(url))
    engine.load(policy("second", folder=unseen))
    same(run(engine, GREEDY), native["second"])


def test_buckets_and_commits_whose_answers_are_lost_are_sent_again(url, state, policy, native, monkeypatch):
    monkeypatch.setattr("tuning.rollout.servers.server.FIRST_PAUSE", 0.0)
    server = small(url, Unheard)
    engine = remote(server)
    engine.load(policy("second", folder=unseen))
    assert len(server.lost) > 10 and server.lost[-1].endswith("/commit")
    same(run(engine, GREEDY), native["second"])


def test_a_bucket_that_was_changed_on_its_way_may_come_again(url, state, policy, native):
    class Retrying(RemoteServer):
        def send(self, path, bodies):
            for number, body in enumerate(bodies):
                if number == 3:
                    with pytest.raises(ServerRefused, match="checksum"):
                        super().send(path, [bytes([*body[:-1], body[-1] ^ 1])])
                super().send(path, [body])

    engine = remote(small(url, Retrying))
    engine.load(policy("second", folder=unseen))
    same(run(engine, GREEDY), native["second"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Reversing, r"answered 400: rows \d+ to \d+ of .* come where .* goes on from row 0"),
        (Flipping, r"answered 400: the checksum of the bucket's \d+ bytes"),
    ],
)
def test_a_server_goes_on_with_its_policy_where_no_tensor_of_a_push_has_come(url, policy, native, kind, message):
    remote(small(url)).load(policy("first", folder=unseen))
    with pytest.raises(ServerRefused, match=message):
        remote(small(url, kind)).load(policy("second", folder=unseen))
    engine = remote(small(url), sync="none")
    engine.load(policy("first", folder=unseen))
    same(run(engine, GREEDY), native["first"])


def test_a_server_goes_on_where_the_client_of_a_push_has_left_before_its_first_tensor(url, policy, monkeypatch):
    monkeypatch.setattr("tuning.rollout.inside.rlhf_weights.routes.SILENT_SECONDS", 0.3)
    remote(small(url)).load(policy("first", folder=unseen))
    assert RemoteServer(url).post("/weights", {"policy": "second", "tied": True, "push": "a"}) == {"push": "a"}
    # Asked again it is the same one.
    assert RemoteServer(url).post("/weights", {"policy": "second", "tied": True, "push": "a"}) == {"push": "a"}
    told = httpx.get(f"{url}/weights").json()
    assert (told["policy"], told["fingerprint"], told["paused"]) == ("unknown", None, True)
    until(lambda: not httpx.get(f"{url}/weights").json()["paused"])
    remote(small(url), sync="none").load(policy("first", folder=unseen))
    with pytest.raises(ServerRefused, match="no such push"):
        RemoteServer(url).post("/weights/a", {})


def test_a_bucket_that_takes_long_is_no_silence(url, policy, native, monkeypatch):
    monkeypatch.setattr("tuning.rollout.inside.rlhf_weights.routes.SILENT_SECONDS", 0.2)
    call, slow = Client.collective_rpc, []

    async def late(self, method, args=()):
        if method == "rlhf_add" and not slow:
            slow.append(method)
            await asyncio.sleep(1)
        return await call(self, method, args)

    monkeypatch.setattr(Client, "collective_rpc", late)
    engine = remote(small(url))
    engine.load(policy("second", folder=unseen))
    same(run(engine, GREEDY), native["second"])
    assert slow


def test_a_server_that_cannot_pause_goes_on_with_its_policy(url, state, policy, monkeypatch):
    async def broken(self, *, mode):
        raise RuntimeError("the engine is busy")

    remote(small(url)).load(policy("first", folder=unseen))
    monkeypatch.setattr(Client, "pause_generation", broken)
    with pytest.raises(ServerLost, match="the engine is busy"):
        remote(small(url)).load(policy("second", folder=unseen))
    assert state.version == "first" and state.running.is_set()


def test_a_push_that_is_given_up_while_it_waits_for_requests_never_begins(url, state, policy, monkeypatch):
    busy = threading.Event()

    async def waiting(self, *, mode):
        await asyncio.to_thread(busy.wait)
        state.running.clear()

    remote(small(url)).load(policy("first", folder=unseen))
    monkeypatch.setattr(Client, "pause_generation", waiting)
    with pytest.raises(ServerLost, match="Timeout"):
        remote(small(url, timeout=0.5)).load(policy("second", folder=unseen))
    busy.set()
    until(lambda: state.version == "first" and state.running.is_set())
    remote(small(url), sync="none").load(policy("first", folder=unseen))


def test_a_policy_that_cannot_be_read_stops_no_server(url, state, policy):
    def lost(types):
        raise OSError("the disk is gone")
        yield

    remote(small(url)).load(policy("first", folder=unseen))
    state.calls.clear()
    with pytest.raises(OSError, match="the disk is gone"):
        remote(small(url)).load(policy("second", folder=unseen, tensors=lost))
    assert not any(path.startswith("/weights/") for path in state.calls) and state.version == "first"


def test_the_push_that_was_begun_last_is_the_one_that_counts(url, policy, native):
    def overtaken(types):
        for number, tensor in enumerate(tensors("second")(types)):
            if number == 4:
                remote(small(url)).load(policy("first", folder=unseen))
            yield tensor

    with pytest.raises(ServerRefused, match="answered 404: there is no such push: another one began"):
        remote(small(url)).load(policy("second", folder=unseen, tensors=overtaken))
    engine = remote(small(url), sync="none")
    engine.load(policy("first", folder=unseen))
    same(run(engine, GREEDY), native["first"])


def test_a_server_with_a_key_asks_for_it(url, policy, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert httpx.get(f"{url}/weights").status_code == 401
    assert httpx.delete(f"{url}/weights", headers={"Authorization": "Bearer other"}).status_code == 401
    remote(RemoteServer(url, key="secret")).load(policy("second", folder=unseen))
    assert httpx.get(f"{url}/weight_info").json() == {"weight_version": "second", "streams": True}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/weights", b"{", 400, "the body is no JSON"),
        ("POST", "/weights", b"[]", 400, "the body is no JSON object"),
        ("POST", "/weights", b'{"policy": "x"}', 400, "a push begins with the policy's name and tied"),
        ("POST", "/weights/1/2/3", b"", 404, "there is no POST /weights/1/2/3"),
        ("POST", "/weights/1", b"x", 404, "there is no such push"),
        ("POST", "/weights/1", bytes(18 * 2**20), 413, "a bucket has at most 17825792 bytes"),
        ("PUT", "/weights", b"", 404, "there is no PUT /weights"),
    ],
)
def test_what_is_no_push_is_refused_in_words(url, method, path, body, status, message):
    answer = httpx.request(method, url + path, content=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_a_push_that_the_model_cannot_take_is_refused_before_anything_changes(url, state, policy):
    remote(small(url)).load(policy("second", folder=unseen))
    before = httpx.get(f"{url}/weights").json()
    answer = httpx.post(f"{url}/weights", json={"policy": "third", "tied": False})
    assert answer.status_code == 400
    assert "the policy has a head of its own" in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/weights").json() == before
    assert before["policy"] == "second" and not before["paused"]


@pytest.mark.parametrize("name", ["data_parallel_size", "_api_process_count"])
def test_a_server_of_several_engines_takes_no_stream(url, state, policy, monkeypatch, name):
    """vLLM passes on the answers of the first engine alone."""
    parallel = types.SimpleNamespace(**{name: 2})
    monkeypatch.setattr(Client, "vllm_config", types.SimpleNamespace(parallel_config=parallel), raising=False)
    with pytest.raises(ServerRefused, match=f"{name.strip('_')} 2, and a stream needs one engine"):
        remote(small(url), sync="stream").load(policy("second", folder=unseen))
    assert not httpx.get(f"{url}/weights").json()["paused"]
