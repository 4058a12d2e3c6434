"""Engines over HTTP: this project's own server behind vLLM's and SGLang's interface, on loopback.

SGLang's side is checked against its documented schema only: it has not run against SGLang itself. vLLM itself runs in
`test_vllm.py`.
"""

import dataclasses
import json
import threading
import time

import httpx
import jax
import numpy as np
import pytest
from fastapi import FastAPI, Request, Response

from tests.tuning.rollout.servers.http_server import VERSION, State, make_app, serve
from tuning.device import Compute
from tuning.models.byte_tokenizer import byte_tokenizer
from tuning.models.config import tiny
from tuning.models.huggingface import random_params, save_decoder
from tuning.models.tokenizer import save_tokenizer
from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.limits import Limits
from tuning.rollout.requests import RefusedRequest, Sampling
from tuning.rollout.requests import Request as Asked
from tuning.rollout.servers.fleet import Fleet, Options
from tuning.rollout.servers.kinds import KINDS
from tuning.rollout.servers.protocol import Policy, ServerLost, ServerRefused, StalePolicy, sample_seed
from tuning.rollout.servers.server import RemoteServer
from tuning.training.completions import token_logps

TOKENIZER = byte_tokenizer()
CONFIG = tiny(len(TOKENIZER))
PARAMS = {
    name: jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(CONFIG, seed))
    for name, seed in {"first": 3, "second": 4}.items()
}
STOPS = (TOKENIZER.eos_token_id, 97)
OPTIONS = Options(tolerance=1e-3, wait_seconds=3.0, start_seconds=120.0)


def requests_of(count, temperature=1.0, samples=2, max_tokens=12):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 90, rng.integers(2, 30)).tolist() for _ in range(count)]
    return [
        Asked(p, max_tokens, Sampling(temperature), STOPS, seed=7, counter=i, samples=samples, name=f"p{i}")
        for i, p in enumerate(prompts)
    ]


