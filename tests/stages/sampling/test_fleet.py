"""Engines over HTTP: this project's own server behind vLLM's and SGLang's interface, on loopback.

SGLang's side is checked against its documented schema only: it has not run against SGLang itself. vLLM itself runs in
`tests/faults/test_vllm.py`.
"""

import asyncio
import contextlib
import dataclasses
import json
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from rlhf.stages.sampling.servers import _adapter, _own
from rlhf.stages.serving.app import make_app
from rlhf.stages.serving.server import Server
from rlhf.tuning.rollout.requests import RefusedRequest, Sampling
from rlhf.tuning.rollout.requests import Request as Asked
from rlhf.tuning.rollout.servers.kinds import KINDS
from rlhf.tuning.rollout.servers.protocol import ServerLost, ServerRefused, StalePolicy, sample_seed
from rlhf.tuning.rollout.servers.server import RemoteServer
from rlhf.tuning.rollout.servers.streaming import Turns
from tests.stages.sampling.http_server import VERSION
from tests.stages.sampling.support import GREEDY, STOPS, TOKENIZER, remote, requests_of, run, same, trainer
from tests.stages.support import running
from tests.support import until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "way", "path"),
    [
        ("vllm", "policy", "/collective_rpc"),
        ("vllm", "shared", "/update_weights"),
        ("sglang", "policy", "/update_weights_from_disk"),
    ],
)
def test_greedy_completions_are_the_native_engines_before_and_after_an_update(
    request, kind, way, path, url, state, native
):
    engine, policy = remote(RemoteServer(url), kind=kind), request.getfixturevalue(way)
    for name in ("first", "second"):
        engine.load(policy(name))
        assert state.version == name
        assert path in state.calls
        assert engine.gaps[url] < 1e-5
        same(run(engine, GREEDY), native[name])
    assert {c.stop for c in native["first"]} == {"eos", "length"}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_samples_are_the_trainers_by_temperature_and_depend_on_seed_counter_and_number(kind, url, policy):
    engine = remote(RemoteServer(url), kind=kind)
    engine.load(policy("first", temperature=0.7))
    requests = requests_of(6, temperature=0.7, samples=3)
    found = run(engine, requests)
    for request, completions in zip(requests, found, strict=True):
        pairs = [(request.prompt, c.tokens) for c in completions]
        for completion, expected in zip(completions, trainer("first")(pairs, 0.7), strict=True):
            np.testing.assert_allclose(completion.logps, expected, atol=1e-5)
            assert completion.stop == ("eos" if completion.tokens[-1] in STOPS else "length")
    tokens = [[c.tokens for c in p] for p in found]
    assert [[c.tokens for c in p] for p in run(engine, requests[::-1])][::-1] == tokens
    assert len({tuple(t) for p in tokens for t in p}) == 18
    (other,) = run(engine, [dataclasses.replace(requests[0], counter=50)])
    assert [c.tokens for c in other] != tokens[0]


def test_the_same_policy_is_not_loaded_twice(url, state, policy):
    engine = remote(RemoteServer(url))
    engine.load(policy("second"))
    state.calls.clear()
    remote(RemoteServer(url)).load(policy("second"))
    assert "/collective_rpc" not in state.calls
    assert "/v1/completions" in state.calls


def test_a_stale_server_is_refused_and_both_policies_are_named(url, state, policy):
    state.version = "older"
    with pytest.raises(StalePolicy, match="says that it has policy older, wanted is second; nothing is sampled"):
        remote(RemoteServer(url), sync="none").load(policy("second"))
    assert "/v1/completions" not in state.calls


def test_a_server_that_only_claims_to_have_the_policy_is_found_out(url, state, policy):
    state.version = "second"
    with pytest.raises(StalePolicy, match=r"wanted is second; .* log-probabilities are [\d.]+ from the trainer's"):
        remote(RemoteServer(url)).load(policy("second"))


def test_log_probabilities_before_the_temperature_are_found_out(url, policy):
    raw = dataclasses.replace(policy("first", temperature=0.5), logps=lambda p, t: trainer("first")(p, 1.0))
    with pytest.raises(StalePolicy, match="processed_logprobs"):
        remote(RemoteServer(url)).load(raw)


def test_a_server_that_does_not_say_whose_weights_it_has_must_prove_them(state, policy, native):
    """`rlhf serve` of a policy that is no artifact, and servers without development endpoints."""
    with running(make_app(Server(state.live, TOKENIZER, "policy", (), 256))) as url:
        engine = remote(RemoteServer(url), sync="none")
        engine.load(policy("first"))
        same(run(engine, GREEDY), native["first"])
        with pytest.raises(StalePolicy, match="does not say which policy it has, wanted is second"):
            engine.load(policy("second"))


