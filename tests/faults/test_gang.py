"""A gang loses a rank, its lead or its host: no process of it is left, and the next one ends with the same digests.

Four devices are divided over processes in every way. Sums of four have one order of their summands as long as the
collectives between devices are the same, and as many threads compute each of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.worker.interpreter import PROJECT
from tests.faults.support import Run, first_difference
from tests.support import with_devices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
THREADS = "4"
SETTINGS = {"rl.rounds": 2, "rl.checkpoint_every": 2, "evaluate": "null", "sft.checkpoint_every": 1}
LORA = {
    "sft.lora.rank": 4,
    "reward.lora.rank": 4,
    "rl.update.lora.rank": 4,
    "rl.update.lora.quantize": "int8",
    "rl.update.algorithm": "ppo",
    "rl.rounds": 2,
}


@pytest.fixture
def use(monkeypatch) -> Callable[..., None]:
    """Sets devices of each process and the variables of a gang."""
    # As they were before the first call: of two counts of devices in one variable the last one holds.
    flags = os.environ["XLA_FLAGS"]

    def set_up(devices: int, ranks: str = "", **more: str) -> None:
        values = with_devices(devices, flags) | {"NPROC": THREADS, "PJRT_NPROC": THREADS} | more
        for name, value in (values | {"RLHF_GANG": ranks}).items():
            monkeypatch.setenv(name, value)

    return set_up


def nodes(run: Run) -> dict[str, tuple[str, str, Any]]:
    """Key, digest and loss of each node."""
    found = run.record()["nodes"]
    return {name: (e["key"], e["digest"], e["metrics"].get("loss")) for name, e in found.items()}


def ended(store: Path, **options: Any) -> Run:
    run = Run(store, "whole", **options)
    run.ends(0, seconds=1500)
    return run


def ranks_of(run: Run) -> list[psutil.Process]:
    """The processes of a run that are ranks behind the lead."""
    children = psutil.Process(run.process.pid).children(recursive=True)
    return [child for child in children if "stages.worker.rank" in " ".join(child.cmdline())]


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended; its parent may have ended without asking how."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_whole_run_has_the_same_digests_on_any_number_of_processes(use, tmp_path) -> None:
    found = {}
    for ranks, devices in ((1, 4), (2, 2), (4, 1)):
        use(devices, str(ranks))
        found[ranks] = ended(tmp_path / f"of-{ranks}", sets={})
    assert len(nodes(found[1])) == 17
    for ranks in (2, 4):
        assert first_difference(found[1], found[ranks]) == []
        assert nodes(found[ranks]) == nodes(found[1])


@pytest.mark.parametrize("sets", [{}, LORA], ids=["smoke", "adapters and a critic"])
def test_two_ranks_of_a_device_have_the_digests_of_one_process_with_two(use, tmp_path, sets) -> None:
    """A sum of two has one order of its summands, whatever adds them up: nothing else differs from a worker alone."""
    use(2)
    alone = ended(tmp_path / "alone", sets=sets)
    use(1, "2")
    gang = ended(tmp_path / "gang", sets=sets)
    assert first_difference(alone, gang) == []
    assert nodes(gang) == nodes(alone)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, tuple[str, str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (with_devices(1, os.environ["XLA_FLAGS"]) | {"RLHF_GANG": "2", "NPROC": THREADS}).items():
            patch.setenv(name, value)
        patch.setenv("PJRT_NPROC", THREADS)
        return nodes(ended(tmp_path_factory.mktemp("undisturbed") / "store", sets=SETTINGS))


STAGES = ["sft", "reward", "round-000.rollout", "round-000.score", "round-001.update", "export"]


@pytest.mark.parametrize(
    ("lead", "how"),
    # A lead that is stopped is a worker that is silent, as in tests/stages/worker/test_worker.py.
    [(True, signal.SIGKILL), (False, signal.SIGKILL), (False, signal.SIGSTOP)],
    ids=["the lead is killed", "the other is killed", "the other is stopped"],
)
def test_a_rank_that_is_lost_in_any_stage_is_named_and_costs_no_digest(use, tmp_path, undisturbed, lead, how) -> None:
    use(1, "2", RLHF_GANG_SILENCE="6")
    run = Run(tmp_path / "store", "hit", retries=len(STAGES), sets=SETTINGS)
    for node in STAGES:
        run.until(lambda node=node: run.state(node) == "running", seconds=300)
        run.until(lambda: len(ranks_of(run)) == 1, seconds=300)
        # In its middle, or before it: a stage is short once its programs are compiled.
        time.sleep(0.5)
        if run.state(node) != "running":
            continue
        ranks = ranks_of(run)
        target = run.family()[0] if lead else ranks[0]
        os.kill(target.pid, how)
        deadline = time.monotonic() + 120
        # The run may have ended by then, of which `until` would complain.
        while not all(map(gone, ranks)):
            assert time.monotonic() < deadline, run.log.read_text()
            time.sleep(0.1)
    log = run.ends(0, seconds=900)
    assert nodes(run) == undisturbed
    if not lead:
        why = "was ended by signal SIGKILL" if how == signal.SIGKILL else "has sent nothing for 6 s"
        assert "lost rank 1 (pid" in log and why in log
    assert "try 2 of" in log


def test_when_the_flow_is_killed_no_rank_is_left(use, tmp_path) -> None:
    use(1, "2")
    run = Run(tmp_path / "store", "orphans", sets=SETTINGS)
    run.until(lambda: run.state("sft") == "running", seconds=300)
    family = psutil.Process(run.process.pid).children(recursive=True)
    assert any("stages.worker.rank" in " ".join(p.cmdline()) for p in family)
    run.process.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []


def joined(address: str, folder: Path, project: Path, scratch: Path) -> subprocess.Popen[str]:
    """A rank from another folder, with the project that is there and a scratch of its own."""
    environment = os.environ | {"PYTHONPATH": str(project), "RLHF_SCRATCH": str(scratch), "RLHF_GANG": ""}
    command = [sys.executable, "-m", "flows.cli.app", "join", address, "--rank", "1"]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture
def other_host(tmp_path) -> Path:
    """A copy of the project, as another host has one."""
    for package in ("flows", "stages", "tuning"):
        shutil.copytree(PROJECT / package, tmp_path / "host" / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "host"


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_another_host_joins_stays_from_lead_to_lead_and_goes_home(use, tmp_path, undisturbed, other_host) -> None:
    address = free_address()
    use(1, f"2@{address}", RLHF_GANG_TOKEN="0123456789abcdef", RLHF_GANG_WAIT="120")
    rank = joined(address, other_host, other_host, tmp_path / "scratch")
    run = Run(tmp_path / "store", "joined", retries=1, sets=SETTINGS)
    run.until(lambda: run.state("reward") == "running", seconds=300)
    run.family()[0].kill()
    run.ends(0, seconds=900)
    assert nodes(run) == undisturbed
    output, _ = rank.communicate(timeout=60)
    assert (rank.returncode, "rank 1 has lost its lead and waits for the next one" in output) == (0, True)
    # Nothing is left to make: no worker starts, and the rank is told.
    rank = joined(address, other_host, other_host, tmp_path / "scratch")
    Run(tmp_path / "store", "cached", sets=SETTINGS).ends(0)
    assert (rank.wait(timeout=60), rank.communicate()[0].count("lost")) == (0, 0)


def test_another_host_with_other_code_is_refused_by_name(use, tmp_path, other_host) -> None:
    address = free_address()
    use(1, f"2@{address}", RLHF_GANG_TOKEN="0123456789abcdef", RLHF_GANG_WAIT="120")
    module = other_host / "tuning" / "losses" / "sft.py"
    own = module.read_text()
    module.write_text(own + "\nOTHER = 1\n")
    rank = joined(address, other_host, other_host, tmp_path / "scratch")
    run = Run(tmp_path / "store", "refused", sets=SETTINGS)
    log = run.ends(1, seconds=300)
    assert "rank 1 (pid" in log and "refuses sft" in log and "module tuning.losses.sft is other code here" in log
    # The run has failed, and the same command goes on: the rank waits for its next lead.
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(timeout=5)
    module.write_text(own)
    Run(tmp_path / "store", "refused", sets=SETTINGS).ends(0, seconds=900)
    assert rank.wait(timeout=60) == 0
