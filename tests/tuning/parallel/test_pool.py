"""A job costs at most itself, wherever its process is, and leaves nothing running."""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from rlhf.tuning.parallel.children import PASS, clean_environment
from rlhf.tuning.parallel.host import difference, loaded_code
from rlhf.tuning.parallel.pool import CLUSTER, Job, Pool, Refused
from tests.support import python

TARGET = "tests.tuning.parallel.targets:Target"
PROJECT = Path(__file__).parents[3]
SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
# Before Ray is imported: its processes listen at loopback alone.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def job(do, argument=None, seconds=20.0, session=None, megabytes=256):
    return Job({"do": do, "with": argument}, seconds, megabytes, session, do)


def results(pool, *jobs):
    """Values, or kinds and messages of failures, in the order of the jobs."""
    found = {id(job): result for job, result in pool.run(jobs)}
    return [_short(found[id(job)]) for job in jobs]


def ask(pool, *of, **options):
    """The answer of one job of a session."""
    pool.submit(job(*of, **options))
    while not (found := pool.poll(60.0)):
        pass
    [(_, result)] = found
    return _short(result)


def _short(result):
    return result.value if result.failure is None else f"{result.failure.kind}: {result.failure.message}"


def gone(pids, seconds=10.0):
    """Whether these processes end within so many seconds."""
    until = time.monotonic() + seconds
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return not left


def _lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def cluster():
    """Three nodes of one CPU on this machine."""
    import ray
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    # A cluster writes its address there, and does not make the folder.
    os.mkdir(f"{folder}/ray")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder)
        cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "temp_dir": folder})
        for _ in range(2):
            cluster.add_node(**SMALL)
        yield cluster
        ray.shutdown()
        cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", params=["local", "cluster"])
