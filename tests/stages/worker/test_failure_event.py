"""An error of a stage arrives whole: a full disk is known by its cause, and needs no room in the log to be told."""

import errno
import os
from pathlib import Path

import pytest

from rlhf.stages.store.disk import DiskFault
from rlhf.stages.worker.client import StageFailed, Worker
from rlhf.stages.worker.process import failure_of
from tests.stages.worker.support import ignore, request


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("12 of 100 failed: Input/output error"),
        ValueError("line 3: Stale file handle"),
        RuntimeError("the judge http://10.0.0.5/v1 has answered 500: No space left on device"),
        ValueError("RESOURCE_EXHAUSTED: out of memory"),
    ],
)
def test_what_is_no_fault_of_this_machines_disk_is_told_as_it_is(tmp_path, error):
    failed = failure_of(error, str(tmp_path))
    assert failed.error.endswith(f"{type(error).__name__}: {error}") and "MB left" not in failed.error
    assert not failed.outage


def test_a_full_disk_or_one_that_fails_is_told_with_what_met_it(tmp_path):
    own = failure_of(OSError(errno.EIO, "Input/output error", str(tmp_path / "x")), str(tmp_path))
    assert own.outage and "check" in own.error.lower()
    full, error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "x")), RuntimeError("not saved")
    error.__cause__ = full
    for failed in (failure_of(full, str(tmp_path)), failure_of(error, str(tmp_path))):
        # The same command goes on when there is room.
        assert failed.outage and failed.error.startswith("No space left on device: the disk of ")
    assert f"OSError: [Errno 28] No space left on device: '{full.filename}'" in failure_of(full, str(tmp_path)).error
    told = "No space left on device: the disk of /a has 0 MB left of 1"
    assert failure_of(DiskFault(errno.ENOSPC, told), str(tmp_path)).error == told


def test_secrets_in_urls_are_not_told(tmp_path):
    failed = failure_of(OSError("cannot read https://me:hunter2@host/data.jsonl"), str(tmp_path))
    assert "hunter2" not in failed.error and "host/data.jsonl" in failed.error


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a system without a device that is always full")
def test_an_error_arrives_where_the_log_has_no_room_for_it(tmp_path):
    full = Worker(Path("/dev/full"))
    try:
        with pytest.raises(StageFailed, match="SourceMissing"):
            full.run(request(tmp_path, source="/no/such/model"), ignore)
    finally:
        full.close()
