"""The artifact store on three file systems: an artifact is there when it is whole, and only then (R16)."""

import json
import os
import re
import time
import uuid
import warnings
from pathlib import Path

import boto3
import pytest
from fsspec.registry import _registry

from rlhf.stages.store.artifacts import MANIFEST, Artifact, ArtifactError, Store
from rlhf.stages.store.leases import lease
from rlhf.stages.store.work import WorkFolder
from rlhf.tuning.data.remote import SourceError, filesystem
from tests.stages.store.support import fresh
from tests.support import python, write_files

KEY = "k" * 64
FILES = {"model__weights.bin": "w" * 100, "config.json": "{}", "logs__metrics.jsonl": "1\n", "state__adam": "m"}


def make(store: Store, folder: Path, *, key: str = KEY, replace: bool = False, **files: str) -> Artifact:
    out = write_files(folder / f"out-{uuid.uuid4().hex}", **(files or FILES))
    return store.commit(out, {"stage": "sft", "key": key, "metrics": {"loss": 1.5}}, replace=replace)


def overwrite(store: Store, artifact: Artifact, path: str, data: bytes) -> None:
    store.fs.pipe_file(f"{artifact.url}/{path}", data)


def damaged(store: Store) -> list[str]:
    return [p[len(store.root) + 1 :].split("/", 3)[-1] for p in store.fs.find(store.join("damaged"))]


def test_what_is_committed_is_read_back(store, tmp_path):
    made = make(store, tmp_path)
    found = store.get("sft", KEY)
    assert found.manifest == made.manifest
    assert found.metrics == {"loss": 1.5}
    assert [f["path"] for f in found.manifest["files"]] == sorted(p.replace("__", "/") for p in FILES)
    assert {p.relative_to(found.local()).as_posix() for p in found.local().rglob("*") if p.is_file()} - {MANIFEST} == {
        p.replace("__", "/") for p in FILES
    }
    assert found.local("model/weights.bin").read_text() == "w" * 100
    assert store.verify(found) is None
    assert store.all_keys() == [("sft", KEY)]


@pytest.mark.parametrize("fault", ["truncated", "longer", "missing", "manifest"])
def test_a_damaged_artifact_is_set_aside_with_a_warning_and_made_again(store, tmp_path, fault):
    artifact = make(store, tmp_path)
    match fault:
        case "truncated":
            overwrite(store, artifact, "model/weights.bin", b"w" * 99)
        case "longer":
            overwrite(store, artifact, "model/weights.bin", b"w" * 101)
        case "missing":
            store.fs.rm(f"{artifact.url}/model/weights.bin")
        case "manifest":
            store.fs.pipe_file(store.join("artifacts", "sft", KEY, MANIFEST), b'{"stage": "sft", ')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get("sft", KEY) is None  # a plan looks and changes nothing
    assert damaged(store) == []
    expected = {
        "truncated": "weights.bin has 99 bytes, the manifest says 100",
        "longer": "weights.bin has 101 bytes",
        "missing": "weights.bin is missing",
        "manifest": "is not JSON",
    }[fault]
    with pytest.warns(UserWarning, match=expected):
        assert store.get("sft", KEY, repair=True) is None
    assert MANIFEST in damaged(store)
    # Which folder has its files, only a manifest says: those of an object store stay, as those of a killed commit do.
    if fault != "manifest" or store.is_local:
        assert "config.json" in damaged(store)
        assert store.fs.find(store.join("artifacts")) == []
    make(store, tmp_path)
    again = store.get("sft", KEY)
    assert store.verify(again) is None


def test_damage_of_the_same_size_is_found_by_the_checksums(store, tmp_path):
    artifact = make(store, tmp_path)
    overwrite(store, artifact, "model/weights.bin", b"v" + b"w" * 99)
    found = store.get("sft", KEY)
    assert store.verify(found).startswith("model/weights.bin has checksum ")


