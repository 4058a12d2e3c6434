"""Answers of no sense are no completions; they cost a server its prompts, which go to the other one, and end no run."""

import asyncio
import contextlib
import dataclasses
import http.server
import json
import ssl
import threading
import time
from unittest.mock import Mock

import httpx
import pytest

from rlhf.tuning.rollout.requests import RefusedRequest, Request, Sampling
from rlhf.tuning.rollout.servers.fleet import Fleet, Options, StageEnded
from rlhf.tuning.rollout.servers.kinds import KINDS
from rlhf.tuning.rollout.servers.protocol import Policy, ServerLost, ServerRefused, sample_seed
from rlhf.tuning.rollout.servers.server import RemoteServer
from rlhf.tuning.rollout.servers.streaming import Turns
from rlhf.tuning.rollout.servers.vllm import VLLM

IDS = [5, 6, 7]
POLICY = Policy("D", lambda: None, lambda pairs, t: [[-1.0] * len(c) for _, c in pairs],
                [Request([1, 2], 1, Sampling(), (), seed=9, counter=9)], vocabulary=100)  # fmt: skip


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM does; as `fault` of its server says from the first rollout on."""

    def log_message(self, *args):
        pass

    def say(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        value = {"/version": {"version": "1"}, "/weight_info": {"weight_version": "D"}}.get(self.path, {})
        self.say(b"[]" if self.path == f"/{self.server.fault}" and self.server.bad else json.dumps(value).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        fault = self.server.fault if asked["max_tokens"] == 3 else None
        if fault == "down":
            self.send_error(500)
            return
        ids = ([5, 6, 1000] if fault == "vocabulary" else IDS)[: asked["max_tokens"]]
        choices = [
            {"index": i, "token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}} for i in range(asked["n"])
        ]
        body = json.dumps({"choices": choices}).encode()
        self.server.bad = self.server.bad or bool(fault)
        if fault == "deep":
            self.say(b'{"choices":' + b"[" * 100_000)
        else:
            self.say(body)


@contextlib.contextmanager
def servers(fault):
    """A server that answers well, and one that does not."""
    with contextlib.ExitStack() as stack:
        found = []
        for each in (None, fault):
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            server.fault, server.bad, server.daemon_threads = each, each == "version", True
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            found.append(RemoteServer(f"http://127.0.0.1:{server.server_port}", timeout=0.5, retries=0))
        yield found


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", ["deep", "vocabulary", "version", "weight_info"])
def test_prompts_of_a_server_that_answers_nonsense_go_to_the_other(fault):
    requests = [Request([1, 2], 3, Sampling(), (), seed=1, counter=i, samples=2) for i in range(6)]
    said = []
    with servers(fault) as (good, bad):
        fleet = Fleet(VLLM(), [bad, good], Options(wait_seconds=1.0, concurrency=2), said.append)
        fleet.load(POLICY)
        done = dict(fleet.run(requests))
    assert {tuple(c.tokens) for found in done.values() for c in found} == {tuple(IDS)} and len(done) == 6


def test_a_server_that_takes_no_names_of_weights_has_those_of_its_start():
    server = Mock()
    server.post.side_effect = ServerRefused("/update_weight_version answered 404")
    fleet = Fleet(VLLM(), [server], Options())
    fleet._policy = POLICY
    fleet._start(server, POLICY)
    assert server.given == "D"


def test_turns_of_a_prompt_stay_on_one_server_and_prompts_are_on_all(monkeypatch):
    used, ended, sample = set(), set(), Fleet._sample

    async def noted(self, client, server, policy, request, body):
        used.add((request.name, server.url))
        return await sample(self, client, server, policy, request, body)

    monkeypatch.setattr(Fleet, "_sample", noted)
    with servers(None) as both:
        fleet = Fleet(VLLM(), both, Options())
        fleet.load(POLICY)
        with contextlib.closing(Turns(fleet, 4)) as turns:
            for prompt in range(6):
                turns.submit(Request([1, 2], 3, Sampling(), (), seed=1, samples=2, name=f"p{prompt}"))
                turns.submit(Request([1, 2, *IDS], 3, Sampling(), (), seed=2, samples=2, name=f"p{prompt}"))
            # It ends no other request.
            with pytest.raises(RefusedRequest, match="stop strings"):
                turns.submit(Request([1, 2], 3, Sampling(), (), find_stop=lambda tokens: None))
            while not turns.idle:
                ended |= {(update.number, update.sample) for update in turns.step()}
    assert len(ended) == 24 and len(used) == 6 and len({url for _, url in used}) == 2


def counted(calls):
    """A policy whose log-probabilities take a moment and are noted."""

    def logps(pairs, temperature):
        calls.append(1)
        time.sleep(0.1)
        return POLICY.logps(pairs, temperature)

    return dataclasses.replace(POLICY, logps=logps)


def test_a_server_that_many_turns_have_lost_proves_its_weights_once():
    calls: list[int] = []
    with servers("down") as (_, bad):
        fleet = Fleet(VLLM(), [bad], Options())
        fleet.load(counted(calls))
        with contextlib.closing(Turns(fleet, 16)) as turns:
            for turn in range(16):
                turns.submit(Request([1, 2], 3, Sampling(), (), seed=1, counter=turn))
            # Each is lost four times.
            with pytest.raises(ServerLost, match="was lost 4 times|has lost its server 4 times"):
                while not turns.idle:
                    turns.step()
    assert 1 < len(calls) < 12


def test_a_server_that_is_gone_is_waited_for_once(monkeypatch):
    def wait(self, seconds):
        waits.append(seconds)
        raise ServerLost("gone")

    waits: list[float] = []
    monkeypatch.setattr(RemoteServer, "wait", wait)
    fleet = Fleet(VLLM(), [RemoteServer("http://127.0.0.1:9", retries=0)], Options())
    fleet._policy, fleet.gaps = POLICY, {"before": 0.0}
    with contextlib.closing(Turns(fleet, 8)) as turns:
        for turn in range(8):
            turns.submit(Request([1, 2], 3, Sampling(), (), seed=1, counter=turn))
        with pytest.raises(ServerLost, match="gone"):
            while not turns.idle:
                turns.step()
    turns._threads.shutdown(wait=True)
    assert waits == [0.0, 60.0]


def test_a_turn_takes_no_more_tasks_of_a_server_than_it_has_requests(monkeypatch):
    tasks = []

    async def sample(*_):
        tasks.append(len(asyncio.all_tasks()))
        return []

    monkeypatch.setattr(Fleet, "_sample", sample)
    fleet = Fleet(VLLM(), [RemoteServer(f"http://127.0.0.1:{port}") for port in range(3)], Options())
    fleet._policy = POLICY
    list(fleet.run([Request([1, 2], 3, Sampling(), (), seed=1)]))
    assert tasks[0] <= 7


def test_what_outlives_a_stage_uses_neither_its_servers_nor_the_trainer():
    """The next stage gives servers another policy, and the trainer may be training."""
    calls: list[int] = []
    with servers("down") as (good, bad):
        fleet = Fleet(VLLM(), [bad, good], Options(concurrency=1))
        fleet.load(counted(calls))
        with bad.lock:
            assert len(list(fleet.run([Request([1, 2], 3, Sampling(), (), seed=1, counter=i) for i in range(4)]))) == 4
            before = len(calls), bad.proofs
            fleet.close()
        time.sleep(0.5)
        with bad.lock:
            assert (len(calls), bad.proofs) == before
        with pytest.raises(StageEnded, match="the stage of policy D has ended"):
            fleet._prepare(bad, POLICY)


def test_a_wait_for_a_server_is_said():
    said = []
    fleet = Fleet(VLLM(), [RemoteServer("http://127.0.0.1:9", retries=0)], Options(start_seconds=0.1), said.append)
    with pytest.raises(ServerLost):
        fleet.load(POLICY)
    assert said[0] == "waiting up to 0.1 s for http://127.0.0.1:9 to become healthy"


def test_clients_of_a_server_share_its_ssl_context():
    """One for each client, and so for each turn and server, took 30 ms of the only interpreter."""
    options = RemoteServer("https://host").options
    began = time.process_time()
    for _ in range(50):
        httpx.AsyncClient(**options)
    assert time.process_time() - began < 0.5
    assert options["verify"].verify_mode is ssl.CERT_REQUIRED and options["verify"].check_hostname


def test_without_any_server_left_a_later_run_ends_with_the_last_error():
    fleet = Fleet(VLLM(), [RemoteServer("http://127.0.0.1:9", retries=0)], Options(wait_seconds=0.2))
    fleet._policy, fleet.gaps = POLICY, {"before": 0.0}
    for _ in range(2):
        with pytest.raises(ServerLost, match="was not well within"):
            list(fleet.run([Request([1], 3, Sampling(), (), seed=1, counter=1)]))


def test_seeds_differ():
    seeds = {sample_seed(48, seed, counter) for seed in range(3) for counter in range(1000)}
    assert len(seeds) == 3000
    assert max(seeds) < 2**48


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": []}, "0 samples of 1"),
        ({"error": "x"}, "not a completion"),
        ({"choices": [{"index": 0, "token_ids": [1, 2], "logprobs": None}]}, "lacks token ids or log-probabilities"),
        ({"choices": [{"index": 0, "token_ids": [1], "logprobs": {"token_logprobs": [-0.1]}}]}, "after 1 of 3 tokens"),
        (
            {"choices": [{"index": 0, "token_ids": [1, 2, 9], "logprobs": {"token_logprobs": [-0.1, None, -1.0]}}]},
            "expected integers from 0 on",
        ),
        *(
            (
                {"choices": [{"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": [-0.1] * 3}}]},
                "expected integers from 0 on",
            )
            for ids in (["a", "b", "c"], [5.5, 6, 9], [-5, 6, 9], [True, 6, 9], "abc", {"a": 1})
        ),
        *(
            ({"choices": [{"index": 0, "token_ids": [1, 2, 9], "logprobs": {"token_logprobs": logps}}]}, "at most 0")
            for logps in (["a", "b", "c"], "abc", [-1.0, 50.0, -1.0])
        ),
        *(
            ({"choices": choices}, "not a completion")
            for choices in (None, 1, [1], [{"index": 0, "token_ids": [9], "logprobs": [1]}])
        ),
        ([], "not a completion"),
        ("x", "not a completion"),
        (
            {"choices": [{"index": 0, "prompt_token_ids": [0, 5], "token_ids": [9], "logprobs": {}}]},
            "other token ids than the one sent",
        ),
    ],
)
def test_an_answer_that_is_not_whole_is_none(answer, message):
    with pytest.raises(ServerLost, match=message):
        KINDS["vllm"].completions(Request([5], 3, stop_ids=(9,)), answer)


@pytest.mark.parametrize("pair", [(-1.0, float("nan")), (-1.0, 5.5), (-1.0, "5"), ("-1", 5), (float("inf"), 5)])
def test_ids_and_numbers_of_sglang_are_taken_as_they_are(pair):
    answer = {"meta_info": {"output_token_logprobs": [[*pair, None]]}}
    with pytest.raises(ServerLost):
        KINDS["sglang"].completions(Request([5], 1), answer)
