"""Two that want the same key do the work once; the lease of a dead holder is taken over."""

import errno
import json
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from botocore.exceptions import EndpointConnectionError

from rlhf.stages.store import leases
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.leases import lease
from tests.stages.store.disturbed import Disturbed
from tests.support import finish, python

# Makes one artifact under the lease, unless it is there; counts in a file how often it really did.
MAKER = """
import sys, time
from pathlib import Path
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.leases import lease
url, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
store = Store(url)
with lease(store, "sft", "k" * 64, lambda line: print(line, flush=True)):
    if store.get("sft", "k" * 64) is None:
        with (folder / "made").open("a") as f:
            f.write("x")
        print("held", flush=True)
        out = folder / f"out-{time.time_ns()}"
        out.mkdir()
        time.sleep(seconds)
        (out / "data").write_text("1")
        store.commit(out, {"stage": "sft", "key": "k" * 64, "metrics": {}})
"""


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path):
    if request.param == "file":
        return str(tmp_path / "store")
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def record(store: Store) -> dict:
    return store.read_json("leases", f"sft-{'k' * 64}.json")


def hold(url: str, folder: Path, seconds: float = 60) -> subprocess.Popen[str]:
    process = python(MAKER, url, folder, seconds)
    line = process.stdout.readline()
    assert line == "held\n", line + (process.stderr.read() if process.stderr else "")
    return process


@pytest.mark.slow
def test_many_at_once_do_the_work_once(url, tmp_path):
    count = 4 if url.startswith("s3") else 6
    outs = [finish(p) for p in [python(MAKER, url, tmp_path, 4) for _ in range(count)]]
    assert (tmp_path / "made").read_text() == "x"
    assert sum("waiting for it" in out for out in outs) >= 1
    assert Store(url).fs.find(Store(url).join("leases")) == []


@pytest.mark.slow
@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_a_holder_that_was_killed_here_is_replaced_at_once(url, tmp_path, reaped):
    holder = hold(url, tmp_path)
    holder.kill()
    if reaped:
        holder.wait()
    started = time.monotonic()
    finish(python(MAKER, url, tmp_path, 0))
    assert time.monotonic() - started < 10
    assert (tmp_path / "made").read_text() == "xx"
    holder.wait()


@pytest.mark.slow
def test_several_that_see_a_dead_holder_replace_it_once(tmp_path):
    url = str(tmp_path / "store")
    holder = hold(url, tmp_path)
    holder.kill()
    holder.wait()
    for process in [python(MAKER, url, tmp_path, 1) for _ in range(6)]:
        finish(process)
    assert (tmp_path / "made").read_text() == "xx"


def test_a_holder_that_is_stopped_is_not_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "DEAD_AFTER_SECONDS", 0.2)
    holder = hold(str(tmp_path / "store"), tmp_path, 0.5)
    holder.send_signal(signal.SIGSTOP)
    time.sleep(1)
    assert not leases.Watch().dead(record(Store(str(tmp_path / "store"))))
    holder.send_signal(signal.SIGCONT)
    finish(holder)


def put(store: Store, **changes: object) -> None:
    mine = json.loads(leases._record("another"))
    store.write_json(mine | changes, "leases", f"sft-{'k' * 64}.json")


def taking(store: Store, told: list[str]) -> tuple[threading.Thread, threading.Event]:
    entered = threading.Event()

    def take() -> None:
        with lease(store, "sft", "k" * 64, told.append):
            entered.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread, entered


@pytest.mark.slow
@pytest.mark.parametrize("off", [-100.0, 0.0, 100.0], ids=["clock-behind", "clock-right", "clock-ahead"])
def test_a_holder_on_another_host_lives_while_its_beat_changes_whatever_its_clock_says(tmp_path, off, monkeypatch):
    monkeypatch.setattr(leases, "DEAD_AFTER_SECONDS", 1.5)
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.1)
    store, told = Store(str(tmp_path)), []
    put(store, host="elsewhere", pid=1, beat=time.time() + off)
    thread, entered = taking(store, told)
    for _ in range(5):
        assert not entered.wait(0.5)
        put(store, host="elsewhere", pid=1, beat=time.time() + off)
    assert "process 1 on elsewhere" in told[0]
    # It has stopped.
    assert entered.wait(10)
    thread.join(10)


