"""What is held, and what waits, around the swap of a pushed policy."""

import contextlib
import dataclasses
import gc
import json
import socket
import threading
import time
import tracemalloc
import weakref

import httpx
import jax
import pytest
from flax import nnx

from stages.serving.guard import Bounds
from stages.serving.programs import listening
from stages.serving.server import Server
from stages.serving.weights import BODY_BYTES, Begun, Committed, PushBusy, Pushes
from tests.stages.serving.support import CONFIG, CONTEXT, LIMITS, STOPS, TOKENIZER, serving
from tuning.models.huggingface import random_params, tensors_from_params
from tuning.rollout.engine import staged
from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.live import EngineStopped, Live
from tuning.rollout.engine.staged import Unfit
from tuning.rollout.inside.rlhf_weights.frames import Fingerprint, buckets
from tuning.rollout.requests import Request, Sampling

CONFIG_JSON = json.loads(json.dumps(dataclasses.asdict(CONFIG)))
TENSORS = list(tensors_from_params(nnx.to_pure_dict(random_params(CONFIG, 4))))


@pytest.fixture
def live():
    engine = Engine(CONFIG, limits=LIMITS, top=5)
    engine.load(random_params(CONFIG, 3))
    with contextlib.closing(Live(engine)) as live:
        yield live


@pytest.fixture
def pushes(live):
    return Pushes(Server(live, TOKENIZER, "tiny", STOPS, CONTEXT, "old"))


@contextlib.contextmanager
def draining(pushes, live):
    """Within, a push waits for a request under way; behind it the push is the policy."""
    push, found = sent(pushes)
    ended = threading.Event()
    # Some forty steps, behind each of which the engine is held up.
    stream = live.submit(Request([5, 6, 7], 150, Sampling(temperature=0)), lambda: ended.wait(0.5))
    committing = threading.Thread(target=pushes.commit, args=(push, Committed(fingerprint=found)))
    committing.start()
    try:
        while not any(order.swaps for order in list(live._orders)):
            assert committing.is_alive()
            time.sleep(0.001)
        yield
        assert committing.is_alive() and live.generation == 0
    finally:
        ended.set()
        stream.result()
        committing.join()


def sent(pushes, tensors=TENSORS):
    """(ID, fingerprint) of a push of these tensors that has arrived."""
    push, seen = pushes.begin(Begun(policy="new", config=CONFIG_JSON))["push"], Fingerprint()
    for bucket in buckets(tensors, 20_000, seen):
        pushes.add(push, bucket)
    return push, seen.hexdigest()


@pytest.mark.parametrize("fault", ["missing", "fingerprint", "engine"])
def test_a_push_that_was_refused_holds_no_weights(pushes, live, fault):
    push, found = sent(pushes, TENSORS[:-1] if fault == "missing" else TENSORS)
    arrays = [weakref.ref(array) for array in pushes._now.staged._arrays.values()]
    if fault == "engine":
        live.close()
    kind = {"missing": Unfit, "fingerprint": ValueError, "engine": EngineStopped}[fault]
    # Asked again it is refused again: the error is kept for that, and nothing with it.
    for _ in range(2):
        with pytest.raises(kind):
            pushes.commit(push, Committed(fingerprint="0" * 64 if fault == "fingerprint" else found))
    gc.collect()
    assert len(arrays) > 3 and not any(array() is not None for array in arrays)


def test_what_is_held_is_told_while_a_push_waits_for_requests_under_way(pushes, live):
    before = pushes.told()
    with draining(pushes, live):
        assert pushes.told() == before
    assert (pushes.told()["policy"], live.generation) == ("new", 1)


def test_who_asks_for_weights_that_others_swap_is_told_to_ask_again(live):
    """Its thread is one of those that all routes share."""
    pushes = Pushes(Server(live, TOKENIZER, "tiny", STOPS, CONTEXT, "old"), reading_seconds=0.1)
    with draining(pushes, live), pytest.raises(PushBusy, match="ask again"):
        pushes.told()
    assert pushes.told()["policy"] == "new"


@pytest.fixture
def url(pushes, live):
    url, end = serving(pushes._server, Bounds(body_bytes=8_000, bucket_bytes=BODY_BYTES), pushes=pushes)
    yield url
    end()


def begun(url, path, size):
    """A connection on which half of a body of so many bytes was sent."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=30)
    client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode())
    client.sendall(bytes(size // 2))
    return client


def test_a_bucket_of_no_push_is_not_kept_while_it_arrives(url):
    assert httpx.get(f"{url}/weights").status_code == 200
    size, clients = 8 * 2**20, []
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            clients.append(begun(url, "/weights/none", size))
        time.sleep(1)
        assert tracemalloc.get_traced_memory()[0] - before < 3 * 2**20
        clients[0].sendall(bytes(size // 2))
        assert b" 409 " in clients[0].recv(1000)
    finally:
        tracemalloc.stop()
        for client in clients:
            client.close()


def test_a_bucket_waits_for_the_one_before_it_and_not_for_that_of_a_push_that_ended(url):
    def begin():
        return httpx.post(f"{url}/weights", json={"policy": "new", "config": CONFIG_JSON}).json()["push"]

    bucket = next(buckets(TENSORS, 20_000))
    push = begin()
    with begun(url, f"/weights/{push}", 1000) as first:
        time.sleep(0.5)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/weights/{push}", content=bucket, timeout=1)
        assert httpx.post(f"{url}/weights/{begin()}", content=bucket, timeout=10).status_code == 200
        first.sendall(bytes(500))
        assert b" 40" in first.recv(1000)


def test_a_server_of_agents_programs_has_no_routes_of_weights(live):
    with listening(Server(live, TOKENIZER, "tiny", STOPS, CONTEXT), "k" * 24) as url:
        headers = {"authorization": f"Bearer {'k' * 24}"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{url}/weights", headers=headers).status_code == 404


@pytest.mark.parametrize("dropped", [False, True])
def test_a_policy_that_devices_do_not_take_leaves_the_old_one_or_none(pushes, live, monkeypatch, capfd, dropped):
    def full(*_):
        raise MemoryError("full")

    push, found = sent(pushes)
    before = pushes.told()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", full)
        if dropped:
            patch.setattr(staged, "_on_cpu", lambda engine: False)
        with pytest.raises(staged.WeightsLost if dropped else MemoryError, match="full"):
            pushes.commit(push, Committed(fingerprint=found))
    if dropped:
        assert isinstance(live.failure, staged.WeightsLost) and pushes._server.policy is None
        assert f"push {push} of policy new: the new policy could not be put" in capfd.readouterr().err
    else:
        assert live.failure is None and pushes.told() == before
        assert live.submit(Request([5], 4)).result()