def test_the_digest_is_that_of_the_content_alone(store, tmp_path):
    first = make(store, tmp_path)
    other_logs = make(store, tmp_path, key="b" * 64, **FILES | {"logs__metrics.jsonl": "2\n", "state__adam": "n"})
    no_state = make(store, tmp_path, key="c" * 64, **{k: v for k, v in FILES.items() if not k.startswith("state")})
    edited = make(store, tmp_path, key="d" * 64, **FILES | {"config.json": "[]"})
    renamed = make(store, tmp_path, key="e" * 64, **{k.replace("config", "settings"): v for k, v in FILES.items()})
    assert first.digest == other_logs.digest == no_state.digest
    assert len({first.digest, edited.digest, renamed.digest}) == 3


def test_the_digest_of_a_part_changes_with_that_part_alone(store, tmp_path):
    first = make(store, tmp_path)
    edited = make(store, tmp_path, key="b" * 64, **FILES | {"config.json": "[]"})
    assert first.part_digest(("model/",)) == edited.part_digest(("model/",))
    assert first.part_digest(("model/", "config.json")) != edited.part_digest(("model/", "config.json"))
    assert first.part_digest() == first.digest != first.part_digest(("model/",))
    with pytest.raises(ArtifactError, match="no content below"):
        first.part_digest(("nowhere/",))


def test_a_part_that_is_not_there(store, tmp_path):
    artifact = make(store, tmp_path)
    assert artifact.has("model/")
    assert not artifact.has("tokenizer/")
    with pytest.raises(ArtifactError, match="has no 'tokenizer/'"):
        artifact.local("tokenizer/")


def test_a_second_commit_keeps_the_first(store, tmp_path):
    first = make(store, tmp_path)
    second = make(store, tmp_path, **FILES | {"config.json": "[]"})
    assert second.manifest == first.manifest
    assert store.get("sft", KEY).local("config.json").read_text() == "{}"
    assert damaged(store) == []


def test_a_replacing_commit_leaves_readers_their_files(store, tmp_path):
    first = make(store, tmp_path)
    reader = store.get("sft", KEY)
    second = make(store, tmp_path, replace=True, **FILES | {"config.json": "[]"})
    third = make(store, tmp_path, replace=True, **FILES | {"config.json": "[3]"})
    found = store.get("sft", KEY)
    assert found.manifest == third.manifest
    for artifact, text in ((reader, "{}"), (second, "[]"), (found, "[3]")):
        assert artifact.local("config.json").read_text() == text
        assert store.verify(artifact) is None
        assert store.with_digest("sft", KEY, artifact.digest).manifest == artifact.manifest
    assert store.with_digest("sft", KEY, "0" * 64) is None
    assert store.all_keys() == [("sft", KEY)]
    kept = [json.loads(store.fs.cat_file(p)) for p in store.fs.find(store.join("replaced"))]
    assert sorted(m["committed"] for m in kept) == [first.manifest["committed"], second.manifest["committed"]]

    # A damaged replacement goes aside without what it replaced.
    overwrite(store, found, "config.json", b"")
    with pytest.warns(UserWarning, match="is damaged"):
        assert store.get("sft", KEY, repair=True) is None
    assert (MANIFEST in damaged(store)) and ("config.json" in damaged(store))
    assert store.verify(reader) is None


def test_whoever_lost_the_lease_while_files_were_written_commits_nothing(store, tmp_path):
    calls: list[int] = []

    def check() -> None:
        calls.append(len(store.fs.find(store.join("artifacts"))))
        if len(calls) == 2:
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        store.commit(write_files(tmp_path / "out", data="1"), {"stage": "sft", "key": KEY, "metrics": {}}, check=check)
    # The second time all files are there, and no manifest.
    assert calls == [0, 1]
    assert store.get("sft", KEY) is None
    assert make(store, tmp_path).has("config.json")


