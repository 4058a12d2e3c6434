"""A pushed policy is swapped in whole, between requests; where a push breaks the old one answers."""

import dataclasses
import json
import threading
import time

import httpx
import jax
import pytest
from flax import nnx

from stages.serving.access import Keys
from stages.serving.guard import Bounds
from stages.serving.server import Server
from stages.serving.weights import BODY_BYTES, Pushes
from tests.stages.serving.support import CONFIG, CONTEXT, LIMITS, STOPS, TOKENIZER, serving
from tuning.models.huggingface import random_params, tensors_from_params
from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.live import Live
from tuning.rollout.inside.rlhf_weights.frames import Fingerprint, buckets

KEY = "k" * 24
CONFIG_JSON = json.loads(json.dumps(dataclasses.asdict(CONFIG)))
PARAMS = {
    name: jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, random_params(CONFIG, seed))
    for name, seed in {"old": 3, "new": 4, "third": 5}.items()
}
SAID = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def tensors(name):
    return list(tensors_from_params(nnx.to_pure_dict(PARAMS[name])))


def fingerprint(name):
    seen = Fingerprint()
    for tensor, value in tensors(name):
        seen.add(tensor, value)
    return seen.hexdigest()


@pytest.fixture(scope="module")
def tokens():
    """Greedy tokens of SAID by policy."""
    found = {}
    for name, params in PARAMS.items():
        engine = Engine(CONFIG, limits=LIMITS, top=5)
        engine.load(params)
        with_it = Live(engine)
        made = Server(with_it, TOKENIZER, "tiny", STOPS, CONTEXT)
        url, end = serving(made)
        found[name] = httpx.post(f"{url}/v1/completions", json=SAID, timeout=120).json()["choices"][0]["token_ids"]
        end()
        with_it.close()
    assert len({tuple(t) for t in found.values()}) == 3
    return found


@dataclasses.dataclass
class Asked:
    """A server with the policy `old`, and what a pusher asks of it."""

    client: httpx.Client
    live: Live
    url: str

    def answer(self, **more):
        return self.client.post("/v1/completions", json=SAID | more).json()

    def has(self, name, tokens):
        """Whether it answers with this policy, says so, and holds it."""
        answer, told = self.answer(), self.client.get("/weights").json()
        assert answer["choices"][0]["token_ids"] == tokens[name]
        assert answer["weight_version"] == told["policy"] == name
        assert self.client.get("/weight_info").json() == {"weight_version": name}
        assert told["fingerprint"] == fingerprint(name)

    def begin(self, name):
        answer = self.client.post("/weights", json={"policy": name, "config": CONFIG_JSON})
        assert answer.status_code == 200, answer.text
        return f"/weights/{answer.json()['push']}"

    def send(self, push, name, most=20_000):
        for bucket in buckets(tensors(name), most):
            answer = self.client.post(push, content=bucket)
            assert answer.status_code == 200, answer.text

    def commit(self, push, name):
        return self.client.post(f"{push}/commit", json={"fingerprint": fingerprint(name)})


@pytest.fixture
def asked():
    made = []

    def make(silent_seconds=60.0, taken=True, kind=Live, **options):
        engine = Engine(CONFIG, limits=LIMITS, top=5, **options)
        engine.load(PARAMS["old"])
        live = kind(engine)
        server = Server(live, TOKENIZER, "tiny", STOPS, CONTEXT, "old")
        bounds = Bounds(body_bytes=8_000, bucket_bytes=BODY_BYTES)
        url, end = serving(server, bounds, Keys([KEY]), pushes=Pushes(server, taken, silent_seconds))
        client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=120)
        made.append((client, end, live))
        return Asked(client, live, url)

    yield make
    for client, end, live in made:
        client.close()
        end()
        live.close()


def watched():
    """The threads that watch over pushes: each holds the memory of one."""
    return {thread for thread in threading.enumerate() if thread.name == "push"}


def failed(answer, status, text, code=None):
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert text in answer.json()["error"]["message"]


def test_a_pushed_policy_answers_once_it_is_whole(asked, tokens):
    server = asked()
    server.has("old", tokens)
    push = server.begin("new")
    server.send(push, "new")
    server.has("old", tokens)
    answer = server.commit(push, "new").json()
    assert answer == {"policy": "new", "fingerprint": fingerprint("new")}
    server.has("new", tokens)
    # Its client has not got the answer, and asks again.
    assert server.commit(push, "new").json() == answer
    metrics = server.client.get("/metrics").text
    assert 'route="/weights/NAME",status="200"' in metrics and push not in metrics