def test_answers_of_other_weights_are_thrown_away(url, state, policy, fleet, native):
    engine = fleet(concurrency=2)
    stream = engine.run(GREEDY)
    found = dict([next(stream)])
    # Somebody else's run comes by.
    remote(RemoteServer(url)).load(policy("second"))
    found |= dict(stream)
    assert any("was given policy second while it sampled from first" in line for line in engine.lines)
    same([found[i] for i in range(len(GREEDY))], native["first"])
    assert state.version == "first"


def test_a_transfer_that_fails_is_finished_and_leaves_a_server_without_a_policy(url, state, shared, native):
    damaged = dataclasses.replace(shared("second").transfer(), files={"model.safetensors": "0" * 64})
    with pytest.raises(ServerLost, match="/update_weights answered 500"):
        remote(RemoteServer(url)).load(shared("second", transfer=lambda: damaged))
    assert state.version == "unknown"
    assert state.calls[-2:] == ["/finish_weight_update", "/resume"]
    engine = remote(RemoteServer(url))
    engine.load(shared("second"))
    same(run(engine, GREEDY), native["second"])


def test_another_version_is_refused(url, policy):
    remote(RemoteServer(url), version=VERSION).load(policy("first"))
    with pytest.raises(ServerRefused, match=f"has vllm {VERSION}, and 9.9 was asked for"):
        remote(RemoteServer(url), version="9.9").load(policy("first"))


@pytest.fixture
def proxy(url):
    """Makes a proxy before the server that answers a status of its own to the requests for completions that `fails`
    picks; it is given the number of the request and its body."""
    with contextlib.ExitStack() as stack:

        def make(fails, status):
            app, bodies = FastAPI(), []

            @app.api_route("/{path:path}", methods=["GET", "POST"])
            async def forward(path: str, request: Request) -> Response:
                body = await request.body()
                if path == "v1/completions":
                    bodies.append(json.loads(body))
                    if fails(len(bodies), bodies[-1]):
                        return Response("the gateway is busy", status)
                async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
                    query = f"?{request.url.query}" if request.url.query else ""
                    headers = {"content-type": "application/json"}
                    found = await client.request(request.method, f"{url}/{path}{query}", content=body, headers=headers)
                return Response(found.content, found.status_code, media_type="application/json")

            return stack.enter_context(running(app)), bodies

        yield make


def test_a_busy_gateway_is_asked_again(proxy, policy, native):
    place, bodies = proxy(lambda number, body: number % 3 == 0, 503)
    engine = remote(RemoteServer(place), concurrency=4)
    engine.load(policy("first"))
    same(run(engine, GREEDY), native["first"])
    # 12 requests and 2 of the probe, and a third of all were turned away.
    assert len(bodies) == 14 + 6
    assert len(engine.lines) == 1


def test_a_server_that_fails_at_everything_is_given_up(proxy, policy):
    """It is healthy and passes its probe, again and again."""
    probes = [r.counter for r in policy("first").probe]
    passed = {sample_seed(48, 7, counter) for counter in probes}
    place, bodies = proxy(lambda number, body: body["seed"] not in passed, 500)
    engine = remote(RemoteServer(place, retries=1), concurrency=3, tries=3, seeds=True)
    engine.load(policy("first"))
    with pytest.raises(ServerLost, match=r"was lost 3 times without an answer; the last: .* answered 500: the gateway"):
        run(engine, GREEDY)
    assert len(bodies) < 40


def test_what_a_server_declines_ends_the_run_with_its_words(fleet):
    engine = fleet()
    long = Asked([1] * 300, 5, Sampling(1.0), STOPS)
    with pytest.raises(ServerRefused, match="answered 400: .*the prompt has 300 tokens; the context is"):
        run(engine, [*GREEDY, long])
    # The engine can be used again.
    assert len(run(engine, GREEDY)) == len(GREEDY)


def test_what_an_engine_would_do_otherwise_is_refused(policy):
    limited = Asked([1], 5, Sampling(1.0, top_p=0.9), STOPS, name="here")
    with pytest.raises(RefusedRequest, match="request here: SGLang's log-probabilities are those before top_p"):
        KINDS["sglang"].body(limited, policy("first"))
    with pytest.raises(RefusedRequest, match="stop strings"):
        KINDS["vllm"].body(Asked([1], 5, find_stop=lambda t: None), policy("first"))


@pytest.mark.parametrize(("kind", "seeds"), [("vllm", False), ("sglang", False), ("native", True)])
def test_requests_have_seeds_where_they_are_asked_for_or_cost_nothing(kind, seeds, policy):
    asked = Asked([1], 5, Sampling(1.0), STOPS, seed=7, samples=2)
    assert ("seed" in json.dumps(KINDS[kind].body(asked, policy("first")))) == seeds
    body = json.dumps(KINDS[kind].body(asked, policy("first"), True))
    assert "seed" in body and body == json.dumps(KINDS[kind].body(asked, policy("first"), True))


