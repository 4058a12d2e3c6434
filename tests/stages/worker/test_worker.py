"""The worker holds the devices and dies alone; the process that asks never loads JAX."""

import dataclasses
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest

from rlhf.flows.report.console import ConsoleReporter
from rlhf.stages.common.model_source import SourceMissing
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.disk import DiskFault
from rlhf.stages.store.leases import LeaseLost
from rlhf.stages.store.work import WorkFolder
from rlhf.stages.worker import client
from rlhf.stages.worker.client import StageFailed, Worker, WorkerDied, worker_environment
from rlhf.stages.worker.interpreter import escape_output
from rlhf.stages.worker.process import Events, failure_of, is_compiling, run_request, smallest_model
from rlhf.stages.worker.protocol import (
    Changed,
    Done,
    Event,
    Failed,
    Heartbeat,
    Log,
    Progress,
    Report,
    Request,
    event_line,
    parse_event,
)
from rlhf.tuning.precision import using
from tests.stages.worker.support import ignore, request
from tests.support import python, write_files


@pytest.fixture(scope="module")
def doomed(tmp_path_factory):
    """A worker that tests may end: the next one finds it as it was left, warm or dead."""
    worker = Worker(tmp_path_factory.mktemp("doomed") / "worker.log")
    yield worker
    worker.close()