def test_of_two_that_commit_one_key_at_once_each_has_its_own_files(store, tmp_path):
    others = []

    def other() -> None:
        if not others:
            others.append(make(store, tmp_path, **FILES | {"config.json": "[]"}))
            others[0].local()

    def check(calls: list[int] = []) -> None:  # noqa: B006
        calls.append(1)
        if len(calls) == 2:
            other()

    out = write_files(tmp_path / "out", **FILES)
    mine = store.commit(out, {"stage": "sft", "key": KEY, "metrics": {}}, check=check)
    for artifact, text in ((mine, "{}"), (others[0], "[]")):
        assert store.verify(artifact) is None
        assert store.fs.cat_file(f"{artifact.url}/config.json").decode() == text
    assert store.get("sft", KEY).manifest in (mine.manifest, others[0].manifest)


def test_a_root_may_hold_what_patterns_are_made_of(tmp_path):
    store = Store(str(tmp_path / "a[1]*?" / "{b}"))
    first = make(store, tmp_path)
    second = make(store, tmp_path, replace=True, **FILES | {"config.json": "[]"})
    store.write_json({}, "runs", "r", "run.json")
    assert store.all_keys() == [("sft", KEY)]
    assert store.with_digest("sft", KEY, first.digest).digest == first.digest != second.digest
    assert store.names("runs") == ["r"] and store.names("nothing") == []


def test_what_is_removed_or_moved_is_of_this_store_alone(store, tmp_path):
    # As a pattern the first root is the name of the second store.
    mine, theirs = (Store(f"{store.url}/{name}", scratch=tmp_path / name[:2]) for name in ("a[1]*", "a1bc"))
    for at in (mine, theirs):
        at.fs.pipe_file(f"{make(at, tmp_path).url}/left.txt", b"of nobody")
        at.write_json({}, "work", "sft", KEY, "unit", "part.json")
    theirs.write_json({}, "leases", f"sft-{KEY}.json")
    before = {path: theirs.fs.cat_file(path) for path in theirs.fs.find(theirs.root)}
    mine.set_aside("sft", KEY)
    mine.fs.makedirs(mine.join("artifacts", "sft", KEY), exist_ok=True)
    mine.fs.pipe_file(mine.join("artifacts", "sft", KEY, "left.txt"), b"of another one")
    made = make(mine, tmp_path)
    with lease(mine, "sft", KEY, print):
        pass
    WorkFolder(mine, "sft", KEY).drop()
    assert {path: theirs.fs.cat_file(path) for path in theirs.fs.find(theirs.root)} == before
    assert "left.txt" in damaged(mine) and not mine.names("leases")
    assert not mine.fs.exists(f"{made.url}/left.txt") and mine.verify(made) is None
    assert mine.is_local or not mine.fs.find(mine.join("work"))


def test_files_are_as_readable_as_umask_lets_them(tmp_path):
    out = write_files(tmp_path / "out", **FILES)
    (out / "model" / "weights.bin").chmod(0o600)
    old = os.umask(0o022)
    os.umask(old)
    artifact = Store(str(tmp_path / "store")).commit(out, {"stage": "sft", "key": KEY, "metrics": {}})
    modes = {(artifact.local() / f["path"]).stat().st_mode & 0o777 for f in artifact.manifest["files"]}
    assert modes == {0o666 & ~old}


def test_what_a_killed_commit_left_is_no_part_of_the_next(store, tmp_path):
    for name in ("model/old-part-of-weights", "config.json"):
        place = store.join("artifacts", "sft", KEY, name)
        store.fs.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
        store.fs.pipe_file(place, b"left over")
    artifact = make(store, tmp_path)
    assert store.verify(artifact) is None
    names = {p[len(artifact.path) + 1 :] for p in store.fs.find(artifact.path)}
    assert names == {p.replace("__", "/") for p in FILES}


def test_a_fetch_brings_what_is_asked_for_and_keeps_it(remote, tmp_path):
    make(remote, tmp_path)
    artifact = fresh(remote, tmp_path).get("sft", KEY)
    folder = artifact.local("model/")
    assert {p.name for p in folder.parent.rglob("*") if p.is_file()} == {"weights.bin"}
    remote.fs.rm(f"{artifact.url}/model/weights.bin")
    assert artifact.local("model/weights.bin").read_text() == "w" * 100