def test_what_is_under_way_ends_on_the_old_policy_and_what_comes_meanwhile_is_of_the_new(asked, tokens):
    server = asked()
    before = server.answer(max_tokens=150)
    push = server.begin("new")
    server.send(push, "new")
    answers, events = {}, []

    def stream():
        said = SAID | {"max_tokens": 150, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=said) as found:
            for line in found.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))

    def ask(name, *arguments):
        answers[name] = server.commit(*arguments) if arguments else server.answer()

    running = threading.Thread(target=stream)
    running.start()
    while not events:
        time.sleep(0.001)
    committing = threading.Thread(target=ask, args=("commit", push, "new"))
    committing.start()
    while not any(order.swaps for order in list(server.live._orders)):
        assert committing.is_alive()
        time.sleep(0.001)
    under_way = server.live.open
    behind = threading.Thread(target=ask, args=("behind",))
    behind.start()
    for thread in (running, committing, behind):
        thread.join()
    assert under_way == 1
    assert {event["weight_version"] for event in events} == {"old"}
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == before["choices"][0]["token_ids"]
    assert answers["commit"].status_code == 200
    assert answers["behind"]["weight_version"] == "new"
    assert answers["behind"]["choices"][0]["token_ids"] == tokens["new"]


def test_an_answer_that_would_be_of_two_policies_is_refused(asked):
    pushed = []

    class Slow(Live):
        """Between the scores of an echo and its completion the policy changes."""

        def score(self, prompt):
            found = super().score(prompt)
            if not pushed:
                number = server.begin("new")
                server.send(number, "new")
                pushed.append(server.commit(number, "new").status_code)
            return found

    server = asked(kind=Slow)
    asked_for = SAID | {"echo": True, "logprobs": 0}
    failed(server.client.post("/v1/completions", json=asked_for), 503, "ask again", "policy_changed")
    again = server.client.post("/v1/completions", json=asked_for).json()
    assert (pushed, again["weight_version"]) == ([200], "new")


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"echo": True, "logprobs": 0}])
def test_a_request_for_a_policy_that_leaves_while_it_waits_is_refused(asked, more):
    class Late(Live):
        """Another policy comes between the arrival of a request and its beginning."""

        def _ask(self, order):
            if order.begins and self.generation == 0:
                number = server.begin("new")
                server.send(number, "new")
                assert server.commit(number, "new").status_code == 200
            return super()._ask(order)

    server = asked(kind=Late)
    said = SAID | {"model": "old"} | more
    failed(server.client.post("/v1/completions", json=said), 404, "no model 'old'", "model_not_found")
    # Nothing goes on for it, and whoever does not mind gets what is there.
    while server.live.open:
        time.sleep(0.01)
    assert server.answer(model="policy")["weight_version"] == "new"


def flipped(all_):
    changed = bytearray(all_[1])
    changed[-5] ^= 4
    return [all_[0], bytes(changed), *all_[2:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flipped, "the checksum of the bucket's"),
        (lambda all_: [all_[0][:-9]], "it was cut"),
        (lambda all_: [b""], "the bucket has 0 bytes: it was cut"),
        (lambda all_: [*all_[:2], all_[0]], "came, wanted are"),
        (lambda all_: list(buckets([("model.x", tensors("new")[0][1])])), "model.x is no tensor of the model"),
        (
            lambda all_: list(buckets([(tensors("new")[0][0], tensors("new")[0][1][:, :1])])),
            "the server holds it as float32",
        ),
        (
            lambda all_: list(buckets([(tensors("new")[0][0], tensors("new")[0][1].astype("float16"))])),
            "is float16",
        ),
    ],
)
def test_a_bucket_that_does_not_fit_is_refused_and_the_old_policy_stays(asked, tokens, change, message):
    server = asked()
    push = server.begin("new")
    for bucket in change(list(buckets(tensors("new"), 20_000))):
        answer = server.client.post(push, content=bucket)
        if answer.status_code != 200:
            break
    failed(answer, 400, message)
    server.has("old", tokens)
    # The next push is not touched by it.
    push = server.begin("third")
    server.send(push, "third")
    server.commit(push, "third")
    server.has("third", tokens)