GREEDY = requests_of(12, temperature=0.0, samples=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name, params in PARAMS.items():
        found[name] = tmp_path_factory.mktemp("models") / name
        save_decoder(found[name], CONFIG, params, {})
        save_tokenizer(TOKENIZER, found[name])
    return found


@pytest.fixture(scope="module")
def native():
    """Greedy completions of GREEDY by the native engine."""
    found = {}
    for name, params in PARAMS.items():
        engine = Engine(CONFIG, limits=Limits(slots=4, context=256))
        engine.load(params)
        done = dict(engine.run(GREEDY))
        found[name] = [done[i][0] for i in range(len(GREEDY))]
    return found


def trainer(name):
    return lambda pairs, temperature: token_logps(CONFIG, PARAMS[name], pairs, temperature, Compute(), 512)


@pytest.fixture
def policy(folders):
    def make(name, temperature=1.0, **changes):
        probe = [dataclasses.replace(r, samples=1, counter=1000 + i) for i, r in enumerate(requests_of(2, temperature))]
        return dataclasses.replace(Policy(name, lambda: folders[name], trainer(name), probe), **changes)

    return make


@pytest.fixture
def state(folders):
    state = State(folders["first"])
    yield state
    state.live.close()


@pytest.fixture
def url(state):
    server, thread, url = serve(make_app(state))
    yield url
    server.should_exit = True
    thread.join()


def remote(*servers, kind="vllm", **changes):
    lines = []
    made = Fleet(KINDS[kind], servers, dataclasses.replace(OPTIONS, **changes), lines.append)
    made.lines = lines
    return made


def run(engine, requests):
    found = dict(engine.run(requests))
    return [found[i] for i in range(len(requests))]


def same(found, expected):
    """Whether greedy completions are those of the native engine."""
    assert [c.tokens for (c,) in found] == [c.tokens for c in expected]
    assert [c.stop for (c,) in found] == [c.stop for c in expected]
    for (a,), b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_greedy_completions_are_the_native_engines_before_and_after_an_update(kind, url, state, policy, native):
    engine = remote(RemoteServer(url), kind=kind)
    for name in ("first", "second"):
        engine.load(policy(name))
        assert state.version == name
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


def test_seeds_differ():
    seeds = {sample_seed(48, seed, counter) for seed in range(3) for counter in range(1000)}
    assert len(seeds) == 3000
    assert max(seeds) < 2**48


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


def test_a_server_that_does_not_say_whose_weights_it_has_must_prove_them(folders, policy, native):
    """`rlhf serve` of a policy that is no artifact, and servers without development endpoints."""
    import stages.serving.server

    state = State(folders["first"])
    app = stages.serving.server.make_app(stages.serving.server.Server(state.live, TOKENIZER, "policy", (), 256))
    server, thread, url = serve(app)
    try:
        engine = remote(RemoteServer(url), sync="none")
        engine.load(policy("first"))
        same(run(engine, GREEDY), native["first"])
        with pytest.raises(StalePolicy, match="does not say which policy it has, wanted is second"):
            engine.load(policy("second"))
    finally:
        server.should_exit = True
        thread.join()
        state.live.close()


def test_answers_of_other_weights_are_thrown_away(url, state, policy, native):
    engine = remote(RemoteServer(url), concurrency=2)
    engine.load(policy("first"))
    stream = engine.run(GREEDY)
    found = dict([next(stream)])
    # Somebody else's run comes by.
    remote(RemoteServer(url)).load(policy("second"))
    found |= dict(stream)
    assert any("was given policy second while it sampled from first" in line for line in engine.lines)
    same([found[i] for i in range(len(GREEDY))], native["first"])
    assert state.version == "first"


def test_another_version_is_refused(url, policy):
    remote(RemoteServer(url), version=VERSION).load(policy("first"))
    with pytest.raises(ServerRefused, match=f"has vllm {VERSION}, and 9.9 was asked for"):
        remote(RemoteServer(url), version="9.9").load(policy("first"))


@pytest.fixture
def proxy(url):
    """Makes a proxy before the server that answers a status of its own to the requests for completions that `fails`
    picks; it is given the number of the request and its body."""
    ends = []

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

        server, thread, place = serve(app)
        ends.append((server, thread))
        return place, bodies

    yield make
    for server, thread in ends:
        server.should_exit = True
        thread.join()


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
    engine = remote(RemoteServer(place, retries=1), concurrency=3, tries=3)
    engine.load(policy("first"))
    with pytest.raises(ServerLost, match=r"was lost 3 times without an answer; the last: .* answered 500: the gateway"):
        run(engine, GREEDY)
    assert len(bodies) < 40


def test_what_a_server_declines_ends_the_run_with_its_words(url, policy):
    engine = remote(RemoteServer(url))
    engine.load(policy("first"))
    long = Asked([1] * 300, 5, Sampling(1.0), STOPS)
    with pytest.raises(ServerRefused, match="/v1/completions answered 400: the prompt has 300 tokens; the context is"):
        run(engine, [*GREEDY, long])
    # The engine can be used again.
    assert len(run(engine, GREEDY)) == len(GREEDY)


def test_what_an_engine_would_do_otherwise_is_refused(policy):
    limited = Asked([1], 5, Sampling(1.0, top_p=0.9), STOPS, name="here")
    with pytest.raises(RefusedRequest, match="request here: SGLang's log-probabilities are those before top_p"):
        KINDS["sglang"].body(limited, policy("first"))
    with pytest.raises(RefusedRequest, match="stop strings"):
        KINDS["vllm"].body(Asked([1], 5, find_stop=lambda t: None), policy("first"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": []}, "0 samples of 1"),
        ({"error": "x"}, "no completion"),
        ({"choices": [{"index": 0, "token_ids": [1, 2], "logprobs": None}]}, "lacks token ids or log-probabilities"),
        ({"choices": [{"index": 0, "token_ids": [1], "logprobs": {"token_logprobs": [-0.1]}}]}, "after 1 of 3 tokens"),
        (
            {"choices": [{"index": 0, "token_ids": [1, 2, 9], "logprobs": {"token_logprobs": [-0.1, None, -1.0]}}]},
            "one is not finite",
        ),
        (
            {"choices": [{"index": 0, "prompt_token_ids": [0, 5], "token_ids": [9], "logprobs": {}}]},
            "other token ids than the one sent",
        ),
    ],
)
def test_an_answer_that_is_not_whole_is_none(answer, message):
    with pytest.raises(ServerLost, match=message):
        KINDS["vllm"].completions(Asked([5], 3, stop_ids=(9,)), answer)


def test_a_server_that_is_not_there(policy):
    with pytest.raises(ServerLost, match="http://127.0.0.1:9/health was not well within 0.5 s"):
        remote(RemoteServer("http://127.0.0.1:9"), start_seconds=0.5).load(policy("first"))


def test_one_of_two_servers_is_enough(url, policy, native):
    engine = remote(RemoteServer("http://127.0.0.1:9"), RemoteServer(url), start_seconds=0.5)
    engine.load(policy("first"))
    same(run(engine, GREEDY), native["first"])
    assert any("going on without a server: http://127.0.0.1:9" in line for line in engine.lines)


def test_leaving_early_ends_what_runs(url, state, policy):
    engine = remote(RemoteServer(url), concurrency=2)
    engine.load(policy("first"))
    before = threading.active_count()
    stream = engine.run(requests_of(8, samples=2, max_tokens=150))
    next(stream)
    stream.close()
    deadline = time.monotonic() + 20
    while not state.live._engine.idle:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # The server may have made threads for the connections; of 16 samples none has one of its own.
    assert threading.active_count() < before + 8
