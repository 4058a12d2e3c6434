"""A run, a stage and silence have limits of time: what passes one is ended, told, and gone on from."""

import re

import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.graph.keying import key_of, key_parts
from rlhf.flows.running.naming import before
from rlhf.flows.running.runner import run_plain
from rlhf.flows.running.session import RunTooLong
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.leases import lease
from rlhf.stages.worker.client import WorkerDied
from tests.flows.running.support import recipe
from tests.stages.worker.support import workers_are
from tests.support import write_files

pytestmark = pytest.mark.slow


def record(folder, name):
    return Store(str(folder / "store")).read_json("runs", name, "run.json")


@pytest.fixture
def hanging(monkeypatch):
    """Workers live and make nothing."""
    workers_are(monkeypatch, "hanging")


def test_a_run_past_its_limit_fails_and_says_what_was_at_work_and_what_to_type(tmp_path, hanging):
    with pytest.raises(RunTooLong) as e:
        run_plain(recipe(tmp_path, "limits.run_seconds=0.5"), name="late")
    said = r"run late took longer than its 0.5 s \(`limits.run_seconds`\): it was at base\. The same"
    assert re.match(said, str(e.value))
    assert "--name late" in str(e.value) and "--set limits.run_seconds=null" in str(e.value)
    found = record(tmp_path, "late")
    assert found["status"] == "failed" and found["nodes"]["base"]["state"] == "failed"
    # It is no death that is tried again.
    assert found["worker_starts"] == 1


def test_time_spent_waiting_for_another_run_counts(tmp_path):
    limited = recipe(tmp_path, "limits.run_seconds=0.5")
    base = next(node for node in build(limited) if node.name == "base")
    with lease(Store(limited.store), "base", key_of(key_parts(base, {})), print), pytest.raises(RunTooLong) as e:
        run_plain(limited, name="late")
    assert re.search(r"it was at base \(base is being made by process \d+ on .*; waiting for it\)\. The", str(e.value))
    found = record(tmp_path, "late")
    assert found["status"] == found["nodes"]["base"]["state"] == "failed" and found["worker_starts"] == 0


def test_a_stage_past_its_limit_is_tried_again_as_often_as_retries_says(tmp_path, hanging, capsys):
    with pytest.raises(WorkerDied, match="limits.stage_seconds"):
        run_plain(recipe(tmp_path, "limits.stage_seconds=0.2", "retries=1"), name="slow")
    assert "try 2 of 2 with a fresh worker" in capsys.readouterr().out
    assert record(tmp_path, "slow")["worker_starts"] == 2


def test_the_run_s_limit_ends_retries_too(tmp_path, hanging):
    with pytest.raises(RunTooLong):
        run_plain(recipe(tmp_path, "limits={stage_seconds: 0.2, run_seconds: 3}", "retries=1000"), name="late")


def test_no_limit_is_in_a_key_or_makes_another_run(tmp_path):
    plain, limited = recipe(tmp_path), recipe(tmp_path, "limits={stage_seconds: 60, run_seconds: 600}")
    first = [key_of(key_parts(node, {})) for node in (build(plain)[0], build(limited)[0])]
    assert first[0] == first[1]
    write_files(tmp_path / "store", runs__late__other="")
    value = {"name": "late", "status": "failed", "recipe": plain.model_dump(mode="json"), "given": {}, "nodes": {}}
    Store(plain.store).write_json(value, "runs", "late", "run.json")
    assert before(Store(limited.store), limited, "late") == value