def test_an_outage_of_the_store_counts_against_no_holder(tmp_path, monkeypatch):
    """Neither could the holder write its beat."""
    store, clock = Store(str(tmp_path)), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    put(store, host="elsewhere", pid=1)
    watch = leases.Watch()
    looks = [*range(0, 6), *range(34, 66)]
    dead = []
    for seconds in looks:
        clock[0] = 100.0 + seconds
        dead.append(watch.dead(record(store)))
    assert looks[dead.index(True)] == 65


def test_a_process_id_that_was_given_to_another_process_is_dead():
    holder = json.loads(leases._record("t"))
    assert not leases.Watch().dead(holder)
    assert leases.Watch().dead(holder | {"started": holder["started"] - 500})
    # One whose start is not known may be another's, or alive.
    assert leases.is_gone(holder | {"started": None}) is None


def test_a_folder_of_another_user_is_no_outage(tmp_path, monkeypatch):
    store = Store(str(tmp_path / "store"))
    denied = PermissionError(errno.EACCES, "Permission denied", store.join("leases"))
    tries: list[object] = []

    def makedirs(*given: object, **_: object) -> None:
        tries.append(given)
        raise denied

    monkeypatch.setattr(store.fs, "makedirs", makedirs)
    with pytest.raises(PermissionError, match="leases"), lease(store, "sft", "k" * 64, print):
        pass
    assert len(tries) == 1


def test_a_lease_whose_creation_was_not_answered_is_ones_own(tmp_path):
    store = Store(f"disturbed://{tmp_path.name}", tmp_path)
    Disturbed.disturb(open_xb=["after"])
    with lease(store, "sft", "k" * 64, lambda line: pytest.fail(line)) as token:
        assert record(store)["token"] == token


