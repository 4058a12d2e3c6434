"""A large file that has not changed is read once; any change is seen, also one that the clock does not show."""

import os
import shutil
import time

import pytest

from rlhf.tuning import digest_cache


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "scratch"))
    path = tmp_path / "model"
    path.write_bytes(bytes(2**20))
    return path


@pytest.fixture
def digest(file, monkeypatch):
    """Digest of the file, and how often it has been read."""
    reads = []

    def one(path=file):
        return digest_cache.of_file(path, lambda: reads.append(1) or path.read_bytes()[:8].hex())

    one.reads = reads
    return one


def settle(monkeypatch):
    """As if the last change were long ago."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3_000_000_000)


def test_an_unchanged_file_is_read_once(file, digest, monkeypatch):
    settle(monkeypatch)
    assert digest() == digest() == "00" * 8
    assert len(digest.reads) == 1
    link = file.with_name("link")
    link.symlink_to(file)
    digest(link)
    assert len(digest.reads) == 1


def test_a_file_that_was_changed_just_now_is_read_again(file, digest):
    """Two changes within a step of the clock look alike."""
    digest()
    as_old_as_before(file)
    assert digest() == b"other\0\0\0".hex()
    assert len(digest.reads) == 2


def in_place(file):
    with file.open("r+b") as f:
        f.write(b"other")


def as_old_as_before(file):
    before = os.stat(file)
    in_place(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def by_another_of_its_age(file):
    other = file.with_name("other")
    other.write_bytes(b"other" + bytes(2**20 - 5))
    shutil.copystat(file, other)
    os.replace(other, file)


@pytest.mark.parametrize("change", [in_place, as_old_as_before, by_another_of_its_age])
def test_any_change_is_seen(file, digest, monkeypatch, change):
    settle(monkeypatch)
    digest()
    time.sleep(0.05)
    change(file)
    assert digest() == b"other\0\0\0".hex()


def test_a_file_that_changes_while_it_is_read_is_not_remembered(file, monkeypatch):
    settle(monkeypatch)

    def read():
        in_place(file)
        return "half of each"

    digest_cache.of_file(file, read)
    assert digest_cache.of_file(file, lambda: "whole") == "whole"


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"state": 1}'])
def test_a_damaged_entry_is_none(file, digest, monkeypatch, damage):
    settle(monkeypatch)
    digest()
    [entry] = digest_cache.folder().rglob("*.json")
    entry.write_text(damage)
    assert digest() == "00" * 8 and len(digest.reads) == 2


def test_small_files_and_read_only_homes_are_read(tmp_path, digest, monkeypatch):
    small = tmp_path / "small"
    small.write_bytes(b"a" * 9)
    assert digest(small) == digest(small) == (b"a" * 8).hex()
    assert len(digest.reads) == 2
    monkeypatch.setenv("RLHF_SCRATCH", "/proc/nowhere")
    settle(monkeypatch)
    assert digest() == digest()


def test_objects_are_known_by_their_tags(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path))
    reads = []

    def of(info):
        return digest_cache.of_object("s3://b/x", info, lambda: reads.append(1) or str(len(reads)))

    assert [of({"ETag": '"a"', "size": 2**30}), of({"ETag": '"a"', "size": 2**30})] == ["1", "1"]
    assert of({"ETag": '"b"', "size": 2**30}) == "2"
    # Weak tags say of two contents that they are as good as one.
    assert [of({"ETag": 'W/"b"', "size": 2**30}), of({"size": 2**30}), of({})] == ["3", "4", "5"]
