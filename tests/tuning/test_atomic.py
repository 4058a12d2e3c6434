"""A file or folder is there whole, or not at all; nothing is left beside it."""

import os
import sys

import pytest

from rlhf.tuning.atomic import whole_file, whole_folder


def test_a_file_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "new" / "a.json"
    with whole_file(target) as partial:
        partial.write_text("{")
        assert not target.exists()
        partial.write_text("{}")
    assert target.read_text() == "{}" and list(target.parent.iterdir()) == [target]


def test_a_file_that_fails_leaves_the_old_one(tmp_path):
    target = tmp_path / "a"
    target.write_text("old")
    with pytest.raises(RuntimeError), whole_file(target) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_a_folder_that_another_made_meanwhile_stays(tmp_path):
    target = tmp_path / "model"
    with whole_folder(target) as mine:
        (mine / "weights").write_text("mine")
        target.mkdir()
        (target / "weights").write_text("theirs")
    assert (target / "weights").read_text() == "theirs" and list(tmp_path.iterdir()) == [target]


def test_a_folder_that_fails_is_gone(tmp_path):
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "model") as mine:
        (mine / "weights").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="names of descriptors are Linux's")
def test_data_are_on_the_disk_before_their_name_is(tmp_path, monkeypatch):
    """After a loss of power a name without its data would be taken for finished work."""
    done, real, replace, rename = [], os.fsync, os.replace, type(tmp_path).rename

    def synced(descriptor):
        done.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(("name", b.name)), replace(a, b)))
    monkeypatch.setattr(type(tmp_path), "rename", lambda a, b: (done.append(("name", b.name)), rename(a, b)))
    with whole_file(tmp_path / "file") as partial:
        partial.write_text("a" * 100)
    with whole_folder(tmp_path / "folder") as partial:
        (partial / "weights").write_text("b" * 100)
    kinds = [(kind, name if not name.endswith(".part") else "part") for kind, name in done]
    assert kinds == [
        ("sync", "part"),
        ("name", "file"),
        ("sync", tmp_path.name),
        ("sync", "weights"),
        ("sync", "part"),
        ("name", "folder"),
        ("sync", tmp_path.name),
    ]
