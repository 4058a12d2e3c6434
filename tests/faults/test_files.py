"""A file operation that fails once, or a disk that is full, costs a run no more than the same command again."""

import contextlib
import errno
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from rlhf.stages.store import audit_log, leases, registry
from rlhf.stages.store.artifacts import ArtifactError, Store
from tests.faults.files import prepared
from tests.faults.store_life import LEFT, live, whole
from tests.support import RLHF, can_mount

PROJECT = Path(__file__).parents[2]
SHIM = pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux and a C compiler")


@pytest.mark.slow
@SHIM
@pytest.mark.parametrize("step", [29, 1])
def test_each_operation_in_the_life_of_an_artifact_may_fail_once(step):
    # In memory: a busy disk takes a hundred times as long to sync.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        command = [sys.executable, "-m", "tests.faults.store_life", folder, str(step)]
        env = os.environ | prepared(Path(folder))
        done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert int(re.findall(r"(\d+) operations", done.stdout)[0]) > 300


class Failing(MemoryFileSystem):
    """A file system in memory of which one request fails: `failing://NAME`."""

    protocol = "failing"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    left = 0

    @classmethod
    def count(cls, *where: Any) -> None:
        cls.left -= 1
        if cls.left == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO), *map(str, where[:1]))

    exists = AbstractFileSystem.exists


def counted(name: str) -> Any:
    def request(self: Failing, *args: Any, **named: Any) -> Any:
        self.count(*args)
        return getattr(MemoryFileSystem, name)(self, *args, **named)

    return request


for each in ("cat_file", "pipe_file", "put_file", "get_file", "info", "find", "ls", "rm_file", "open", "makedirs"):
    setattr(Failing, each, counted(each))
fsspec.register_implementation("failing", Failing, clobber=True)


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_each_request_to_a_remote_store_may_fail_once(tmp_path, monkeypatch, step):
    monkeypatch.setattr(leases, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(audit_log, "PROJECT", tmp_path)
    wanted = live(Store(f"failing://{tmp_path.name}", tmp_path / "calm"), [])
    for number in itertools.count(1, step):
        store = Store(f"failing://{tmp_path.name}-{number}", tmp_path / str(number))
        Failing.left = number
        with contextlib.suppress(OSError, ArtifactError, registry.RegistryError):
            live(store, [])
        struck, Failing.left = Failing.left <= 0, 0
        assert not whole(store)
        assert live(store, []) == wanted and len(registry.history(store, "champion")) == 1, number
        left = [path for path in store.fs.find(store.root) if path.split("/")[2] in LEFT]
        assert not left, (number, left)
        if not struck:
            break
    assert number > 100


@SHIM
@pytest.mark.slow
def test_operations_of_a_stage_may_fail_once(tmp_path):
    command = [sys.executable, "-m", "tests.faults.files", "--scene", "base", "--trials", "20"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], cwd=PROJECT, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "20 trials" in done.stdout


SCRIPT = """
mount -t tmpfs -o size=3m none "$1" || exit 9
run() { "$2" run smoke --no-prefect --store "$1/s" --only sft --set sft.epochs=1; echo "status $?"; }
run "$@"
"$2" runs --store "$1/s"
"$2" gc --yes --grace 0 --keep 1 --store "$1/s"; echo "collected $?"
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
    # Whichever stage met it: log and records take some of the room.
    assert re.search("failed: (prepare|sft): No space left on device: the disk of", full), before + full
    assert f"{place}" in full and "run the same command again" in full
    assert "Traceback" not in full
    assert "status 1" in before
    assert " failed" in before and "killed" not in before
    assert "collected 0" in before
    assert "status 0" in rest, rest
    # What the first try had finished was there.
    assert "base" in rest and "cached" in rest
