"""Commits that are killed or meet others: a reader sees what is whole or nothing, the first or the second (R16)."""

import os
import random
import signal
import uuid
import warnings
from pathlib import Path

import pytest

from rlhf.flows.cli.inspect_store import _damage
from rlhf.stages.store import leases
from rlhf.stages.store.artifacts import MANIFEST, Artifact, Store
from rlhf.stages.store.damage import set_aside
from rlhf.stages.store.leases import lease
from rlhf.stages.store.pins import pins
from rlhf.stages.store.reachability import versions
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


READS = 8
WRITER = """
import os, random, sys, time
from pathlib import Path
from rlhf.stages.store import leases
from rlhf.stages.store.artifacts import MANIFEST, Store
from rlhf.stages.store.leases import lease
store, folder, me = Store(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
leases.POLL_SECONDS = 0.01
os.fsync = lambda file: None  # no power is lost here
key, rng = "k" * 64, random.Random(me)
committed = {"stage": "sft", "key": key, "digest": "d", "metrics": {}, "files": []}
committed["committed"] = "2026-01-01T00:00:00+00:00"
records = {
    ("artifacts", "base", key, MANIFEST): committed | {"stage": "base"},
    ("condemned", "sft", f"{key}.json"): committed,
    ("leases", "base-k.json"): {"token": "t", "pid": 1, "started": 1.0, "host": "far boot", "beat": time.time()},
    ("pins", "one.json"): {"run": "one", "note": "", "by": "?", "at": "?"},
}
count = 0
print("writes", flush=True)
while not (folder / 'end').exists():
    for place, record in records.items():
        store.write_json(record, *place)
        try:
            store.remove(store.join(*place))
        except FileNotFoundError:
            pass  # the other writer
    if count % 10 == 0:
        with lease(store, "sft", key, lambda line: None):
            if rng.random() < 0.5 and store.get("sft", key):
                store.remove(store.join("artifacts", "sft", key, MANIFEST))
                store.remove_folder(store.join("artifacts", "sft", key))
            out = folder / f"{me}-{count}"
            out.mkdir()
            (out / "data").write_text("x" * rng.randrange(1, 99))
            store.commit(out, {"stage": "sft", "key": key, "metrics": {}}, replace=True)
    count += 1
print(count)
"""


@pytest.mark.filterwarnings("error")
def test_no_read_calls_damaged_what_another_process_commits(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    store = Store(str(tmp_path / "store"))
    writers = [python(WRITER, store.url, tmp_path, name) for name in "ab"]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "writes\n"
    for _ in range(READS):
        for _ in range(20):
            store.get("base", KEY)
            assert store.examine("base", KEY)[1] is None
            leases.beats(store, "base", "k")
            assert all(found["by"] == "?" for found in pins(store).values())
        versions(store)
        assert _damage(store, "sft", KEY) is None
        assert set_aside(store, "sft", KEY, lambda line: None) is None
        with lease(store, "sft", KEY, lambda line: None), warnings.catch_warnings():
            warnings.simplefilter("error")
            store.get("sft", KEY, repair=True)
    (tmp_path / "end").touch()
    assert all(int(finish(writer)) > 10 for writer in writers)
    assert store.names("damaged") == []
    left = store.get("sft", KEY)
    assert left is not None and store.verify(left) is None


def test_a_file_that_appears_after_the_read_that_missed_it_is_absent(tmp_path, monkeypatch):
    """On any file system: the second look is the one that another process can come before."""
    store = Store(f"memory://{tmp_path.name}", scratch=tmp_path / "scratch")
    place = ("artifacts", "sft", KEY, MANIFEST)
    read = store.fs.cat_file

    def missed(path, *rest, **named):
        try:
            return read(path, *rest, **named)
        finally:
            store.write_json({"stage": "sft", "key": KEY, "digest": "d", "metrics": {}, "files": []}, *place)

    monkeypatch.setattr(store.fs, "cat_file", missed)
    assert store.get("sft", KEY, repair=True) is None
    assert store.names("damaged") == [] and store.fs.exists(store.join(*place))


def test_an_artifact_that_was_computed_again_since_the_damage_was_seen_stays(tmp_path):
    store = Store(str(tmp_path / "store"))
    for content in "ab":
        out = tmp_path / "out"
        out.mkdir()
        Path(out, "data").write_text(content)
        made = store.commit(out, {"stage": "sft", "key": KEY, "metrics": {}}, replace=True)
        if content == "a":
            (made.local() / "data").write_text("torn")
    assert set_aside(store, "sft", KEY, print) is None and store.all_keys() == [("sft", KEY)]
    assert store.verify(made) is None
    (made.local() / "data").write_text("c")
    assert "checksum" in str(set_aside(store, "sft", KEY, print)) and store.get("sft", KEY) is None
