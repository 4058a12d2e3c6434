"""An error of a stage arrives whole: a full disk is known by its cause, and needs no room in the log to be told."""

from pathlib import Path

import pytest

from stages.worker.client import StageFailed, Worker
from stages.worker.failing import failure_of
from stages.worker.gang import RankFailed
from tests.stages.worker.support import ignore, request


def test_a_full_disk_is_known_by_what_caused_an_error(tmp_path):
    told = "RESOURCE_EXHAUSTED: Error writing: Failed to write 343 bytes to file 12: No space left on device"
    try:
        try:
            raise ValueError(told)
        except ValueError as cause:
            raise RuntimeError("a checkpoint was not saved") from cause
    except RuntimeError as error:
        failed = failure_of(error, str(tmp_path))
    # The same command goes on when there is room.
    assert failed.outage
    assert failed.error.startswith("No space left on device: ")


def test_memory_that_runs_out_is_no_full_disk(tmp_path):
    failed = failure_of(ValueError("RESOURCE_EXHAUSTED: out of memory"), str(tmp_path))
    assert not failed.outage
    assert failed.error.endswith("ValueError: RESOURCE_EXHAUSTED: out of memory")


@pytest.mark.parametrize("outage", [True, False])
def test_an_outage_on_another_rank_is_one(tmp_path, outage):
    assert failure_of(RankFailed("rank 1 on b: the judge is down", outage), str(tmp_path)).outage == outage


def test_secrets_in_urls_are_not_told(tmp_path):
    failed = failure_of(OSError("cannot read https://me:hunter2@host/data.jsonl"), str(tmp_path))
    assert "hunter2" not in failed.error and "host/data.jsonl" in failed.error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a system without a device that is always full")
def test_an_error_arrives_where_the_log_has_no_room_for_it(tmp_path):
    full = Worker(Path("/dev/full"))
    try:
        with pytest.raises(StageFailed, match="SourceMissing"):
            full.run(request(tmp_path, source="/no/such/model"), ignore)
    finally:
        full.close()
