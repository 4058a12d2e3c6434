"""A disk that is full in the middle of a run: the user reads so, with the place, and the same command then goes on."""

import subprocess
from pathlib import Path

import pytest

from tests.support import RLHF, can_mount

SCRIPT = """
mount -t tmpfs -o size=3m none "$1" || exit 9
run() { "$2" run smoke --no-prefect --store "$1/s" --only sft --set sft.epochs=1; echo "status $?"; }
run "$@"
"$2" runs --store "$1/s"
"$2" gc --yes --grace 0 --keep 0 --store "$1/s"; echo "collected $?"
echo ROOM
mount -o remount,size=200m "$1"
run "$@"
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="this machine gives no namespace of mounts")
def test_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["unshare", "-m", "sh", "-c", SCRIPT, "sh", str(place), RLHF]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    before, _, after = (done.stdout + done.stderr).partition("ROOM")
    full, rest = done.stderr, after
    assert "failed: sft: No space left on device: the disk of" in full, before + full
    assert f"{place}" in full and "run the same command again" in full
    assert "Traceback" not in full
    assert "status 1" in before
    assert " failed" in before and "killed" not in before
    assert "collected 0" in before
    assert "status 0" in rest, rest
    # What the first try had finished was there.
    assert "base" in rest and "cached" in rest
