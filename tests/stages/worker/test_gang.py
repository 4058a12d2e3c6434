"""A gang is one worker on several processes: what one process would make, under the same digest, or a rank's name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from flows.graph.build import build
from flows.graph.keying import code_of, key_of, key_parts
from flows.recipe.reading import load_recipe
from stages.contract.registry import modules, stage
from stages.store.artifacts import Artifact, Store
from stages.worker import channel, loaded
from stages.worker.channel import Refused
from stages.worker.client import Worker
from stages.worker.gang import Gang
from stages.worker.joining import send_home
from stages.worker.places import Place, PlaceError, first_host, place_of
from stages.worker.process import of_stage
from stages.worker.protocol import Request
from tests.stages.worker.support import ignore, request
from tests.support import with_devices

TOKEN = "0123456789abcdef"
SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "gpu[07-09,12].site,login1"}
SLICE = {"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"RLHF_GANG": "2"}, (2, 0, "127.0.0.1", 0, True)),
        ({"RLHF_GANG": "4@host-0:9000"}, (4, 0, "host-0", 9000, False)),
        ({"RLHF_GANG": "4@host-0:9000", "RLHF_GANG_RANK": "3"}, (4, 3, "host-0", 9000, False)),
        ({"RLHF_GANG": "4@host-0:9000", "JOB_COMPLETION_INDEX": "2"}, (4, 2, "host-0", 9000, False)),
        ({"RLHF_GANG": "auto"} | SLURM, (4, 3, "gpu07.site", 9765, False)),
        ({"RLHF_GANG": "auto"} | SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"RLHF_GANG": "auto"} | SLICE, (2, 1, "t-0.svc", 9765, False)),
    ],
)
def test_the_environment_says_how_many_ranks_there_are_and_where(environment, found) -> None:
    place = place_of(environment | {"RLHF_GANG_TOKEN": TOKEN})
    assert (place and (place.ranks, place.rank, place.host, place.port, place.starts)) == found


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RLHF_GANG": "two"}, "say a number of ranks"),
        ({"RLHF_GANG": "0"}, "one is the least"),
        ({"RLHF_GANG": "2@host:9000", "RLHF_GANG_RANK": "2"}, "rank 2 is none of the 2"),
        ({"RLHF_GANG": "2@host:9000", "RLHF_GANG_TOKEN": ""}, "RLHF_GANG_TOKEN is not set"),
        ({"RLHF_GANG": "2@host:9000", "RLHF_GANG_TOKEN": "short"}, "RLHF_GANG_TOKEN is too short"),
        ({"RLHF_GANG": "auto"}, "neither SLURM_STEP_NUM_TASKS"),
        ({"RLHF_GANG": "2", "RLHF_GANG_SILENCE": "soon"}, "RLHF_GANG_SILENCE is 'soon'"),
    ],
)
def test_what_describes_no_gang_is_told_by_variable(environment, message) -> None:
    with pytest.raises(PlaceError, match=message):
        place_of({"RLHF_GANG_TOKEN": TOKEN} | environment)


@pytest.mark.parametrize("nodes, first", [("a", "a"), ("a,b", "a"), ("n[3,5]", "n3"), ("n[01-16]", "n01")])
def test_the_lead_is_on_the_first_host_of_slurms_list(nodes, first) -> None:
    assert first_host(nodes) == first


def test_the_token_is_not_shown() -> None:
    assert TOKEN not in repr(place_of({"RLHF_GANG": "2@h:1", "RLHF_GANG_TOKEN": TOKEN}))


def met(rank_token: str, lead_token: str) -> tuple[list, list]:
    """What each side says of the other: (of the lead, of the rank)."""
    of_lead: list = []
    of_rank: list = []
    server = channel.listen("127.0.0.1", 0)

    def lead() -> None:
        try:
            opened, hello = channel.welcome(server.accept()[0], lead_token)
            opened.send({"welcome": hello})
        except Refused as e:
            hello = e
        of_lead.append(hello)

    thread = threading.Thread(target=lead)
    thread.start()
    try:
        opened = channel.connect("127.0.0.1", server.getsockname()[1], rank_token, {"rank": 1}, wait=10)
        of_rank.append(opened.receive())
    except Refused as e:
        of_rank.append(e)
    thread.join()
    server.close()
    return of_lead, of_rank


def test_a_rank_and_its_lead_prove_that_they_know_the_token() -> None:
    assert met(TOKEN, TOKEN) == ([{"rank": 1}], [{"welcome": {"rank": 1}}])
    (of_lead,), (of_rank,) = met(TOKEN, TOKEN[::-1])
    assert isinstance(of_lead, Refused) and isinstance(of_rank, Refused)
    assert "another token" in str(of_rank)


def test_a_lead_that_does_not_know_the_token_gets_no_rank() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        opened = channel.Channel(server.accept()[0])
        opened.send({"nonce": "n"})
        opened.receive()
        opened.send({"proof": "made up"})

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(Refused, match="the lead has another token"):
        channel.connect("127.0.0.1", server.getsockname()[1], TOKEN, {"rank": 1}, wait=10)
    thread.join()
    server.close()


STRANGERS = {
    "a proof in no ASCII": json.dumps({"nonce": "n", "hello": {}, "proof": "\u00e9"}).encode() + b"\n",
    "half a surrogate": b'{"nonce": "n", "hello": {}, "proof": "\\ud800"}\n',
    "a list as deep as a well": b"[" * 60_000 + b"\n",
    "a list": b"[1]\n",
    "no JSON": b"GET / HTTP/1.1\n",
    "a line without end": b" " * (channel.LONGEST_HELLO + 1),
    "half a line": b'{"nonce"',
}


@pytest.mark.parametrize("case", STRANGERS)
def test_what_no_rank_sends_ends_its_connection_and_not_the_lead(case) -> None:
    with channel.listen("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()) as stranger:
        stranger.sendall(STRANGERS[case])
        taken = server.accept()[0]
        with pytest.raises((Refused, ValueError, TimeoutError)):
            channel.welcome(taken, TOKEN, seconds=0.5)
        assert taken.fileno() == -1


def test_a_handshake_of_which_each_byte_comes_in_time_has_one_limit() -> None:
    left = threading.Event()

    def trickle(stranger: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not left.wait(0.1):
                stranger.sendall(b" ")

    with channel.listen("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()) as stranger:
        thread = threading.Thread(target=trickle, args=[stranger], daemon=True)
        thread.start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            channel.welcome(server.accept()[0], TOKEN, seconds=0.5)
        assert 0.4 < time.monotonic() - began < 10
        left.set()
        thread.join()


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the system has no such options")
def test_a_peer_whose_host_vanishes_is_noticed_in_two_minutes() -> None:
    with channel.listen("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()) as sock:
        channel._opened(sock, time.monotonic() + 1)
        idle, interval, count = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle + interval * count == 120


def test_what_follows_the_handshake_at_once_is_not_lost() -> None:
    got: list = []
    with channel.listen("127.0.0.1", 0) as server:
        address = server.getsockname()

        def rank() -> None:
            opened = channel.connect(*address, TOKEN, {"rank": 1}, wait=10)
            got.extend([opened.receive(), opened.receive()])

        thread = threading.Thread(target=rank)
        thread.start()
        opened, _ = channel.welcome(server.accept()[0], TOKEN)
        opened.send({"welcome": 1})
        opened.send({"beat": True})
        thread.join()
    assert got == [{"welcome": 1}, {"beat": True}]


def test_ranks_are_sent_home_although_a_connection_is_reset() -> None:
    with channel.listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    place = Place(2, 0, "127.0.0.1", port, TOKEN, False)
    sending = threading.Thread(target=send_home, args=[place])
    sending.start()
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.recv(10)
            break
    assert channel.connect("127.0.0.1", port, TOKEN, {"rank": 1}, wait=10).receive() == {"bye": "end"}
    sending.join()


def test_a_rank_with_other_code_than_the_leads_says_which_module(tmp_path) -> None:
    ask = dataclasses.replace(request(tmp_path), files={"tuning.shapes": "0" * 64})
    with pytest.raises(RuntimeError, match="module tuning.shapes is other code here than on the lead"):
        loaded.check_elsewhere(ask, {}, "on the lead")
    gone = dataclasses.replace(request(tmp_path), files={"tuning.not_there": "0" * 64})
    with pytest.raises(RuntimeError, match="module tuning.not_there is not here as it is on the lead"):
        loaded.check_elsewhere(gone, {}, "on the lead")


def test_a_rank_with_other_code_of_the_user_says_so(tmp_path) -> None:
    ask = dataclasses.replace(request(tmp_path), key_parts={"sources": {"module:mine": "0" * 64, "data.jsonl": "1"}})
    with pytest.raises(RuntimeError, match="mine is other code here"):
        loaded.check_elsewhere(ask, {"module:mine": "2" * 64}, "on the lead")
    # Data is read by the lead.
    loaded.check_elsewhere(ask, {"module:mine": "0" * 64}, "on the lead")


def test_every_stage_says_how_a_gang_runs_it() -> None:
    found = {name: stage(name).gang(stage(name).config.model_construct()) for name in modules()}
    by_lead = {"base", "prepare", "fresh", "start", "score", "select", "gate"}
    assert {name for name, which in found.items() if which == "lead"} == by_lead
    assert {which for which in found.values()} == {"all", "lead"}
    episodes = stage("rollout").config.model_validate({"environment": {"name": "guess"}})
    assert "episodes" in stage("rollout").gang(episodes)


def test_what_a_gang_cannot_run_is_refused_by_name() -> None:
    config = stage("rollout").config.model_validate({"environment": {"name": "guess"}})
    place = place_of({"RLHF_GANG": "2"})
    assert place is not None
    gang = Gang(place, lost=lambda what: None, failed=lambda what, outage: None, told=print)
    with pytest.raises(RuntimeError, match="a gang of 2 ranks cannot run rollout: episodes of an environment"):
        of_stage(gang, stage("rollout"), config)
    assert of_stage(gang, stage("prepare"), stage("prepare").config()) is None
    assert of_stage(gang, stage("sft"), stage("sft").config()) is gang
    assert of_stage(None, stage("rollout"), config) is None


def of_export(store: Path) -> tuple[Request, Artifact]:
    """The request that made the smoke run's export, and what it made."""
    recipe = load_recipe("smoke", sets=[f"store={store}"])
    nodes = {node.name: node for node in build(recipe)}
    found = Store(str(store))
    record = found.read_json("runs", "first", "run.json")["nodes"]
    made = {n: found.get(e["stage"], e["key"]) for n, e in record.items()}
    node = nodes["export"]
    parts = key_parts(node, made)
    inputs = {n: (a.stage, a.key, a.digest) for n, i in node.inputs.items() for a in [made[i.node]]}
    config = json.loads(node.config.model_dump_json())
    files = code_of(node).files
    return Request(
        "export", key_of(parts), parts, config, inputs, node.seed, str(store), "gang", files, force="gang"
    ), made["export"]


