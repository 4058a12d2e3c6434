"""Work in progress outlives the machine, half of it is never used; what a transfer has damaged is fetched again."""

import os
import shutil
import time
import uuid
from pathlib import Path

import pytest

from rlhf.stages.store import disk
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.disk import FETCHES
from rlhf.stages.store.work import WorkFolder
from tests.stages.store.disturbed import Disturbed
from tests.stages.store.support import fresh
from tests.support import write_files

KEY = "k" * 64


def test_work_in_progress_goes_on_on_another_machine(remote, tmp_path):
    work = WorkFolder(remote, "sft", KEY).open()
    assert list(work.iterdir()) == []
    write_files(work, **{"rollouts-00000__part.parquet": "a", "checkpoints__3__state": "three", "out__half": "h"})
    WorkFolder(remote, "sft", KEY).save()
    write_files(work, **{"rollouts-00001__part.parquet": "b", "checkpoints__6__deep__state": "six"})
    shutil.rmtree(work / "checkpoints" / "3")
    write_files(work, **{"checkpoints__9.orbax-checkpoint-tmp-1__state": "unfinished"})
    WorkFolder(remote, "sft", KEY).save()
    write_files(work, **{"rollouts-00002__part.parquet": "not mirrored"})
    found = WorkFolder(fresh(remote, tmp_path), "sft", KEY).open()
    names = {
        p.relative_to(found).as_posix()
        for p in found.rglob("*")
        if p.is_file() and not {".mirrored", ".sealed"} & {*p.parts}
    }
    assert names == {"rollouts-00000/part.parquet", "rollouts-00001/part.parquet", "checkpoints/6/deep/state"}
    assert (found / "checkpoints/6/deep/state").read_text() == "six"


def test_a_mirror_that_was_cut_short_is_not_used(remote, tmp_path):
    work = WorkFolder(remote, "sft", KEY).open()
    write_files(work, **{"rollouts-00000__a": "a", "rollouts-00000__b": "b"})
    WorkFolder(remote, "sft", KEY).save()
    remote.fs.rm(next(p for p in remote.fs.find(remote.join("work")) if p.endswith(".mirrored/rollouts-00000")))
    found = WorkFolder(fresh(remote, tmp_path), "sft", KEY).open()
    assert [p for p in found.rglob("*") if p.is_file()] == []


def test_a_large_journal_is_sent_for_a_share_of_the_time(remote, monkeypatch):
    monkeypatch.setattr("rlhf.stages.store.work.SHORT_SECONDS", 0.0)
    folder, sent = WorkFolder(remote, "sft", KEY), []
    (folder.open() / "episodes.jsonl").write_text("{}")
    monkeypatch.setattr(remote.fs, "put_file", lambda *names: time.sleep(0.1) or sent.append(names))
    for _ in range(3):
        folder.save()
    assert len(sent) == 1
    monkeypatch.setattr("rlhf.stages.store.work.SHORT_SECONDS", 1.0)
    folder = WorkFolder(remote, "sft", KEY)
    for _ in range(3):
        folder.save()
    assert len(sent) == 4


def test_the_machine_that_has_the_work_does_not_fetch_it(remote, tmp_path):
    work = WorkFolder(remote, "sft", KEY).open()
    write_files(work, **{"rollouts-00000__a": "a"})
    WorkFolder(remote, "sft", KEY).save()
    before = (work / "rollouts-00000" / "a").stat()
    after = (WorkFolder(remote, "sft", KEY).open() / "rollouts-00000" / "a").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_work_that_changed_hands_and_comes_back_is_the_newest(remote, tmp_path):
    here, there = (WorkFolder(at, "sft", KEY) for at in (remote, fresh(remote, tmp_path)))
    write_files(here.open(), **{"checkpoints__3__x": "3", "rollouts-00000__a": "a"})
    here.save()
    write_files(there.open(), **{"checkpoints__6__x": "6", "rollouts-00001__b": "b"})
    shutil.rmtree(there.path / "checkpoints/3")
    there.save()
    back = here.open()
    assert (back / "checkpoints/6/x").read_text() == "6" and (back / "rollouts-00001/b").read_text() == "b"
    # What the other has removed is removed here in its time, and is no error then.
    shutil.rmtree(back / "checkpoints/3")
    here.save()
    here.save()
    assert not (back / ".mirrored/checkpoints/3").exists()
    # What was replaced here does not come again.
    write_files(back, **{"checkpoints__9__x": "9"})
    # Saved here, and the remote store could not be reached.
    here._seal(back / "checkpoints/9")
    shutil.rmtree(back / "checkpoints/6")
    assert sorted(p.name for p in (here.open() / "checkpoints").iterdir()) == ["9"]
    assert not list(back.parent.glob(".*.part"))


def test_the_work_is_gone_after_the_commit(store, tmp_path):
    write_files(WorkFolder(store, "sft", KEY).open(), **{"rollouts-00000__a": "a"})
    WorkFolder(store, "sft", KEY).save()
    WorkFolder(store, "sft", KEY).drop()
    assert store.fs.find(store.join("work")) == []
    assert list(WorkFolder(store, "sft", KEY).open().iterdir()) == []