def test_a_policy_with_a_tensor_too_few_or_of_another_fingerprint_is_refused(asked, tokens):
    server = asked()
    push = server.begin("new")
    for bucket in list(buckets(tensors("new"), 20_000))[:-1]:
        server.client.post(push, content=bucket)
    failed(server.commit(push, "new"), 400, "tensors are missing or not whole, first")
    push = server.begin("new")
    server.send(push, "third")
    failed(server.commit(push, "new"), 400, f"that of what was sent {fingerprint('new')[:12]}: the old policy stays")
    failed(server.commit(push, "third"), 400, "the old policy stays")
    server.has("old", tokens)


def test_a_policy_of_another_model_is_refused_by_the_field(asked):
    server = asked()
    wrong = CONFIG_JSON | {"norm_eps": 0.5}
    failed(
        server.client.post("/weights", json={"policy": "x", "config": wrong}), 400, "config.norm_eps is 0.5, and 1e-"
    )
    answer = server.client.post("/weights", json={"policy": "x", "config": {}})
    failed(answer, 400, f"config.{min(CONFIG_JSON)} is None")


def test_of_two_pushes_the_one_that_began_last_wins_whole(asked, tokens):
    server, others = asked(), watched()
    first, halves = server.begin("new"), list(buckets(tensors("new"), 20_000))
    for bucket in halves[: len(halves) // 2]:
        assert server.client.post(first, content=bucket).status_code == 200
    (lost,) = watched() - others
    second = server.begin("third")
    lost.join(10)
    assert not lost.is_alive() and len(watched() - others) == 1
    failed(server.client.post(first, content=halves[len(halves) // 2]), 409, "another one began", "push_ended")
    failed(server.commit(first, "new"), 409, "the old policy stays", "push_ended")
    failed(server.client.delete(first), 409, "another one began", "push_ended")
    server.send(second, "third")
    assert server.commit(second, "third").status_code == 200
    server.has("third", tokens)


def test_pushes_at_once_end_with_one_of_them_whole(asked, tokens):
    server = asked()
    ended = {}

    def push(name):
        try:
            number = server.begin(name)
            server.send(number, name)
            ended[name] = server.commit(number, name).status_code
        except AssertionError as error:
            ended[name] = str(error)

    threads = [threading.Thread(target=push, args=(name,)) for name in ("new", "third")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [name for name, status in ended.items() if status == 200]
    assert won and all(status == 200 or "push_ended" in status or "push_busy" in status for status in ended.values())
    has = server.client.get("/weights").json()["policy"]
    assert has in won
    server.has(has, tokens)


def test_a_push_that_is_given_up_or_silent_leaves_its_memory_and_the_old_policy(asked, tokens):
    server, others = asked(silent_seconds=0.5), watched()
    push = server.begin("new")
    assert server.client.delete(push).status_code == 200
    failed(server.commit(push, "new"), 409, "there is no such push", "push_ended")
    push = server.begin("new")
    server.client.post(push, content=next(buckets(tensors("new"), 20_000)))
    assert watched() - others
    deadline = time.monotonic() + 20
    while watched() - others:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    failed(server.commit(push, "new"), 409, "it was silent for too long", "push_ended")
    server.has("old", tokens)


def test_weights_are_taken_with_a_key_where_they_are_taken_at_all_and_in_bounds(asked):
    server = asked()
    for method, path in (("GET", ""), ("POST", ""), ("POST", "/1"), ("POST", "/1/commit"), ("DELETE", "/1")):
        assert httpx.request(method, f"{server.url}/weights{path}").status_code == 401
    large = server.client.post("/weights/1", content=bytes(BODY_BYTES + 1))
    failed(large, 413, f"larger than {BODY_BYTES} bytes", "body_too_large")
    failed(server.client.post("/weights", content=bytes(9_000)), 413, "larger than 8000 bytes", "body_too_large")
    refused = asked(taken=False).client.post("/weights", json={"policy": "x", "config": CONFIG_JSON})
    failed(refused, 403, "start it with --take-weights", "weights_not_taken")


def test_a_server_of_rounded_weights_says_that_none_can_be_pushed(asked):
    server = asked(quantization="int8")
    told = server.client.get("/weights").json()
    assert (told["policy"], told["fingerprint"], told["tensors"]) == ("old", None, None)
    answer = server.client.post("/weights", json={"policy": "x", "config": CONFIG_JSON})
    failed(answer, 400, "serve without --quantization")
