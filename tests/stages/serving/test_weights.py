"""Another policy of `POST /weights` answers once it is loaded; a policy that is refused leaves the old one."""

import contextlib
import dataclasses
import json
import shutil
import threading
import time

import httpx
import jax
import pytest

from rlhf.stages.serving.app import Weights
from rlhf.stages.serving.programs import endpoint
from rlhf.stages.serving.serve import Follower
from rlhf.stages.serving.server import Server
from rlhf.stages.serving.settings import Named, ServeOptions
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.registry import Policy
from rlhf.tuning.models.huggingface import random_params, save_decoder
from rlhf.tuning.rollout.engine.live import Live, WeightsLost
from rlhf.tuning.rollout.servers.transfer import digests
from tests.stages.serving.support import CONFIG, CONTEXT, STOPS, TOKENIZER, living, served, serving

pytestmark = pytest.mark.slow

KEY = "k" * 24
PARAMS = {
    name: jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(CONFIG, seed))
    for name, seed in {"old": 3, "new": 4}.items()
}
SAID = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder of two policies, and of one of another model."""
    folder = tmp_path_factory.mktemp("policies")
    for name, params in PARAMS.items():
        save_decoder(folder / "run" / name, CONFIG, params, {})
    other = dataclasses.replace(CONFIG, num_layers=CONFIG.num_layers + 1)
    save_decoder(folder / "run" / "deeper", other, random_params(other, 0), {})
    mixed = folder / "run" / "mixed"
    save_decoder(mixed, other, random_params(other, 0), {})
    (mixed / "config.json").write_bytes((folder / "run" / "new" / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def tokens():
    """Greedy tokens of SAID by policy."""
    found = {}
    for name, params in PARAMS.items():
        with living(params) as live, serving(served(live)) as url:
            found[name] = httpx.post(f"{url}/v1/completions", json=SAID, timeout=120).json()["choices"][0]["token_ids"]
    assert found["old"] != found["new"]
    return found


@dataclasses.dataclass
class Asked:
    """A server with the policy `old`."""

    client: httpx.Client
    live: Live
    root: object

    def give(self, name, **changes):
        body = {"policy": name, "folder": f"run/{name}", "files": digests(self.root / "run" / name)}
        return self.client.post("/weights", json=body | changes)

    def answer(self, **more):
        return self.client.post("/v1/completions", json=SAID | more).json()

    def has(self, name, tokens):
        """Whether it answers with this policy, and says so."""
        answer = self.answer()
        assert answer["choices"][0]["token_ids"] == tokens[name]
        info = self.client.get("/weight_info").json()
        assert answer["weight_version"] == info["weight_version"] == name
        assert info["dtype"] == "float32"


@pytest.fixture
def asked(root):
    with contextlib.ExitStack() as stack:

        def make(kind=Live, where=root, options=None):
            live = stack.enter_context(living(PARAMS["old"], kind))
            server = served(live, "old")
            weights = Weights(server, where and str(where))
            url = stack.enter_context(serving(server, options, [KEY], weights=weights))
            headers = {"authorization": f"Bearer {KEY}"}
            client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=120))
            return Asked(client, live, root)

        yield make


def failed(answer, status, text, code=None):
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert text in answer.json()["error"]["message"]


def test_a_policy_answers_once_it_is_loaded_and_may_be_given_again(asked, tokens):
    server = asked(options=ServeOptions.model_construct(requests=0))
    assert server.give("new").json() == {"policy": "new"}
    # It is given to a server that has no room for requests, and one that it has is not read again.
    assert server.give("new", files={"config.json": "0" * 64}).json() == {"policy": "new"}
    assert server.client.post("/v1/completions", json=SAID).status_code == 429
    server = asked()
    server.has("old", tokens)
    server.give("new")
    server.has("new", tokens)


def test_requests_under_way_end_on_the_old_policy_and_later_ones_wait_for_the_new(asked, tokens):
    server = asked()
    before, answers, events = server.answer(max_tokens=150), {}, []

    def stream():
        with server.client.stream("POST", "/v1/completions", json=SAID | {"max_tokens": 150, "stream": True}) as found:
            events.extend(json.loads(line[6:]) for line in found.iter_lines() if line.startswith("data: {"))

    running = threading.Thread(target=stream)
    running.start()
    while not server.live.open:
        time.sleep(0.001)
    giving = threading.Thread(target=lambda: answers.update(given=server.give("new")))
    giving.start()
    while not any(order.swaps for order in list(server.live._orders)):
        assert giving.is_alive()
        time.sleep(0.001)
    later = threading.Thread(target=lambda: answers.update(later=server.answer()))
    later.start()
    for thread in (running, giving, later):
        thread.join()
    assert {event["weight_version"] for event in events} == {"old"}
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == before["choices"][0]["token_ids"]
    assert answers["given"].status_code == 200
    assert answers["later"]["weight_version"] == "new"
    assert answers["later"]["choices"][0]["token_ids"] == tokens["new"]


def test_an_answer_that_would_be_of_two_policies_is_refused(asked):
    given = []

    class Slow(Live):
        """Between the scores of an echo and its completion the policy changes."""

        def score(self, prompt):
            found = super().score(prompt)
            if not given:
                given.append(server.give("new").status_code)
            return found

    server = asked(kind=Slow)
    asked_for = SAID | {"echo": True, "logprobs": 0}
    failed(server.client.post("/v1/completions", json=asked_for), 503, "ask again", "policy_changed")
    again = server.client.post("/v1/completions", json=asked_for).json()
    assert (given, again["weight_version"]) == ([200], "new")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("new", {"folder": "../run/new"}, "'..' is not a valid name"),
        ("new", {"folder": "/run/new"}, "'' is not a valid name"),
        ("new", {"files": {"../../x": "0" * 64}}, "'../../x' is not a valid name"),
        ("new", {"folder": "run/newer"}, "run/newer is not complete below the root of this server"),
        ("new", {"files": {"model.safetensors": "0" * 64}}, "has SHA-256"),
        ("new", {"files": {"model.safetensors": "x"}}, "String should match pattern"),
        ("deeper", {}, "holds another model than this engine's"),
        ("mixed", {}, "unexpected tensor"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused_and_the_old_one_stays(asked, tokens, name, changes, message):
    server = asked()
    failed(server.give(name, **changes), 400, message)
    server.has("old", tokens)


def test_a_policy_that_fails_while_it_is_loaded_stops_the_server(asked, monkeypatch):
    server = asked()

    def full(*_):
        raise MemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", full)
        told = "policy new could not be loaded, and the old one was dropped: full"
        failed(server.give("new"), 503, told, "engine_failed")
    assert isinstance(server.live.failure, WeightsLost)
    failed(server.client.post("/v1/completions", json=SAID), 503, "the engine has stopped", "engine_failed")
    assert server.client.get("/health").status_code == 503


def test_weights_are_taken_with_a_key_and_only_below_a_root(asked):
    assert httpx.post(f"{asked().client.base_url}/weights", json={}).status_code == 401
    failed(asked(where=None).give("new"), 403, "start it with --take-weights", "weights_not_taken")


def test_a_server_of_agents_programs_has_no_route_of_weights(asked):
    with endpoint(served(asked().live), KEY) as url:
        headers = {"authorization": f"Bearer {KEY}"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        assert httpx.post(f"{url}/weights", headers=headers, json={}).status_code == 404


def test_a_server_follows_promotions_and_rollbacks_of_its_name(root, tokens, tmp_path, capfd):
    store = Store(str(tmp_path / "store"))

    def promoted(name, folder, base="base"):
        out = tmp_path / name
        shutil.copytree(folder, out)
        made = store.commit(out, {"stage": "export", "key": f"key-{name}", "metrics": {}})
        policy = Policy(name, "export", "export", made.key, made.digest, base, "digest-of-base", f"trained-{name}")
        return registry.promote(store, "champion", policy, "better")

    first = promoted("old", root / "run" / "old")
    tries = []
    with contextlib.ExitStack() as stack:
        live = stack.enter_context(living(PARAMS["old"]))
        server = Server(live, TOKENIZER, "old:export", STOPS, CONTEXT, "trained-old")
        server.named = Named(name="champion", entry=first.number)
        weights = Weights(server, None)
        change = weights.change
        weights.change = lambda digest, folder: (tries.append(digest), change(digest, folder))
        follower = Follower(server, weights, store, server.named, "base")
        url = stack.enter_context(serving(server))

        def seen():
            """(policy by its tokens, names of models, entry in /metrics)."""
            follower.look()
            found = httpx.post(f"{url}/v1/completions", json=SAID | {"model": "champion"}, timeout=120).json()
            names = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
            line = next(line for line in httpx.get(f"{url}/metrics").text.splitlines() if "policy_info{" in line)
            which = next(name for name, known in tokens.items() if found["choices"][0]["token_ids"] == known)
            assert found["weight_version"] == f"trained-{which}" and f'digest="trained-{which}"' in line
            return which, names, line.partition('entry="')[2].partition('"')[0]

        assert seen() == ("old", ["old:export", "champion"], "1")
        promoted("new", root / "run" / "new")
        assert seen() == ("new", ["new:export", "champion"], "2")
        registry.rollback(store, "champion", None, "worse")
        assert seen() == ("old", ["old:export", "champion"], "3")
        promoted("deeper", root / "run" / "deeper")
        assert seen() == seen() == ("old", ["old:export", "champion"], "3")
        promoted("based", root / "run" / "new", base="another")
        assert seen() == ("old", ["old:export", "champion"], "3")
    # A try holds back all requests: one that failed for good is not repeated.
    assert tries == ["trained-new", "trained-old", "trained-deeper"]
    said = capfd.readouterr().err
    assert said.count("champion 4 is not served: ") == 1 and "holds another model" in said
    assert "champion 5 is not served: its base model is another one: restart the server" in said