def pool(request):
    """One pool for many tests; on a cluster it has a process on each node."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cluster":
            patch.setenv(CLUSTER, request.getfixturevalue("cluster").address)
        pool = Pool(TARGET, {}, processes=3)
    with pool:
        yield pool


@pytest.mark.slow
def test_what_a_job_does_to_its_process_costs_that_job(pool):
    jobs = {
        "echo": ("echo", {"text": "\udcff", "list": [1, 0.1]}),
        "fail": ("fail",), "leave": ("leave",), "end": ("end",), "crash": ("crash",),
        "allocate": ("allocate", 2**12), "sleep": ("sleep", 600, 0.3), "spin": ("spin", None, 0.3),
        "mute": ("mute",), "forge": ("forge", "{no"), "large": ("large", 3_000_000),
    }  # fmt: skip
    found = dict(zip(jobs, results(pool, *(job(*of) for of in jobs.values())), strict=True))
    assert found.pop("large") == "x" * 3_000_000
    assert found.pop("forge").startswith("crash: its answer cannot be read: Expecting property name")
    assert found.pop("fail").startswith("error: RuntimeError: no such room (targets.py:")
    assert found.pop("leave").startswith("error: SystemExit: enough (targets.py:")
    assert found == {
        "echo": {"text": "\udcff", "list": [1, 0.1]},
        "end": "crash: the process ended: status 3",
        "crash": "crash: the process ended: signal 11, SIGSEGV",
        "allocate": "error: MemoryError: more than 256 MB",
        "sleep": "timeout: no answer within 0.3 s",
        "spin": "timeout: no answer within 0.3 s",
        "mute": "crash: the process closed its stream",
    }


@pytest.mark.slow
def test_a_job_that_is_killed_from_outside_is_tried_three_times(pool, tmp_path):
    killed, other = results(pool, job("killed", str(tmp_path / "tries")), job("echo", 1))
    assert killed.startswith("killed: the process was killed 3 times from outside (signal 9, SIGKILL)") and other == 1
    assert (tmp_path / "tries").read_text() == "xxx"


@pytest.mark.slow
def test_a_session_has_a_process_of_its_own_which_ends_with_all_that_it_has_started(pool):
    assert [ask(pool, "counted", session=1), ask(pool, "counted", session=2), ask(pool, "counted", session=1)] == [
        1, 1, 2,
    ]  # fmt: skip
    started, own = ask(pool, "start", session=1), ask(pool, "where", session=1)["pid"]
    assert ask(pool, "where", session=2)["pid"] != own and not gone([started], 0) and not gone([own], 0)
    pool.end(1)
    assert gone([started, own])
    os.kill(ask(pool, "where", session=2)["pid"], signal.SIGKILL)
    assert ask(pool, "counted", session=2).startswith("crash: the process ")
    # Its stream closes a moment before the kernel says how it ended.
    until = time.monotonic() + 10.0
    while "closed its stream" in (answer := ask(pool, "counted", session=2)) and time.monotonic() < until:
        time.sleep(0.05)
    assert answer == "crash: the process has ended since its last answer: signal 9, SIGKILL"
    pool.end(2)


@pytest.mark.slow
def test_what_a_process_has_started_ends_with_its_crash_and_with_its_deadline(pool, tmp_path):
    file = tmp_path / "pid"
    assert results(pool, job("start_and_end", str(file))) == ["crash: the process ended: status 0"]
    assert gone([int(file.read_text())])


def test_children_see_no_secret_and_have_a_folder_of_their_own(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("GAME_SERVER", "mine")
    monkeypatch.setenv(PASS, "GAME_SERVER, NONE")
    with Pool(TARGET, {}, processes=1) as pool:
        [seen] = results(pool, job("where"))
        for environment in (seen["environment"], seen["started"]):
            assert "OPENAI_API_KEY" not in environment and environment["GAME_SERVER"] == "mine"
            assert environment["PATH"] == os.environ["PATH"] and environment["OMP_NUM_THREADS"] == "1"
        assert Path(seen["file"]).exists() and seen["oom"] == "500"
        assert seen["loaded"] == seen["host"]
    assert gone([seen["pid"], seen["host"]], 0) and not Path(seen["file"]).parents[1].exists()


def test_a_target_that_starts_threads_is_imported_by_each_child():
    with Pool(TARGET, {"mark": "thread"}, processes=1) as pool:
        [seen] = results(pool, job("where"))
        assert seen["loaded"] == seen["pid"] and results(pool, job("echo", 5)) == [5]


@pytest.mark.parametrize(
    "mark, reason",
    [("no import", r"ImportError: no such package \(targets.py:\d+\)"), ("exit at import", r"ended .* \(status 3\)")],
)
def test_a_target_that_cannot_be_imported_is_refused(mark, reason):
    with Pool(TARGET, {"mark": mark}) as pool:
        for _ in range(2):
            with pytest.raises(Refused, match=reason if not _ else "no host runs"):
                results(pool, job("echo"))


def test_jobs_are_taken_when_there_is_room_and_closing_ends_those_under_way():
    taken = []

    def jobs():
        for number in range(9):
            taken.append(number)
            yield job("sleep", 600 if number else 0)

    with Pool(TARGET, {}, processes=2) as pool:
        assert results(pool, job("echo", 1)) == [1]
        run = pool.run(jobs())
        assert next(run)[0].label == "sleep" and taken == [0, 1]
        run.close()
        assert results(pool, job("echo", 2), job("echo", 3)) == [2, 3]


def test_a_target_at_rest_is_closed_when_its_session_ends(tmp_path):
    with Pool(TARGET, {"mark": str(tmp_path / "closed")}) as pool:
        ask(pool, "echo", session=1)
        pool.end(1, 5.0)
        until = time.monotonic() + 5
        while not (tmp_path / "closed").exists() and time.monotonic() < until:
            time.sleep(0.02)
        assert (tmp_path / "closed").exists()


def test_a_busy_owner_costs_no_job_its_answer():
    with Pool(TARGET, {}) as pool:
        ask(pool, "echo", session=1)
        pool.submit(job("large", 3_000_000, 0.5, session=1))
        time.sleep(1.0)
        [(_, result)] = pool.poll(0.0)
        assert len(result.value) == 3_000_000


def test_a_copy_that_a_job_forks_answers_for_no_job():
    with Pool(TARGET, {}, processes=1) as pool:
        assert results(pool, job("fork", 0.3), job("sleep", 1.0), job("echo", 2)) == ["the job", 1.0, 2]


@pytest.mark.slow
def test_a_host_that_is_killed_in_the_middle_of_an_answer_is_lost():
    with Pool(TARGET, {}, processes=1) as pool:
        host = ask(pool, "where", session=1)["host"]
        # Nobody reads while the host writes more than a socket holds.
        pool._states[0].host._deliver, deliver = (
            lambda *news: (time.sleep(2.0), deliver(*news)),
            pool._states[0].host._deliver,
        )
        pool.submit(job("large", 3_000_000, session=1))
        time.sleep(1.0)
        os.kill(host, signal.SIGKILL)
        [(_, result)] = pool.poll(30.0)
        assert result.value is not None or result.failure.kind == "crash"
        assert results(pool, job("echo", 1)) == [1]


def test_code_that_differs_from_that_of_the_pool_is_named():
    own = loaded_code(TARGET)
    assert own["tests.tuning.parallel.targets"] and difference(own) is None
    assert "tests.tuning.parallel.targets is" in difference(own | {"tests.tuning.parallel.targets": "0" * 64})
    assert "numpy is" in difference({"numpy": "0.1"})


def test_a_dead_host_costs_its_sessions_and_no_job():
    with Pool(TARGET, {}, processes=1) as pool:
        host = ask(pool, "where", session=1)["host"]
        pool.submit(job("sleep", 600, 600.0, session=2))
        jobs = iter([job("echo", 1), job("sleep", 1.0), job("echo", 2)])
        found = []
        for one, result in pool.run(jobs):
            found.append((one.label, _short(result)))
            if len(found) == 1:
                os.kill(host, signal.SIGKILL)
        crash = "crash: the process ended with its host on this machine (signal 9, SIGKILL)"
        assert sorted(found, key=str) == [("echo", 1), ("echo", 2), ("sleep", crash), ("sleep", 1.0)]
        assert ask(pool, "counted", session=1) == "crash: the process has ended with its host"


def test_a_killed_owner_leaves_neither_processes_nor_folders(tmp_path):
    program = """
