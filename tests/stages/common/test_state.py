"""Trainer state of a process group: each process writes and reads its shards, and any other group resumes from them."""

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.stages.store.artifacts import Store
from rlhf.tuning import multihost
from tests.support import QUICK, free_port, with_devices

PROGRAM = "tests.stages.common.state_program"
Group = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def group(tmp_path: Path) -> Group:
    """Runs the program in processes of two devices each, and returns what each has found."""

    def run(count: int, store: str, axes: str, what: str) -> list[dict[str, Any]]:
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", PROGRAM, store, str(tmp_path / uuid.uuid4().hex), axes, what]
        processes = [
            subprocess.Popen(
                command,
                env=with_devices(2, QUICK) | multihost.variables(address, count, index),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(count)
        ]
        try:
            ended = [process.communicate(timeout=400) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, (_, err) in zip(processes, ended, strict=True):
            assert process.returncode == (-9 if what == "train" else 0), err[-3000:]
        return [json.loads(out.splitlines()[-1]) for out, _ in ended]

    return run


def moved(url: str, tmp_path: Path) -> str:
    """The URL of a copy of a store."""
    if "://" not in url:
        return str(shutil.copytree(url, tmp_path / uuid.uuid4().hex))
    copy = f"{url}-{uuid.uuid4().hex}"
    source = Store(url, scratch=tmp_path / "unused")
    for path in source.fs.find(source.root):
        source.fs.cp_file(path, path.replace(source.root, Store(copy, scratch=tmp_path / "unused").root, 1))
    return copy


def check(group: Group, url: str, tmp_path: Path, restores: list[tuple[int, str]], trainers: int = 2) -> None:
    trained = group(trainers, url, "1,2,2" if trainers == 2 else "2,2,2", "train")
    values, fingerprint = trained[0]["values"], trained[0]["fingerprint"]
    assert {t["fingerprint"] for t in trained} == {fingerprint} and not any(t["first"] for t in trained)
    written = [t["written"] for t in trained]
    # Besides shards there are descriptions of 30 KB, which do not grow with the model.
    assert max(written) < 1.2 * min(written) and sum(written) > 100_000
    digests = set()
    for count, axes in restores:
        found = group(count, moved(url, tmp_path), axes, "end")
        for one in found:
            assert one["first"] == 2 and one["position"] == {"step": 2, "process": 0}
            assert (one["values"], one["fingerprint"], one["model"]) == (values, fingerprint, fingerprint)
            assert one["verified"] is None and one["kept"]
        digests |= {(axes, one["digest"]) for one in found}
        if axes == "1,4,1" and count == 2:
            # Each process fetches the shards of its half of the devices; process 0 of a local store has all of them.
            first, second = (one["bytes"] for one in found)
            assert second < 0.6 * (first if "://" not in url else second + first)
            assert first > 0.4 * (first + second)
    assert len(digests) == len({axes for _, axes in restores})


@pytest.mark.slow
def test_a_killed_group_is_resumed_by_one_process_from_a_remote_store(group, s3, tmp_path):
    check(group, f"{s3}/{uuid.uuid4().hex}", tmp_path, [(1, "1,2,1")])


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [2, 4])
@pytest.mark.parametrize("kind", ["local", "remote"])
def test_groups_of_other_sizes_and_meshes_resume_with_equal_values(group, s3, tmp_path, kind, trainers):
    url = str(tmp_path / "store") if kind == "local" else f"{s3}/{uuid.uuid4().hex}"
    check(group, url, tmp_path, [(1, "1,2,1"), (2, "1,4,1"), (2, "2,2,1"), (4, "1,4,2")], trainers)
