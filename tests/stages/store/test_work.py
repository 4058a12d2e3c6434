"""Work in progress: finished units outlive the machine, half ones are never used."""

from __future__ import annotations

import shutil

from stages.store.work import WorkFolder
from tests.stages.store.support import fresh
from tests.support import write_files

KEY = "k" * 64


def test_work_in_progress_goes_on_on_another_machine(remote, tmp_path):
    work = WorkFolder(remote, "sft", KEY).open()
    assert list(work.iterdir()) == []
    write_files(work, **{"rollouts-00000__part.parquet": "a", "checkpoints__3__state": "three", "out__half": "h"})
    WorkFolder(remote, "sft", KEY).mirror()
    write_files(work, **{"rollouts-00001__part.parquet": "b", "checkpoints__6__deep__state": "six"})
    shutil.rmtree(work / "checkpoints" / "3")
    write_files(work, **{"checkpoints__9.orbax-checkpoint-tmp-1__state": "unfinished"})
    WorkFolder(remote, "sft", KEY).mirror()
    write_files(work, **{"rollouts-00002__part.parquet": "not mirrored"})
    found = WorkFolder(fresh(remote, tmp_path), "sft", KEY).open()
    names = {p.relative_to(found).as_posix() for p in found.rglob("*") if p.is_file() and ".mirrored" not in p.parts}
    assert names == {"rollouts-00000/part.parquet", "rollouts-00001/part.parquet", "checkpoints/6/deep/state"}
    assert (found / "checkpoints/6/deep/state").read_text() == "six"


def test_a_mirror_that_was_cut_short_is_not_used(remote, tmp_path):
    work = WorkFolder(remote, "sft", KEY).open()
    write_files(work, **{"rollouts-00000__a": "a", "rollouts-00000__b": "b"})
    WorkFolder(remote, "sft", KEY).mirror()
    remote.fs.rm(next(p for p in remote.fs.find(remote.join("work")) if p.endswith(".mirrored/rollouts-00000")))
    found = WorkFolder(fresh(remote, tmp_path), "sft", KEY).open()
    assert [p for p in found.rglob("*") if p.is_file()] == []


def test_the_machine_that_has_the_work_does_not_fetch_it(remote, tmp_path):
    work = WorkFolder(remote, "sft", KEY).open()
    write_files(work, **{"rollouts-00000__a": "a"})
    WorkFolder(remote, "sft", KEY).mirror()
    (work / "rollouts-00000" / "a").write_text("local")
    assert (WorkFolder(remote, "sft", KEY).open() / "rollouts-00000" / "a").read_text() == "local"


def test_work_that_changed_hands_and_comes_back_is_the_newest(remote, tmp_path):
    here, there = (WorkFolder(at, "sft", KEY) for at in (remote, fresh(remote, tmp_path)))
    write_files(here.open(), **{"checkpoints__3__x": "3", "rollouts-00000__a": "a"})
    here.mirror()
    write_files(there.open(), **{"checkpoints__6__x": "6", "rollouts-00001__b": "b"})
    shutil.rmtree(there.path / "checkpoints/3")
    there.mirror()
    back = here.open()
    assert (back / "checkpoints/6/x").read_text() == "6" and (back / "rollouts-00001/b").read_text() == "b"
    # What the other has removed is removed here in its time, and is no error then.
    shutil.rmtree(back / "checkpoints/3")
    here.mirror()
    here.mirror()
    assert not (back / ".mirrored/checkpoints/3").exists()
    # What was replaced here does not come again.
    write_files(back, **{"checkpoints__9__x": "9"})
    shutil.rmtree(back / "checkpoints/6")
    assert sorted(p.name for p in (here.open() / "checkpoints").iterdir()) == ["9"]
    assert not list(back.parent.glob(".*.part"))


def test_the_work_is_gone_after_the_commit(store, tmp_path):
    write_files(WorkFolder(store, "sft", KEY).open(), **{"rollouts-00000__a": "a"})
    WorkFolder(store, "sft", KEY).mirror()
    WorkFolder(store, "sft", KEY).drop()
    assert store.fs.find(store.join("work")) == []
    assert list(WorkFolder(store, "sft", KEY).open().iterdir()) == []


def test_what_a_kill_left_half_written_is_neither_mirrored_nor_kept(remote, tmp_path):
    work = WorkFolder(remote, "sft", KEY)
    half = ".part-00001.parquet.12-ab.part"
    write_files(work.open(), **{"rollouts-00001__part-00001.parquet": "whole", f"rollouts-00001__{half}": "half"})
    interrupted = work.path.with_name(f".{KEY}.12-ab.part")
    interrupted.mkdir()
    work.mirror()
    stored = [path.rsplit("/", 1)[1] for path in remote.fs.find(remote.join("work"))]
    assert "part-00001.parquet" in stored and half not in stored
    work.drop()
    assert not interrupted.exists()