@pytest.fixture
def worker(doomed, tmp_path):
    """The doomed worker, warm."""
    doomed.run(request(tmp_path / "warm"), ignore)
    return doomed


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A worker that several tests share; none of them ends it."""
    worker = Worker(tmp_path_factory.mktemp("warm") / "worker.log")
    # Where it starts lies what would be imported in place of Python's and the project's modules.
    wrong = "raise SystemExit('imported from the current folder')\n"
    traps = dict.fromkeys(("stages____init__.py", "tuning____init__.py", "random.py", "numpy.py"), wrong)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(write_files(tmp_path_factory.mktemp("traps"), **traps))
        worker.run(request(tmp_path_factory.mktemp("first")), ignore)
    yield worker
    worker.close()


@pytest.mark.slow
def test_it_starts_with_the_first_request_and_makes_an_artifact(warm, tmp_path):
    events: list[Report] = []
    manifest = warm.run(request(tmp_path), events.append)
    assert warm.starts == 1
    assert psutil.Process(warm.pid).ppid() == os.getpid()
    store = Store(str(tmp_path))
    artifact = store.get("base", "k" * 64)
    assert artifact.manifest == manifest
    assert store.verify(artifact) is None
    assert manifest["config"]["source"] == "random:tiny"
    assert (manifest["seed"], manifest["run"], manifest["inputs"]) == (7, "test", {})
    assert manifest["versions"]["jax"][0].isdigit()
    assert " x" in manifest["device"]
    assert manifest["metrics"]["parameters"] > 0
    assert any(isinstance(e, Log) and "random:tiny" in e.line for e in events)
    assert all(isinstance(e, Log | Progress) for e in events)


def test_its_output_goes_to_the_file_that_a_request_names(warm, tmp_path):
    for name in ("one", "two"):
        warm.run(dataclasses.replace(request(tmp_path / name), log=str(tmp_path / f"{name}.log")), ignore)
    assert [(tmp_path / f"{name}.log").read_text().count("---- base (base ") for name in ("one", "two")] == [1, 1]
    assert warm.starts == 1


@pytest.mark.parametrize(
    "event",
    [
        Progress(1, 2, "steps", {"loss": 0.5}),
        Log("a line"),
        Heartbeat(),
        Done({"key": "k"}),
        Failed("E: why", "where"),
        Changed("m"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_requests_and_events_travel_as_one_line_of_json(event: Event, tmp_path):
    ask = dataclasses.replace(request(tmp_path), inputs={"data": ["prepare", "d" * 64, "e" * 64]}, force="a\nb")
    assert Request.parse(ask.line()) == ask
    assert parse_event(event_line(event)) == event
    assert [ask.line().count("\n"), event_line(event).count("\n")] == [1, 1]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"name": "sfft"}, "no stage 'sfft'; there are base, distill, evaluate,"),
        ({"source": "/no/such/model"}, "SourceMissing: base.source: /no/such/model does not exist"),
        ({"sourcce": "x"}, "sourcce"),
    ],
    ids=["unknown stage", "stage raises", "unknown setting"],
)
def test_a_stage_that_fails_does_not_end_it(warm, tmp_path, ask, message):
    pid = warm.pid
    with pytest.raises(StageFailed) as e:
        warm.run(request(tmp_path, **ask), ignore)
    assert message in str(e.value)
    assert f"traceback in {warm.log}" in str(e.value)
    assert "Traceback (most recent call last)" in warm.log.read_text()
    assert Store(str(tmp_path)).all_keys() == []
    warm.run(request(tmp_path), ignore)
    assert (warm.pid, warm.starts) == (pid, 1)


@pytest.mark.slow
def test_what_a_stage_has_printed_before_it_failed_is_in_the_log_also_of_a_worker_that_is_killed(tmp_path, monkeypatch):
    write_files(
        tmp_path, **{"printing_rows.py": "def rows():\n    print('17 files opened')\n    raise ValueError(1)\n"}
    )
    monkeypatch.syspath_prepend(tmp_path)
    # Some images of Python set it.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    worker = Worker(tmp_path / "worker.log")
    with pytest.raises(StageFailed, match="printing_rows"):
        worker.run(request(tmp_path, "prepare", source="printing_rows:rows"), ignore)
    worker.kill()
    assert "17 files opened" in (tmp_path / "worker.log").read_text()


def test_an_input_that_is_gone_is_named(warm, tmp_path):
    ask = dataclasses.replace(request(tmp_path), inputs={"data": ("prepare", "d" * 64, "e" * 64)})
    with pytest.raises(
        StageFailed, match=r"input data \(prepare/dddddddddddd\) with digest eeeeeeeeeeee is gone from .*; run again"
    ):
        warm.run(ask, ignore)


def test_a_forced_run_starts_from_nothing_and_replaces(warm, tmp_path):
    store = Store(str(tmp_path))
    warm.run(request(tmp_path), ignore)
    (WorkFolder(store, "base", "k" * 64).open() / "left-by-an-earlier-try").mkdir()
    again = warm.run(dataclasses.replace(request(tmp_path), force="run-two", seed=8), ignore)
    assert again["seed"] == 8
    assert store.get("base", "k" * 64).manifest["seed"] == 8
    assert len(store.fs.find(store.join("replaced"))) > 0
    assert (WorkFolder(store, "base", "k" * 64).open() / "left-by-an-earlier-try").exists()


@pytest.mark.parametrize("same", [True, False], ids=["equal", "another"])
def test_memory_is_named_by_the_artifact_that_was_made_alone(warm, tmp_path, same):
    here, there, memory = request(tmp_path / "here"), request(tmp_path / "there"), {"decoder:new": "weights"}
    made = warm.run(there, ignore)
    store = Store(here.store)
    if same:
        made_there = Store(there.store).get("base", "k" * 64)
        out = Path(shutil.copytree(made_there.local(), tmp_path / "out"))
        (out / "manifest.json").unlink()
    else:
        out = write_files(tmp_path / "out", **{"config.json": "{}"})
    # Another process has committed the key by the time that this one does.
    store.commit(out, {"stage": "base", "key": "k" * 64, "metrics": {}})
    with using("auto"), (tmp_path / "events").open("w") as events:
        manifest = run_request(here, memory, Events(events))
    assert (manifest["digest"] == made["digest"]) == same
    assert {n: v for n, v in memory.items() if n.startswith("decoder:")} == (
        {f"decoder:{made['digest']}": "weights"} if same else {}
    )


def test_memory_of_a_stage_that_failed_is_dropped(tmp_path):
    memory = {"decoder:new": "weights"}
    with using("auto"), (tmp_path / "events").open("w") as events, pytest.raises(SourceMissing):
        run_request(request(tmp_path, source="/no/such/model"), memory, Events(events))
    assert [n for n in memory if n.startswith("decoder:")] == []


def test_a_try_whose_lease_was_taken_over_says_so_and_has_an_output_folder_of_its_own(tmp_path):
    ask = dataclasses.replace(request(tmp_path, source="/no/such/model"), lease="abcdefgh-and-more")
    with using("auto"), (tmp_path / "events").open("w") as events, pytest.raises(LeaseLost, match="is gone"):
        run_request(ask, {}, Events(events))
    assert (WorkFolder(Store(str(tmp_path)), "base", "k" * 64).path / "out.abcdefgh").is_dir()


@pytest.mark.slow
def test_a_worker_that_is_killed_at_work_says_how_it_died_and_what_is_left(doomed, tmp_path):
    killed: list[int] = []
    doomed.log.write_text("a line of an earlier stage\n")

    def kill() -> None:
        while doomed.pid is None:
            time.sleep(0.01)
        time.sleep(0.3)
        killed.append(doomed.pid)
        os.kill(doomed.pid, signal.SIGKILL)

    assert doomed.starts == 0
    threading.Thread(target=kill).start()
    with pytest.raises(WorkerDied) as e:
        doomed.run(request(tmp_path), ignore)
    text = str(e.value)
    assert f"the worker (pid {killed[0]}) was ended by signal SIGKILL" in text
    assert "in stage base" in text
    assert "finished stages, shards and checkpoints are kept; the same command goes on from there" in text
    assert str(doomed.log) in text
    assert "an earlier stage" not in text
    assert Store(str(tmp_path)).all_keys() == []
    # The next request gets a fresh one.
    doomed.run(request(tmp_path), ignore)
    assert doomed.starts == 2
    assert doomed.pid != killed[0]


@pytest.mark.slow
def test_a_worker_that_was_killed_while_idle_is_replaced_in_silence(worker, tmp_path):
    starts = worker.starts
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.2)
    worker.run(request(tmp_path), ignore)
    assert worker.starts == starts + 1


@pytest.mark.slow
def test_a_worker_that_falls_silent_is_ended(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "SILENCE_SECONDS", 3.0)
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerDied, match="sent nothing for 3 s, and was ended in stage base") as e:
        worker.run(request(tmp_path), ignore)
    assert "memory" not in str(e.value)


@pytest.mark.slow
def test_an_interrupted_request_ends_it(worker, tmp_path):
    def interrupt(event: Report) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.run(request(tmp_path), interrupt)
    assert not psutil.pid_exists(worker.pid)


@pytest.mark.slow
def test_closing_ends_it_and_leaves_no_descriptors(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    worker = Worker(tmp_path / "worker.log")
    worker.run(request(tmp_path), ignore)
    pid = worker.pid
    worker.close()
    assert not psutil.pid_exists(pid)
    assert len(os.listdir("/proc/self/fd")) == before
    worker.close()  # twice is fine


PARENT = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.stages.worker.support import ignore, request
from rlhf.stages.worker.client import Worker
worker = Worker(Path(sys.argv[1]) / "worker.log")
def go():
    worker.run(request(Path(sys.argv[1])), ignore)
    print(worker.pid, flush=True)
if sys.argv[3] == "thread":
    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
else:
    go()
sys.stdin.read()
worker.run(request(Path(sys.argv[1]) / "b"), ignore)
print(worker.starts, flush=True)
worker.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("started_in", ["main", "thread"])
def test_it_is_gone_two_seconds_after_its_parent_is_killed(tmp_path, started_in):
    parent = python(PARENT, tmp_path, Path(__file__).parents[3], started_in, stdin=subprocess.PIPE)
    worker = psutil.Process(int(parent.stdout.readline()))
    # No thread of it can look for its parent, as in a long call of C.
    worker.suspend()
    parent.kill()
    parent.wait()
    worker.wait(timeout=2)
    parent.communicate()


@pytest.mark.slow
def test_it_outlives_the_thread_that_started_it(tmp_path):
    parent = python(PARENT, tmp_path, Path(__file__).parents[3], "thread", stdin=subprocess.PIPE)
    parent.stdout.readline()
    time.sleep(1.0)
    out, err = parent.communicate("go on")
    assert out == "1\n", err


def test_the_worker_lies_on_huge_pages_unless_the_user_decides(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert worker_environment()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert worker_environment()["GLIBC_TUNABLES"] == "glibc.malloc.check=1:glibc.malloc.hugetlb=1"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert worker_environment()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"


def test_a_compilation_is_seen_from_any_thread(monkeypatch):
    import jax

    traced: list[bool] = []

    def program(x):
        # Here JAX traces; another thread looks, as the heartbeat does.
        looking = threading.Thread(target=lambda: traced.append(is_compiling()))
        looking.start()
        looking.join()
        return x + 1

    assert not is_compiling()
    compiled = jax.jit(program)
    compiled(1.0)
    assert traced == [True] and not is_compiling()
    # While JAX is imported it runs modules that compile.
    seen = types.SimpleNamespace(f_code=types.SimpleNamespace(co_filename="x/jax/_src/compiler.py"))
    seen.f_back = types.SimpleNamespace(f_code=types.SimpleNamespace(co_filename="<frozen importlib._bootstrap>"))
    seen.f_back.f_back = None
    monkeypatch.setattr(sys, "_current_frames", lambda: {0: seen})
    assert not is_compiling()


def test_the_room_that_a_model_needs_is_not_that_of_data_teachers_and_moments():
    def artifact(**sizes):
        files = [{"path": path.replace("_", "/", 1), "size": size} for path, size in sizes.items()]
        return Artifact(None, {"files": files})

    base, teacher = artifact(model_weights=100, tokenizer_json=7), artifact(model_weights=5000)
    data, update = artifact(sft_part=10**12), artifact(state_trainer=900)
    assert smallest_model([data, teacher, base]) == 100
    assert smallest_model([data, update]) == 0


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_characters_that_the_console_lacks_are_escaped(monkeypatch, encoding):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    escape_output()
    ConsoleReporter().line("5 of 7 records kept (field `x\N{CAT FACE}`), \u05e9")
    print("\N{CAT FACE}", flush=True)
    assert written.getvalue().decode(encoding) == (
        "  5 of 7 records kept (field `x\\U0001f431`), \\u05e9\n\\U0001f431\n"
    )


def test_output_that_is_no_file_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    escape_output()
    assert sys.stdout is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("12 of 100 failed: Input/output error"),
        ValueError("line 3: Stale file handle"),
        RuntimeError("the judge http://10.0.0.5/v1 has answered 500: No space left on device"),
        ValueError("RESOURCE_EXHAUSTED: out of memory"),
    ],
)
def test_what_is_no_fault_of_this_machines_disk_is_told_as_it_is(tmp_path, error):
    failed = failure_of(error, str(tmp_path))
    assert failed.error.endswith(f"{type(error).__name__}: {error}") and "MB left" not in failed.error
    assert not failed.outage


def test_a_full_disk_or_one_that_fails_is_told_with_what_met_it(tmp_path):
    own = failure_of(OSError(errno.EIO, "Input/output error", str(tmp_path / "x")), str(tmp_path))
    assert own.outage and "check" in own.error.lower()
    full, error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "x")), RuntimeError("not saved")
    error.__cause__ = full
    for failed in (failure_of(full, str(tmp_path)), failure_of(error, str(tmp_path))):
        # The same command goes on when there is room.
        assert failed.outage and failed.error.startswith("No space left on device: the disk of ")
    assert f"OSError: [Errno 28] No space left on device: '{full.filename}'" in failure_of(full, str(tmp_path)).error
    told = "No space left on device: the disk of /a has 0 MB left of 1"
    assert failure_of(DiskFault(errno.ENOSPC, told), str(tmp_path)).error == told


def test_secrets_in_urls_are_not_told(tmp_path):
    failed = failure_of(OSError("cannot read https://me:hunter2@host/data.jsonl"), str(tmp_path))
    assert "hunter2" not in failed.error and "host/data.jsonl" in failed.error


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a system without a device that is always full")
def test_an_error_arrives_where_the_log_has_no_room_for_it(tmp_path):
    full = Worker(Path("/dev/full"))
    try:
        with pytest.raises(StageFailed, match="SourceMissing"):
            full.run(request(tmp_path, source="/no/such/model"), ignore)
    finally:
        full.close()