def test_what_messages_name_of_a_remote_store_has_its_scheme(remote, tmp_path):
    artifact = make(remote, tmp_path)
    assert artifact.url.startswith(f"{remote.url}/artifacts/sft/{KEY}.")
    with lease(remote, "sft", KEY, print):
        assert remote.set_aside("sft", KEY).startswith(f"{remote.url}/damaged/sft/")
    remote.write_bytes(b"{", "runs", "one", "run.json")
    with pytest.raises(ArtifactError, match=re.escape(f"{remote.url}/runs/one/run.json is not JSON")):
        remote.read_json("runs", "one", "run.json")


def test_another_process_s_files_are_seen_at_once(remote):
    remote.write_json({}, "runs", "a", "run.json")
    assert remote.names("runs") == ["a"]
    bucket, _, key = remote.join("runs", "b", "run.json").partition("/")
    boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=b"{}")
    assert remote.names("runs") == ["a", "b"]


def test_json_is_written_in_one_step(tmp_path):
    store = Store(str(tmp_path))
    code = (
        "import sys; from rlhf.stages.store.artifacts import Store; s = Store(sys.argv[1]); print('go', flush=True)\n"
        "for i in range(10**6): s.write_json({'x': ['y'] * 20000, 'i': i}, 'runs', 'r', 'run.json')"
    )
    writer = python(code, tmp_path)
    writer.stdout.readline()
    while store.read_json("runs", "r", "run.json") is None:
        time.sleep(0.01)
    seen, deadline = set(), time.monotonic() + 120
    while len(seen) < 3 and time.monotonic() < deadline:
        seen |= {store.read_json("runs", "r", "run.json")["i"] for _ in range(100)}
    writer.kill()
    writer.communicate()
    assert len(seen) > 1
    assert len(json.loads((tmp_path / "runs/r/run.json").read_text())["x"]) == 20000


def test_a_file_among_folders_is_nothing_of_the_store(tmp_path):
    """macOS writes one into each folder that is looked at."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".DS_Store").touch()
    assert Store(str(tmp_path)).read_json("runs", ".DS_Store", "run.json") is None


def test_a_store_and_a_source_say_which_extra_to_install(monkeypatch):
    for module in ("gcsfs", "s3fs"):
        # As Python marks what cannot be imported.
        monkeypatch.setitem(__import__("sys").modules, module, None)
    for protocol in ("gs", "gcs", "s3", "s3a"):
        # fsspec keeps the classes that it has imported.
        monkeypatch.delitem(_registry, protocol, raising=False)
    for url, extra in {"gs://bucket/x": "gcs", "s3://user:abc@bucket/x": "s3"}.items():
        with pytest.raises(ArtifactError, match=rf"pip install 'rlhf-pipeline\[{extra}\]'") as error:
            Store(url)
        assert "abc" not in str(error.value)
        with pytest.raises(SourceError, match=rf"pip install 'rlhf-pipeline\[{extra}\]'"):
            filesystem(url)


def test_a_folder_that_fsspec_would_read_as_a_chain_is_refused(tmp_path):
    for url in (f"{tmp_path}/a::b", f"file://{tmp_path}/a::b", "memory://a::b", "s3://bucket/a::b"):
        with pytest.raises(ArtifactError, match="rename the folder"):
            Store(url)
    assert Store(f"simplecache::file://{tmp_path}").names() == []


def test_a_store_at_an_address_that_only_reads_is_refused():
    for url in ("http://127.0.0.1:9/x", "https://user:word@example.org/x", "simplecache::http://127.0.0.1:9/x"):
        with pytest.raises(ArtifactError, match="HTTP has no way to write or list; say a folder, s3:// or gs://") as e:
            Store(url)
        assert "word" not in str(e.value)
