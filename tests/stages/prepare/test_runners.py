"""Processes of this machine and a cluster of Beam's job service prepare the same bytes, also after one of them died."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rlhf.stages.prepare.stage import Config
from rlhf.stages.worker.client import StageFailed, Worker, WorkerDied
from rlhf.tuning.data.runners import RunnerError
from tests.stages.prepare.support import digests, request, waiting, write
from tests.tuning.data.run import job_server, worker_pool

RULES = {"rules": ["tests.stages.prepare.support:gate"]}


@pytest.fixture
def settings(pairs, tmp_path, monkeypatch):
    """Of several blocks and shards, with a copy by weight, equal records and one that is dead."""
    monkeypatch.setenv("GATE", str(tmp_path))
    source = write(tmp_path / "data.jsonl", [*pairs, *pairs[:5], {"prompt": 3}])
    sources = {"sources": [{"source": source, "weight": 2}]}
    return sources | {"shards": 3, "near_duplicates": 0.9, "chunk_megabytes": 0.0005} | RULES


@pytest.mark.slow
def test_workers_of_a_job_service_write_the_bytes_of_this_machine_also_after_it_died(
    run, settings, tmp_path, s3, capsys
):
    runner = {"name": "PortableRunner", "scratch": f"{s3}/portable"}
    with job_server(tmp_path / "1") as (jobs, service), worker_pool(tmp_path / "1") as (workers, _):
        thread = threading.Thread(target=lambda: [waiting(tmp_path), service.kill()])
        thread.start()
        lost = f"PortableRunner has lost its job service at {jobs['job_endpoint']} .*run again"
        with pytest.raises(RunnerError, match=lost):
            run(Config(**settings, runner=runner | {"options": jobs | workers}), work=tmp_path / "work")
        thread.join()
    (tmp_path / "open").touch()
    metrics, out = run(Config(**settings))
    assert metrics["records"] == {"read": 66, "kept": 60, "duplicates": 5, "dropped": 0, "dead": 1}
    capsys.readouterr()
    with job_server(tmp_path / "2") as (jobs, _), worker_pool(tmp_path / "2") as (workers, _):
        config = Config(**settings, runner=runner | {"options": jobs | workers})
        again, other = run(config, work=tmp_path / "work")
    assert digests(other) == digests(out) and again == metrics
    assert "parts of the data are finished" in capsys.readouterr().out


@pytest.mark.slow
def test_a_cluster_without_its_workers_is_a_stage_that_makes_no_progress(settings, tmp_path, s3):
    """Beam's job service waits for lost workers; the limit of the stage ends that."""
    runner = {"name": "PortableRunner", "scratch": f"{s3}/lost"}
    worker = Worker(tmp_path / "worker.log", stall_seconds=15.0)
    with job_server(tmp_path / "1") as (jobs, _), worker_pool(tmp_path / "1") as (workers, pool):
        thread = threading.Thread(target=lambda: [waiting(tmp_path), os.killpg(pool.pid, signal.SIGKILL)])
        thread.start()
        ask = request(tmp_path, **settings, runner=runner | {"options": jobs | workers})
        with pytest.raises(WorkerDied, match=r"made no progress for 15 s .`limits.stall_seconds`"):
            worker.run(ask, lambda event: None)
        thread.join()
        (tmp_path / "open").touch()
        worker.stall_seconds = 120.0
        with worker_pool(tmp_path / "1") as (workers, _):
            ask.config["runner"]["options"] = jobs | workers
            assert worker.run(ask, lambda event: None)["metrics"]["records"]["kept"] == 60
    worker.close()


@pytest.mark.slow
def test_processes_of_this_machine_open_no_ports_and_end_with_the_stage(settings, tmp_path):
    worker = Worker(tmp_path / "worker.log")
    ask = request(tmp_path, **settings, workers=2)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(worker.run, ask, lambda event: None)
        one, other = waiting(tmp_path, 2)
        tree = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
        assert {worker.pid, one, other} <= {process.pid for process in tree}
        assert not [c for process in tree for c in process.net_connections("inet")]
        os.kill(one, signal.SIGKILL)
        with pytest.raises(StageFailed, match="a process that prepares data was killed.*finished blocks are kept"):
            running.result()
        psutil.wait_procs([psutil.Process(other)] if psutil.pid_exists(other) else [], 10)
        assert not psutil.pid_exists(other)

        running = pool.submit(worker.run, ask, lambda event: None)
        children = [psutil.Process(pid) for pid in waiting(tmp_path, 2)]
        psutil.Process(worker.pid).kill()
        with pytest.raises(WorkerDied):
            running.result()
        assert not psutil.wait_procs(children, 10)[1]

    (tmp_path / "open").touch()
    lines = []
    assert worker.run(ask, lines.append)["metrics"]["records"]["kept"] == 60
    assert "parts of the data are finished" in str(lines)
    worker.close()