def test_what_a_kill_left_half_written_is_neither_mirrored_nor_kept(remote, tmp_path):
    work = WorkFolder(remote, "sft", KEY)
    half = ".part-00001.parquet.12-ab.part"
    write_files(work.open(), **{"rollouts-00001__part-00001.parquet": "whole", f"rollouts-00001__{half}": "half"})
    interrupted = work.path.with_name(f".{KEY}.12-ab.part")
    interrupted.mkdir()
    work.save()
    stored = [path.rsplit("/", 1)[1] for path in remote.fs.find(remote.join("work"))]
    assert "part-00001.parquet" in stored and half not in stored
    work.drop()
    assert not interrupted.exists()


DAMAGE = {
    "a file is gone": Path.unlink,
    "all files are gone": lambda path: [file.unlink() for file in path.parent.iterdir()],
    "cut short": lambda path: os.truncate(path, 3),
    "other bytes": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "no seal": lambda path: shutil.rmtree(path.parents[1] / ".sealed"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_unit_that_is_not_as_it_was_saved_is_made_again_and_the_others_are_kept(tmp_path, damage):
    folder = WorkFolder(Store(str(tmp_path)), "rollout", KEY)
    work = folder.open()
    write_files(work, **{"rollouts-00000__part": "damaged later", "rollouts-00000__more": "more"})
    folder.save()
    DAMAGE[damage](work / "rollouts-00000" / "part")
    write_files(work, **{"rollouts-00001__part": "whole", "out__half": "h", "pieces__a": "a"})
    if damage != "no seal":
        folder.save()
    again = WorkFolder(Store(str(tmp_path)), "rollout", KEY).open()
    assert not (again / "rollouts-00000").exists()
    assert (again / "rollouts-00001").exists() == (damage != "no seal")
    assert (again / "pieces" / "a").exists() and (again / "out" / "half").exists()
    # It counts as new work: what is made again is saved again.
    write_files(again, **{"rollouts-00000__part": "made again"})
    folder.save()
    assert (WorkFolder(Store(str(tmp_path)), "rollout", KEY).open() / "rollouts-00000" / "part").exists()


def test_a_damaged_unit_comes_from_the_remote_store_again(remote):
    folder = WorkFolder(remote, "sft", KEY)
    work = folder.open()
    write_files(work, **{"checkpoints__3__state": "three"})
    folder.save()
    DAMAGE["other bytes"](work / "checkpoints" / "3" / "state")
    assert (folder.open() / "checkpoints" / "3" / "state").read_text() == "three"


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["other bytes", "cut short", "a file is missing", "no seal"])
def test_a_unit_that_a_transfer_has_damaged_is_made_again(remote, tmp_path, damage):
    folder = WorkFolder(remote, "sft", KEY)
    write_files(folder.open(), **{"checkpoints__5__params": "params", "checkpoints__5__state": "state"})
    write_files(folder.path, **{"rollouts-00000__part": "whole"})
    folder.save()
    at = remote.join("work", "sft", KEY, "checkpoints/5/state")
    match damage:
        case "other bytes":
            remote.fs.pipe_file(at, b"stata")
        case "cut short":
            remote.fs.pipe_file(at, b"sta")
        case "a file is missing":
            remote.fs.rm(at)
        case "no seal":
            # As unfinished work of before has it.
            remote.fs.pipe_file(remote.join("work", "sft", KEY, ".mirrored/checkpoints/5"), b"{}")
    elsewhere = WorkFolder(fresh(remote, tmp_path), "sft", KEY)
    found = elsewhere.open()
    assert not (found / "checkpoints" / "5").exists() and (found / "rollouts-00000" / "part").read_text() == "whole"
    # What is made again takes its place, also where its files have other names.
    write_files(found, **{"checkpoints__5__params": "params", "checkpoints__5__again": "again"})
    elsewhere.save()
    third = WorkFolder(fresh(remote, tmp_path / "third"), "sft", KEY).open()
    assert {p.name for p in (third / "checkpoints/5").iterdir()} == {"params", "again"}


def test_seals_of_replaced_checkpoints_are_removed(tmp_path):
    folder = WorkFolder(Store(str(tmp_path)), "sft", KEY)
    write_files(folder.open(), **{"checkpoints__3__state": "three", "checkpoints__6__state": "six"})
    folder.save()
    shutil.rmtree(folder.path / "checkpoints" / "3")
    folder.save()
    assert [path.name for path in (folder.path / ".sealed" / "checkpoints").iterdir()] == ["6"]


def test_another_machine_goes_on_with_the_journals(remote, tmp_path):
    folder = WorkFolder(remote, "score", KEY)
    journal = folder.open() / "journal-exact.jsonl"
    for lines in (b"one", b"one\ntwo"):
        journal.write_bytes(lines)
        folder.save()
    found = WorkFolder(fresh(remote, tmp_path), "score", KEY)
    assert (found.open() / journal.name).read_bytes() == b"one\ntwo"
    # Back on the first machine, which has less by now.
    (found.path / journal.name).write_bytes(b"one\ntwo\nthree")
    found.save()
    assert (WorkFolder(remote, "score", KEY).open() / journal.name).read_bytes() == b"one\ntwo\nthree"
    found.drop()
    assert remote.fs.find(remote.join("work")) == []


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
