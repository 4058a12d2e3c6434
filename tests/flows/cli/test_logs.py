"""`rlhf logs` shows what a run's worker wrote, follows it until the run ends, or says where it is."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from rlhf.flows.cli.logs import _lines, _Tail
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.running.session import Session, now
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.leases import this_process
from tests.flows.commands import typed
from tests.support import RLHF, hears_ctrl_c, write_files

BEGUN = {"sft": "0" * 12, "round-000.score": "1" * 12}
LINES = [f"---- {node} (stage {what}) now ----\nof {node}" for node, what in BEGUN.items()]


def write_record(store: Store, status: str = "finished", **more) -> None:
    nodes = {"sft": {"stage": "sft", "state": "made", "key": "k", "digest": "d"}}
    value = {"name": "first", "status": status, "started": now(), "process": this_process(), "host": "far"}
    store.write_json(value | {"recipe": {"name": "smoke"}, "nodes": nodes, "log": "/far/log"} | more, *RECORD)


RECORD = ("runs", "first", "run.json")


@pytest.fixture
def place(tmp_path: Path) -> Store:
    store = Store(str(tmp_path))
    write_record(store)
    store.write_bytes("\n".join([*LINES, ""]).encode(), "runs", "first", "worker.log")
    return store


def shown(place: Store, *options: str, code: int = 0) -> str:
    return typed("logs", "first", "--store", place.url, *options, code=code).output


def test_a_log_is_shown_whole_or_of_a_node(place):
    assert shown(place).splitlines() == "\n".join(LINES).splitlines()
    assert shown(place, "--node", "round-0").splitlines() == LINES[1].splitlines()
    assert "has nothing of evaluate; name another --node: sft" in shown(place, "--node", "evaluate", code=2)


def test_the_worker_of_a_run_names_each_node_that_it_begins(rlhf, smoke_store):
    text = rlhf("logs", "first", "--store", smoke_store, "--node", "round-001.score").stdout
    assert text.startswith("---- round-001.score (score ")
    assert "round-001.update" not in text


@pytest.mark.slow
def test_a_run_is_followed_until_it_ends(place, tmp_path):
    write_record(place, "running")
    log = tmp_path / "runs" / "first" / "worker.log"
    following = subprocess.Popen(
        [RLHF, "logs", "first", "-f", "--store", tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert [following.stdout.readline() for _ in range(4)] == [f"{x}\n" for x in "\n".join(LINES).splitlines()]
    with log.open("a") as f:
        f.write("a line\nand its end")
    assert following.stdout.readline() == "a line\n"
    write_record(place, "finished")
    out, err = following.communicate(timeout=30)
    assert (out, err) == ("and its end\n", "run first finished\n") and following.returncode == 0


def test_a_character_that_is_written_in_two_parts_is_one(place, tmp_path):
    write_record(place, "running")
    log = tmp_path / "runs" / "first" / "worker.log"
    first, second = "\u00e9".encode()[:1], "\u00e9".encode()[1:]
    log.write_bytes(b"before\n" + first)
    lines = _lines(place, place.read_json(*RECORD), {"": _Tail(place, "first", log)}, running=True)
    assert next(lines) == "before"
    with log.open("ab") as f:
        f.write(second + b"\n" + first)
    assert next(lines) == "\u00e9"
    # A half that nothing follows is shown as one.
    write_record(place)
    assert list(lines) == ["\ufffd"]


@pytest.mark.slow
def test_ctrl_c_ends_it_quietly(place, tmp_path):
    write_record(place, "running")
    command, pipe = [RLHF, "logs", "first", "-f", "--store", tmp_path], subprocess.PIPE
    following = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=hears_ctrl_c)
    assert following.stdout is not None and following.stdout.readline()
    following.send_signal(signal.SIGINT)
    assert following.communicate(timeout=30)[1] == "" and following.returncode == 130


def test_a_log_on_another_machine_is_told_with_its_host_and_a_remote_store_has_a_copy_at_the_end(tmp_path):
    remote = Store("memory://logs", tmp_path)
    write_record(remote, "running")
    for options in ([], ["-f"]):
        assert "the log of run first is /far/log on far; type `rlhf logs first` there" in shown(
            remote, *options, code=2
        )
    remote.write_bytes(b"copied\n", "runs", "first", "worker.log")
    write_record(remote)
    assert shown(remote) == shown(remote, "-f") == "copied\n"


def test_a_log_that_is_gone_from_this_host_is_not_looked_for_elsewhere(tmp_path):
    remote, here = Store("memory://gone", tmp_path), socket.gethostname()
    write_record(remote, host=here, worker_starts=1)
    assert "was /far/log, which is gone" in shown(remote, code=2)
    write_record(remote, host=here, worker_starts=0)
    assert "it started no worker" in shown(remote, code=2)


def test_the_end_of_a_run_copies_its_log_to_a_remote_store():
    run = Session(load_recipe("smoke", sets=["store=memory://copied"]), ConsoleReporter(), "first")
    write_files(run.log.parent, **{"worker.log": "of the worker\n"})
    run.finish("failed")
    assert run.record["log"] == str(run.log)
    run.log.unlink()
    assert shown(run.store) == "of the worker\n"


def test_logs_of_several_workers_have_the_worker_s_name(tmp_path):
    place = Store(str(tmp_path))
    write_record(place, recipe={"name": "smoke", "workers": {"train": {}, "sample": {}, "score": None, "data": {}}})
    for name, stages in {"train": (("sft", 1), ("round-000.update", 3)), "sample": (("round-000.rollout", 2),)}.items():
        lines = [f"---- {n} (stage {'0' * 12}) 2026-01-01T00:00:0{s}+00:00 ----\nof {n}\n" for n, s in stages]
        place.write_bytes("".join(lines).encode(), "runs", "first", f"worker-{name}.log")
    assert shown(place, "--node", "round-000.r").splitlines()[1:] == ["sample | of round-000.rollout"]
    assert shown(place) == shown(place, "-f")
    assert {line for line in shown(place, "-f").splitlines() if "| of" in line} == {
        "train  | of sft",
        "train  | of round-000.update",
        "sample | of round-000.rollout",
    }
    assert "sample" not in shown(place, "-f", "--node", "sft")