def test_whoever_lost_the_lease_hears_of_it_before_committing(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    store = Store(str(tmp_path))
    with lease(store, "sft", "k" * 64, lambda line: None) as token:
        leases.check(store, "sft", "k" * 64, token)
        put(store, host="elsewhere here", pid=7)
        with pytest.raises(leases.LeaseLost, match="the lease of sft kkkkkkkkkkkk is process 7's on elsewhere now"):
            leases.check(store, "sft", "k" * 64, token)


def test_a_store_that_is_away_for_a_moment_ends_no_wait_and_no_finished_work(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "FIRST_PAUSE_SECONDS", 0.01)
    store = Store(f"disturbed://{tmp_path.name}", tmp_path)
    put(store, pid=2**22 + 1)
    Disturbed.disturb(cat_file=["before"] * 3, open_xb=["before"] * 2)
    with lease(store, "sft", "k" * 64, lambda line: None):
        assert Disturbed.calls.count("cat_file") > 3 and Disturbed.calls.count("open_xb") > 2
        Disturbed.disturb(cat_file=["before"] * 10**5)
    Disturbed.disturb()


@pytest.mark.parametrize("fault", ["before", "after"])
def test_a_lease_of_the_dead_is_taken_over_in_spite_of_a_store_that_is_away_for_a_moment(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(leases, "FIRST_PAUSE_SECONDS", 0.01)
    store = Store(f"disturbed://{tmp_path.name}", tmp_path)
    put(store, pid=2**22 + 1)
    # The first request to create it finds the lease of the dead.
    looks = ["", "before", "", "", "before"]
    Disturbed.disturb(makedirs=["before"], rm_file=["before"], open_xb=["", fault], cat_file=looks)
    with lease(store, "sft", "k" * 64, lambda line: pytest.fail(line)) as token:
        assert record(store)["token"] == token
        assert not any(Disturbed.faults.values())


def test_an_error_of_a_connection_that_is_no_oserror_ends_no_wait_either(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "FIRST_PAUSE_SECONDS", 0.01)
    tried: list[int] = []

    def action():
        tried.append(1)
        if len(tried) < 4:
            raise EndpointConnectionError(endpoint_url="http://store")
        return "answer"

    assert leases._again(action) == "answer"
    with pytest.raises(leases.ArtifactError):
        leases._again(lambda: tried.append(1) or (_ for _ in ()).throw(leases.ArtifactError("not JSON")))
    assert len(tried) == 5


def test_a_request_that_fails_once_keeps_no_lease_of_a_process_that_lives_on(tmp_path):
    store = Store(f"disturbed://{tmp_path.name}", tmp_path)
    with lease(store, "sft", "k" * 64, print):
        Disturbed.disturb(cat_file=["before"])
    assert not store.names("leases")


@pytest.mark.parametrize("text", [b"", b'{"token": "abc', b"null", b"[]"])
def test_a_lease_that_was_cut_short_does_not_block_for_ever(tmp_path, text, monkeypatch):
    monkeypatch.setattr(leases, "DEAD_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.1)
    store, told = Store(str(tmp_path)), []
    store.write_bytes(text, "leases", f"sft-{'k' * 64}.json")
    with lease(store, "sft", "k" * 64, told.append):
        assert record(store)["pid"] > 0
    assert record(store) is None
    assert "by process 0 on unknown; waiting" in told[0]


def test_a_lease_that_is_empty_while_it_is_written_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "DEAD_AFTER_SECONDS", 3.0)
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.1)
    store, told = Store(str(tmp_path)), []
    store.write_bytes(b"", "leases", f"sft-{'k' * 64}.json")
    thread, entered = taking(store, told)
    assert not entered.wait(0.5)
    put(store)
    assert not entered.wait(0.5)
    store.remove(store.join("leases", f"sft-{'k' * 64}.json"))
    assert entered.wait(10)
    thread.join(10)


@pytest.mark.parametrize("off", [-60.0, 0.0, 60.0])
def test_one_look_at_a_lease_allows_for_the_clock_of_another_host(tmp_path, off):
    store = Store(str(tmp_path))
    put(store, host="elsewhere", pid=1, beat=time.time() + off)
    assert leases.beats(store, "sft", "k" * 64)
    put(store, host="elsewhere", pid=1, beat=time.time() - 3600)
    assert not leases.beats(store, "sft", "k" * 64)


def test_the_beat_is_renewed_and_stops_with_the_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    store = Store(str(tmp_path))
    with lease(store, "sft", "k" * 64, lambda line: None):
        first = record(store)
        time.sleep(0.5)
        assert record(store)["beat"] > first["beat"]
    time.sleep(0.3)
    assert record(store) is None


@pytest.mark.parametrize("torn", [b'{"tok', b"", None])
def test_a_record_that_is_torn_for_a_moment_does_not_end_the_beat(tmp_path, monkeypatch, torn):
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    store = Store(str(tmp_path))
    with lease(store, "sft", "k" * 64, lambda line: None) as token:
        path = tmp_path / "leases" / f"sft-{'k' * 64}.json"
        path.unlink() if torn is None else path.write_bytes(torn)
        time.sleep(0.4)
        assert record(store)["token"] == token


def test_a_lease_that_was_taken_over_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    store = Store(str(tmp_path))
    with lease(store, "sft", "k" * 64, lambda line: None):
        put(store)
        time.sleep(0.4)
    assert record(store)["token"] == "another"


def test_the_lease_is_given_back_when_the_work_fails(tmp_path):
    store = Store(str(tmp_path))
    with pytest.raises(ZeroDivisionError), lease(store, "sft", "k" * 64, lambda line: None):
        raise ZeroDivisionError
    assert record(store) is None
