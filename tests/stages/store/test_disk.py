"""A full disk is reported with its place and a remedy, whichever library met it."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import s3fs.errors
from botocore.exceptions import ClientError
from safetensors import SafetensorError

from rlhf.stages.store import reserve
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.disk import DiskFault, check_room, disk_fault
from tests.support import can_mount, in_small_disk

UNKNOWN = ClientError({"Error": {"Code": "Own", "Message": "a disk failed"}}, "PutObject")
"""An answer of S3 that s3fs does not know, and makes EIO of."""


def raised(kind, cause=None):
    try:
        try:
            if cause is not None:
                raise cause
        except Exception as error:
            raise kind from error
        raise kind
    except Exception as error:
        return error


def full(name=None, number=errno.ENOSPC):
    return OSError(number, os.strerror(number), *([] if name is None else [name]))


@pytest.mark.parametrize(
    "error",
    [
        full("/tmp/a/b"),
        full("/tmp/a/b", errno.EDQUOT),
        raised(RuntimeError("the save failed"), full("/tmp/a/b")),
        OSError(errno.ENOSPC, "Error writing bytes to file"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes: No space left on device [os_error_code='28']"),
    ],
)
def test_a_full_disk_is_found_among_the_causes_of_an_error(error):
    found = disk_fault(error, Path("/tmp"))
    assert "MB left" in found.strerror and "/tmp" in found.strerror
    assert "the same command again" in found.strerror


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_is_named_with_its_remedy(number):
    found = disk_fault(full("/tmp/a/b", number), Path("/"))
    assert found is not None and found.errno == number
    assert "/tmp/a/b" in found.strerror and "run the same command again" in found.strerror


@pytest.mark.parametrize(
    "error",
    [
        s3fs.errors.translate_boto_error(UNKNOWN),
        OSError(errno.EACCES, "x"),
        full("s3://bucket/key"),
        RuntimeError("Error code: 500 - {'error': {'message': '[Errno 28] No space left on device'}}"),
        ValueError("s3://bucket/key: No space left on device [os_error_code='28']"),
    ],
)
def test_other_errors_and_full_disks_of_services_are_none(error):
    assert disk_fault(error, Path("/tmp")) is None


def test_room_is_asked_for_before_it_is_needed(tmp_path):
    check_room(tmp_path / "not" / "there", 1)
    with pytest.raises(DiskFault, match="No space left on device: at least 1000000000.0 GB will be written"):
        check_room(tmp_path, 10**18)


WRITES = """
import sys
from pathlib import Path
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.disk import disk_fault
store = Store(sys.argv[1])
try:
    for number in range(100):
        store.write_bytes(bytes(2**18), "things", str(number))
except OSError as error:
    print(disk_fault(error, store.scratch).strerror)
left = [p.name for p in Path(sys.argv[1], "things").iterdir() if p.name.endswith(".part")]
print(left)
"""


@pytest.mark.skipif(not can_mount(), reason="this machine gives no namespace of mounts")
def test_a_real_full_disk_is_told_and_keeps_nothing_half_written(tmp_path):
    said = in_small_disk(tmp_path, 2, WRITES)
    assert "No space left on device: the disk of" in said and str(tmp_path) in said
    assert said.splitlines()[-1] == "[]"


def test_a_reserve_is_whole_or_not_there(tmp_path, monkeypatch):
    store = Store(str(tmp_path))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # The file system takes half of it.
        resource.setrlimit(resource.RLIMIT_FSIZE, (reserve.BYTES // 2, hard))
        reserve.keep_room(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)
    reserve.keep_room(store)
    assert (tmp_path / "room").stat().st_size == reserve.BYTES


DOWNLOADS = """
import os, sys
from pathlib import Path
from rlhf.stages.store.artifacts import Store
scratch = Path(sys.argv[1], "scratch")
store = Store("memory://many", scratch=scratch)
for number in range(5):
    out = Path("/tmp", f"rlhf-test-{os.getpid()}-{number}")
    (out / "model").mkdir(parents=True)
    (out / "model" / "weights").write_bytes(os.urandom(3 * 2**20))
    manifest = {"stage": "update", "key": f"{number:064d}", "metrics": {}}
    artifact = store.commit(out, manifest)
    print((artifact.local("model/") / "weights").stat().st_size)
    print(sorted(path.name[63] for path in scratch.glob("fetched/update/*")))
    # Hours ago.
    for old in scratch.glob("fetched/update/*") if number != 2 else ():
        for path in (old, *old.rglob("*")):
            os.utime(path, (int(old.name[:64]),) * 2)
"""


@pytest.mark.skipif(not can_mount(), reason="this machine gives no namespace of mounts")
def test_downloads_make_room_for_others_and_those_in_use_stay(tmp_path):
    """A sampler on another host than the trainer would fill its disk with the policies of the rounds before."""
    said = in_small_disk(tmp_path, 10, DOWNLOADS).split("\n")
    assert said[1::2][:5] == ["['0']", "['0', '1']", "['0', '1', '2']", "['1', '2', '3']", "['2', '3', '4']"]


def test_downloads_that_are_read_only_are_used_as_they_are(tmp_path, monkeypatch):
    store = Store("memory://read-only", scratch=tmp_path / "scratch")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "weights").write_text("bytes")
    artifact = store.commit(tmp_path / "out", {"stage": "update", "key": "1" * 64, "metrics": {}})
    monkeypatch.setattr(os, "utime", lambda folder: os.stat("/missing"))
    assert artifact.local("weights").read_text() == artifact.local("weights").read_text() == "bytes"