from tests.tuning.parallel.test_pool import TARGET, Pool, ask, job
pool = Pool(TARGET, {}, 1)
print(ask(pool, "start", session=1), flush=True)
list(pool.run([job("spin", None, 600.0)]))
"""
    owner = python(program, cwd=PROJECT, env={"TMPDIR": str(tmp_path)})
    started = int(owner.stdout.readline())
    family = [started, *(process.pid for process in psutil.Process(owner.pid).children(recursive=True))]
    assert len(family) >= 4 and list(tmp_path.glob("rlhf-jobs-*"))
    owner.kill()
    owner.communicate()
    assert gone(family) and not list(tmp_path.glob("rlhf-jobs-*"))


@pytest.mark.slow
def test_a_node_that_is_removed_costs_its_sessions_and_no_job(cluster, monkeypatch):
    monkeypatch.setenv(CLUSTER, cluster.address)
    node = cluster.add_node(**SMALL)
    with Pool(TARGET, {}) as pool:
        pool.wait_until_ready()
        while pool._ready < 4:
            pool._take_news(60.0)
        hosts = {session: ask(pool, "where", session=session)["host"] for session in range(8)}
        assert len(set(hosts.values())) == 4
        found, crashed = [], set()
        for number, (_, result) in enumerate(pool.run(job("sleep", 0.05 + n / 1000) for n in range(60))):
            found.append(_short(result))
            if number == 5:
                cluster.remove_node(node)
        for session in hosts:
            if str(ask(pool, "counted", session=session)).startswith("crash: the process has ended with its host"):
                crashed.add(session)
        assert sorted(found) == [0.05 + n / 1000 for n in range(60)]
        assert len(crashed) == 2 and len({hosts[session] for session in crashed}) == 1
        assert gone({hosts[session] for session in crashed}, 20.0)


def test_children_get_proxies_without_their_passwords(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://user:s3cr@et@proxy:3128")
    monkeypatch.setenv("http_proxy", "user:s3cret@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "localhost,.lan")
    found = clean_environment()
    assert found["HTTPS_PROXY"] == "http://proxy:3128" and found["http_proxy"] == "proxy:3128"
    assert found["NO_PROXY"] == "localhost,.lan"
    monkeypatch.setenv("RLHF_PASS_VARIABLES", "HTTPS_PROXY")
    assert clean_environment()["HTTPS_PROXY"] == "http://user:s3cr@et@proxy:3128"


@pytest.mark.slow
def test_the_time_of_a_large_job_begins_when_its_child_has_read_it():
    # It takes seconds to travel.
    numbers = [7] * 6_000_000
    with Pool(TARGET, {}, processes=1) as pool:
        assert results(pool, job("echo", 1), job("size", numbers, seconds=0.8, megabytes=2048)) == [1, len(numbers)]