def test_an_answer_that_never_ends_is_given_up():
    app = FastAPI()

    @app.post("/v1/completions")
    async def drip() -> StreamingResponse:
        async def spaces():
            for _ in range(200):
                yield b" "
                await asyncio.sleep(0.05)

        return StreamingResponse(spaces())

    with running(app) as place, pytest.raises(ServerLost, match="/v1/completions gave no whole answer within 0.5 s"):
        RemoteServer(place, timeout=0.5).post("/v1/completions", {})


def test_one_of_two_servers_is_enough(url, policy, native):
    engine = remote(RemoteServer("http://127.0.0.1:9"), RemoteServer(url), start_seconds=0.5)
    engine.load(policy("first"))
    same(run(engine, GREEDY), native["first"])
    assert any("a server is given up: http://127.0.0.1:9" in line for line in engine.lines)


def test_leaving_early_ends_what_runs(state, fleet):
    engine = fleet(concurrency=2)
    before = threading.active_count()
    stream = engine.run(requests_of(8, samples=2, max_tokens=150))
    next(stream)
    stream.close()
    until(lambda: state.live._engine.idle, 20)
    # The server may have made threads for the connections; of 16 samples none has one of its own.
    assert threading.active_count() < before + 8


def test_the_weights_of_a_worker_in_another_container_stay(tmp_path):
    """Of one host name: its processes are not in this one's /proc."""
    ours = Path(_own(str(tmp_path)))
    ended = subprocess.Popen(["true"])
    ended.wait()
    theirs = tmp_path / f"{socket.gethostname()}-1-{ended.pid}"
    dead = ours.with_name(f"{ours.name.rpartition('-')[0]}-{ended.pid}")
    for folder in (theirs, dead):
        folder.mkdir()
    _own(str(tmp_path))
    assert theirs.exists() and not dead.exists()


def test_an_adapter_takes_the_place_of_that_of_the_round_before(tmp_path):
    """Else a thousand rounds leave a thousand of them on the disk."""
    settings, source = SimpleNamespace(folder=str(tmp_path / "engines")), tmp_path / "from"
    source.mkdir()
    target = source
    for digest in ("a" * 64, "b" * 64, "b" * 64):
        (source / "adapter_config.json").write_text(digest)
        target = _adapter(None, settings, SimpleNamespace(digest=digest, local=lambda part: source))
        assert (target / "adapter_config.json").read_text() == digest
    assert [path.name for path in target.parent.iterdir()] == [f"adapter-{'b' * 16}"]
    # A server that is lost gets it again where a collection has removed it.
    shutil.rmtree(target.parent)
    assert _adapter(None, settings, SimpleNamespace(digest="b" * 64, local=lambda part: source)) == target
    assert target.exists()


def ended(turns, *numbers):
    found = {}
    while not set(numbers) <= found.keys():
        found |= {u.number: u.completion for u in turns.step()}
    return [found[n] for n in numbers]


@pytest.mark.slow
def test_turns_are_those_of_the_native_engine_in_any_order(fleet, native):
    turns = Turns(fleet(), 3)
    assert turns.idle and turns.slots_for(10_000) == 3
    numbers = [turns.submit(dataclasses.replace(r, samples=1, keep=True)) for r in GREEDY]
    dropped = turns.submit(dataclasses.replace(GREEDY[0], samples=1))
    turns.cancel(dropped)
    found = ended(turns, *reversed(numbers))[::-1]
    same([[c] for c in found], native["first"])
    assert turns.idle and turns.step() == []
    turns.release(numbers[0])


def test_what_a_server_raises_ends_the_step(fleet):
    turns = Turns(fleet(), 1)
    turns.submit(dataclasses.replace(GREEDY[0], samples=1, prompt=[10**6]))
    with pytest.raises(ServerRefused, match="1000000"):
        for _ in range(1000):
            turns.step()


def test_what_a_server_raises_for_a_cancelled_request_reaches_nobody(fleet, native):
    with contextlib.closing(Turns(fleet(), 1)) as turns:
        # One at a time: the answer of the second comes behind the error of the first.
        refused = turns.submit(dataclasses.replace(GREEDY[0], samples=1, prompt=[10**6]))
        number = turns.submit(dataclasses.replace(GREEDY[0], samples=1))
        turns.cancel(refused)
        same([ended(turns, number)], native["first"][:1])
        turns.submit(dataclasses.replace(GREEDY[0], samples=1))
    assert turns.idle and turns.step() == []
    with pytest.raises(RuntimeError, match="shutdown"):
        turns.submit(dataclasses.replace(GREEDY[0], samples=1))