def test_two_ranks_make_what_one_process_makes(store, tmp_path, monkeypatch) -> None:
    """The export gathers every parameter: its digest is that of one process, and no rank is left behind."""
    for name, value in with_devices(1, os.environ["XLA_FLAGS"]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RLHF_GANG", "2")
    ask, before = of_export(store)
    worker = Worker(tmp_path / "worker.log")
    try:
        manifest = worker.run(ask, ignore)
        ranks = psutil.Process(worker.pid).children(recursive=True)
        assert ["stages.worker.rank" in rank.cmdline() for rank in ranks] == [True]
    finally:
        worker.finish()
    assert manifest["device"].endswith(" x2")
    assert (manifest["digest"], manifest["metrics"]) == (before.digest, before.metrics)
    assert [rank for rank in ranks if rank.is_running()] == []


def joined(port: int, rank: int, **environment: str) -> tuple[int, str]:
    """Exit status of `rlhf join`, and what it says."""
    command = [Path(sys.executable).with_name("rlhf"), "join", f"127.0.0.1:{port}", "--rank", str(rank)]
    environment = {**os.environ, "RLHF_GANG_TOKEN": TOKEN, "RLHF_GANG_WAIT": "0.5"} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    return done.returncode, done.stderr


def test_a_rank_for_which_no_lead_comes_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, said = joined(port, 1)
    assert (code, f"no lead at 127.0.0.1:{port} for 0.5 s" in said) == (69, True)


def test_a_rank_that_can_never_join_ends_with_the_reason() -> None:
    """Each of these would be the same another time, and no process is started for another try."""
    with channel.listen("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        gang = Gang(Place(2, 0, "127.0.0.1", port, TOKEN, False, wait=40.0), print, print, print)
        lead = threading.Thread(target=gang._welcome_all, args=[server], daemon=True)
        lead.start()
        code, said = joined(port, 5, RLHF_GANG_WAIT="30")
        assert (code, "rank 5 is none of the 2" in said) == (77, True), said
        code, said = joined(port, 1, RLHF_GANG_WAIT="30", RLHF_GANG_TOKEN=TOKEN[::-1])
        assert (code, "another token" in said) == (77, True), said
        opened = channel.connect("127.0.0.1", port, TOKEN, {"rank": 1}, wait=10)
        lead.join()
        opened.close()
    assert joined(port, 1, RLHF_GANG_WAIT="10m")[0] == 2


def test_a_rank_at_the_address_of_another_service_ends_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def banner() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as caller:
                        caller.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=banner, daemon=True).start()
        code, said = joined(server.getsockname()[1], 1)
        server.shutdown(socket.SHUT_RDWR)
    assert (code, "what answers there is no lead" in said) == (69, True), said


FAILING = """
import jax
from stages.worker.gang import Gang
from stages.worker.places import Place

jax.devices()  # After that JAX takes no other processes.
gang = Gang(Place(2, 0, "127.0.0.1", 0, "0123456789abcdef", True, wait=60.0), print, print, print)
try:
    gang.start()
except RuntimeError as e:
    print(e)
print([child.poll() is not None for child in gang._children.values()])
"""


def test_a_gang_that_cannot_be_set_up_leaves_no_rank() -> None:
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=120)
    assert "before any JAX" in done.stdout and done.stdout.splitlines()[-1] == "[True]", done
