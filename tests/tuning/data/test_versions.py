"""Workers with other code or libraries than the run are refused by name; what they have left is not gone on with."""

import json
import pickle

import pytest

from rlhf.tuning.data import pipeline, versions
from rlhf.tuning.data.blocks import Plan
from rlhf.tuning.data.receipts import read_receipts, write_receipt
from rlhf.tuning.data.runners import Runner
from tests.support import copy_project
from tests.tuning.data import run as by_hand


@pytest.fixture
def plan(tmp_path):
    return by_hand.plan_of(tmp_path / "tokenizer", splits=("sft",))


def other(name, value):
    """The versions of another host, as they are pickled there."""
    return pickle.dumps(versions.Versions(versions.here() | {name: value}))


@pytest.mark.parametrize(
    "name", ["numpy", "apache-beam", "Python", "rlhf.tuning.data.drafts", "rlhf.tuning.data.added"]
)
def test_what_differs_is_named_with_both_versions(name):
    told = rf"^{name} is {versions.here().get(name, 'absent')} in this worker and 0.1 in the run: build the image"
    with pytest.raises(versions.OtherVersion, match=told):
        pickle.loads(other(name, "0.1"))
    assert pickle.loads(pickle.dumps(versions.here())) == versions.here()


def test_workers_compare_before_they_build_a_step():
    there = versions.Versions(versions.here() | {"numpy": "0.1"})
    with pytest.raises(versions.OtherVersion, match="numpy"):
        pickle.loads(pickle.dumps(pipeline.Apply("Validate", Plan(tokenizer="", splits=(), versions=there))))


@pytest.mark.slow
def test_an_image_of_another_commit_makes_no_rows(plan, tmp_path):
    old = tmp_path / "old"
    packages = copy_project(old)
    drafts = old / "tuning" / "data" / "drafts.py"
    drafts.write_text(drafts.read_text() + "\n# Another commit.\n")
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "p", "completion": "c"}) + "\n")
    parts = by_hand.parts_of(tmp_path / "data.jsonl", tmp_path)
    with (
        by_hand.job_server(tmp_path) as (jobs, _),
        by_hand.worker_pool(tmp_path, packages) as (workers, _),
        pytest.raises(Exception, match=r"rlhf.tuning.data.drafts is \w+ in this worker and \w+ in"),
    ):
        pipeline.run(parts, plan, str(tmp_path / "pieces"), runner=Runner("PortableRunner", 1, jobs | workers))
    assert not (tmp_path / "pieces").exists()


def test_what_another_version_has_left_is_made_again(plan, tmp_path, monkeypatch):
    [name] = by_hand.run(plan, tmp_path, {"prompt": "p", "completion": "c"})
    folder = str(tmp_path / "pieces")
    receipt = read_receipts(folder)[name]
    before = versions.Versions(versions.here() | {"numpy": "0.1"})
    with monkeypatch.context() as patch:
        patch.setattr("rlhf.tuning.data.receipts.here", lambda: before)
        write_receipt(folder, name, receipt)
        assert list(read_receipts(folder)) == [name]
    assert read_receipts(folder) == {}
