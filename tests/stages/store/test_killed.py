"""Commits that are killed: nothing or everything is there, and with `replace` the first or the second (R16)."""

import random
import signal
import uuid
from pathlib import Path

import pytest

from rlhf.stages.store.artifacts import MANIFEST, Artifact, Store
from tests.support import finish, python, write_files

KEY = "k" * 64
# Kills itself at the n-th file system call of the commit, which Python's audit events count: no kill rests on speed.
COMMITTER = """
import os
import signal
import sys
from pathlib import Path
from rlhf.stages.store.artifacts import Store

url, out, files, last, how = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
out.mkdir(parents=True)
for i in range(files):
    (out / f"part-{i:03d}").write_text(f"{i}" * 50)
store = Store(url)
calls = 0

def count(event, _):
    global calls
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.chmod", "os.rmdir", "os.link", "os.listdir"):
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
store.commit(out, {"stage": "sft", "key": "k" * 64, "metrics": {}}, replace=how == "replace")
print(calls)
"""


def commit(url: str, folder: Path, files: int, last: int = 0, how: str = "new") -> int:
    """The number of calls of a whole commit, or 0 of one that was killed at the call `last`."""
    process = python(COMMITTER, url, folder / f"out-{uuid.uuid4().hex}", files, last, how)
    if not last:
        return int(finish(process))
    process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL)
    return 0


@pytest.mark.parametrize("kind", ["file", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_commit_that_is_killed_leaves_nothing_or_everything(kind, tmp_path, request):
    files, kills = 15, 4
    base = str(tmp_path) if kind == "file" else f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    calls = commit(f"{base}/whole", tmp_path, files)
    # At the first call, at the last, and between them.
    places = [1, calls, *random.Random(0).sample(range(2, calls), kills - 2)]
    halves = 0
    for place in places:
        store = Store(f"{base}/{place}", scratch=tmp_path / "scratch")
        commit(store.url, tmp_path, files, place)
        manifest = store.read_json("artifacts", "sft", KEY, MANIFEST)
        halves += manifest is None
        if manifest is not None:
            assert len(manifest["files"]) == files
            assert store.verify(Artifact(store, manifest)) is None
        else:
            assert store.get("sft", KEY) is None
        commit(store.url, tmp_path, files)
        again = store.get("sft", KEY)
        assert store.verify(again) is None
    assert 0 < halves < len(places), f"{halves} of {len(places)} kills came before the manifest was there"


@pytest.mark.slow
def test_a_replacing_commit_that_is_killed_leaves_the_first_or_the_second(tmp_path):
    files = 20
    store = Store(str(tmp_path / "store"))
    out = write_files(tmp_path / "out", **{"config.json": "{}"})
    first = store.commit(out, {"stage": "sft", "key": KEY, "metrics": {}})
    calls = commit(store.url, tmp_path, files, how="replace")
    kept = 0
    for place in [1, calls, *random.Random(0).sample(range(2, calls), 4)]:
        before = store.get("sft", KEY)
        process = python(COMMITTER, store.url, tmp_path / f"out-{place}", files, place, "replace")
        while process.poll() is None:
            # Not for a moment is there none.
            assert store.get("sft", KEY) is not None
        process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
        after = store.get("sft", KEY)
        assert store.verify(after) is None
        kept += after.manifest == before.manifest
        assert store.verify(first) is None
    assert 0 < kept < 6, f"{kept} of 6 kills came before the second manifest was there"
