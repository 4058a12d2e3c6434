"""What was damaged on its way from a store is fetched again; what is damaged in the store is said to be."""

import shutil
import uuid

import pytest

from rlhf.stages.store import disk
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.disk import FETCHES
from rlhf.stages.store.work import WorkFolder
from tests.stages.store.disturbed import Disturbed
from tests.support import write_files

KEY = "k" * 64


@pytest.fixture
def far(tmp_path):
    Disturbed.disturb()
    return Store(f"disturbed://{uuid.uuid4().hex}", scratch=tmp_path / "scratch")


def test_a_file_of_an_artifact_is_fetched_again(far, tmp_path):
    out = write_files(tmp_path / "out", weights="w" * 100)
    artifact = far.commit(out, {"stage": "sft", "key": KEY, "metrics": {}})
    Disturbed.disturb(get_file=["flipped"])
    assert artifact.local("weights").read_text() == "w" * 100 and Disturbed.calls.count("get_file") == 2
    shutil.rmtree(far.scratch)
    Disturbed.disturb(get_file=["flipped"] * FETCHES)
    with pytest.raises(ArtifactError, match="weights differs from its checksum; run `rlhf verify`"):
        artifact.local("weights")
    assert not list(far.scratch.rglob("weights"))


def test_a_file_that_the_scratch_disk_has_changed_is_fetched_again(far, tmp_path, monkeypatch):
    """A bit flips between two processes: its size is right, and the store has it whole."""
    artifact = far.commit(write_files(tmp_path / "out", weights="w" * 100), {"stage": "sft", "key": KEY, "metrics": {}})
    path = artifact.local("weights")
    path.write_text("v" + "w" * 99)
    monkeypatch.setattr(disk, "_whole", {})
    assert artifact.local("weights").read_text() == "w" * 100
    Disturbed.disturb()
    reads: list[object] = []
    monkeypatch.setattr(disk, "sha256_file", lambda path: reads.append(path))
    assert artifact.local("weights") == path and not reads and "get_file" not in Disturbed.calls


def test_a_unit_of_unfinished_work_is_fetched_again(far, tmp_path):
    work = WorkFolder(far, "sft", KEY)
    write_files(work.open() / "checkpoints" / "500", state="s" * 100)
    work.save()
    for faults, there in ((1, ["500"]), (FETCHES, [])):
        shutil.rmtree(far.scratch)
        Disturbed.disturb(get_file=["flipped"] * faults)
        found = WorkFolder(far, "sft", KEY).open()
        assert [path.name for path in (found / "checkpoints").glob("*")] == there
