"""A process group makes what one process makes; when a member fails no process of it is left, and the next run has a
new group."""

import json
import os
import threading
from pathlib import Path

import psutil
import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.graph.keying import code_of, key_of, key_parts
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.contract.registry import modules, stage
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.worker.client import StageFailed, WorkerDied
from rlhf.stages.worker.group import ProcessGroup, local_group
from rlhf.stages.worker.protocol import Log, Request
from tests.stages.worker.support import ignore, request, workers_are
from tests.support import with_devices

pytestmark = pytest.mark.slow


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Two processes that do what a request says (`tests.stages.worker.together`)."""
    workers_are(monkeypatch, "together")
    found = local_group(2, tmp_path / "worker.log", stall_seconds=60.0)
    yield found
    found.close()


def pids(group: ProcessGroup) -> list[int]:
    return [member.pid for member in group._members]


def test_the_reports_and_the_manifest_are_those_of_process_0_and_each_process_has_a_log(group, tmp_path):
    reports = []
    assert group.run(request(tmp_path, source="well"), reports.append) == {"made by": 0}
    assert reports == [Log("process 0")]
    before = pids(group)
    assert group.run(request(tmp_path, source="well"), ignore) == {"made by": 0}
    assert (pids(group), group.starts) == (before, 1)
    assert (tmp_path / "worker.log").exists() and (tmp_path / "worker-1.log").exists()


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("raises", StageFailed, r"process 1 of 2 \(pid \d+ on .*\): together.py, line \d+: ValueError: no such layer"),
        ("both raise", StageFailed, "^together.py, line \d+: ValueError: process 0 says so"),
        ("dies", WorkerDied, r"process 1 of 2 \(pid \d+ on .*was ended by signal SIGKILL"),
        ("fails and costs its peer", StageFailed, r"process 1 of 2 \(.*ValueError: the cause"),
        ("loses a peer", WorkerDied, r"process 0 of 2 \(pid \d+ on .*\) lost its connection to the others: .*Gloo"),
    ],
)
def test_a_member_that_fails_is_named_and_ends_its_group(group, tmp_path, how, kind, said):
    seen = []
    with pytest.raises(kind, match=said):
        group.run(request(tmp_path, source=how), lambda _: seen.extend(pids(group)))
    assert seen and not any(map(psutil.pid_exists, seen))
    assert group.run(request(tmp_path, source="well"), ignore) == {"made by": 0}
    assert group.starts == 2


def test_a_member_that_fails_after_the_commit_costs_the_group_and_not_the_stage(group, tmp_path):
    reports = []
    assert group.run(request(tmp_path, source="fails late"), reports.append) == {"made by": 0}
    assert "failed after the artifact was committed" in reports[-1].line and not group._members


def test_a_group_that_does_not_move_is_ended_with_the_stacks_of_all_in_their_logs(group, tmp_path):
    # Started without a limit, because the time of a start depends on the machine.
    group.run(request(tmp_path, source="well"), ignore)
    group.stall_seconds = 1.0
    with pytest.raises(WorkerDied, match=r"the process group \(pid .*\) made no progress for 1 s"):
        group.run(request(tmp_path, source="waits"), ignore)
    assert all("together.py" in log.read_text() and "in runs" in log.read_text() for log in tmp_path.glob("*.log"))


def test_an_interrupted_run_leaves_no_process(group, tmp_path):
    seen = []

    def check():
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.run(request(tmp_path, source="waits"), lambda _: seen.extend(pids(group)), check)
    assert not any(map(psutil.pid_exists, seen))


def test_every_stage_says_which_processes_run_it():
    found = {name: stage(name).processes(stage(name).config.model_construct()) for name in modules()}
    alone = {"base", "scorer", "prepare", "fresh", "start", "score", "select", "gate"}
    assert {name for name, which in found.items() if which == "primary"} == alone
    assert set(found.values()) == {"all", "primary"}


def of_export(store: Path) -> tuple[Request, Artifact]:
    """The request that made the smoke run's export, and its artifact."""
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
    asked = Request(
        "export", key_of(parts), parts, config, inputs, node.seed, str(store), "group", files, force="group"
    )
    return asked, made["export"]


def test_two_processes_make_what_one_makes_and_listen_on_loopback_alone(store, tmp_path, monkeypatch):
    """The export gathers every parameter: its digest is that of one process."""
    for name, value in with_devices(1, os.environ["XLA_FLAGS"]).items():
        monkeypatch.setenv(name, value)
    asked, before = of_export(store)
    group = local_group(2, tmp_path / "worker.log")
    listening: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            for pid in filter(None, pids(group)):
                for found in psutil.Process(pid).net_connections("inet"):
                    if found.status == psutil.CONN_LISTEN:
                        listening.add(found.laddr.ip)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        manifest = group.run(asked, ignore)
        own = pids(group)
    finally:
        over.set()
        watching.join()
        group.close()
    assert manifest["device"].endswith(" x2")
    assert (manifest["digest"], manifest["metrics"]) == (before.digest, before.metrics)
    assert not any(map(psutil.pid_exists, own))
    assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
