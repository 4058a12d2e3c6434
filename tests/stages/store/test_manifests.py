"""What a manifest may say, an error of a listing is no damage, and a read-only store is never changed."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from rlhf.stages.store import audit_log
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.disk import sizes_below
from rlhf.stages.store.exclusive import create
from rlhf.stages.store.leases import lease
from rlhf.stages.store.pins import pin, unpin
from rlhf.stages.store.readonly import ReadOnlyStore, refused
from tests.stages.store.disturbed import Disturbed
from tests.support import write_files


@pytest.mark.parametrize("path", ["/tmp/owned", "../owned", "a/../../owned", "a//b", "./a"])
def test_a_manifest_names_no_file_outside_of_its_folder(tmp_path, path):
    store = Store(f"disturbed://{tmp_path.name}", tmp_path / "scratch")
    Disturbed.disturb()
    content = b"x"
    store.fs.pipe_file(f"{store.join('artifacts', 'export', 'k')}/{path}", content)
    file = {"path": path, "size": 1, "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"stage": "export", "key": "k", "digest": "d", "metrics": {}, "files": [file]}
    store.write_json(manifest, "artifacts", "export", "k", "manifest.json")
    with pytest.warns(UserWarning, match="which is not in its folder"):
        assert store.get("export", "k", repair=True) is None
    assert not list(tmp_path.rglob("owned"))


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "store"))


@pytest.fixture
def made(store, tmp_path):
    return store.commit(write_files(tmp_path / "out", data="1"), {"stage": "export", "key": "k", "metrics": {}})


@pytest.mark.parametrize("change", [{"stage": "sft"}, {"key": "other"}, {"folder": "../../x"}])
def test_a_manifest_is_of_the_stage_and_key_that_were_asked_for(store, made, change):
    store.write_json(made.manifest | change, "artifacts", "export", "k", "manifest.json")
    assert store.get("export", "k") is None


def test_a_bit_that_a_disk_has_lost_is_found_wherever_it_is_in_a_manifest(store, tmp_path):
    """In its settings and metrics too, which are in no digest: rules, gates and replays read them."""
    metrics, config = {"score": 0.5, "NaN": float("nan")}, {"rows": 0, "é": 1}
    said = {"stage": "export", "key": "k", "metrics": metrics, "config": config}
    made = store.commit(write_files(tmp_path / "out", data="1"), said)
    place = Path(store.join("artifacts", "export", "k", "manifest.json"))
    text = place.read_bytes()
    taken = []
    for at in range(len(text)):
        place.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        found = store.get("export", "k")
        if found is not None and found.manifest != json.loads(text):
            taken.append(text[at - 10 : at + 10])
    # Nobody knows a manifest whose checksum has another name from one of before, which has none.
    assert all(b"checksum" in around for around in taken) and len(taken) <= len("checksum")
    place.write_bytes(text)
    assert store.verify(made) is None
    store.write_json(made.manifest | {"metrics": {"score": 0.75}}, "artifacts", "export", "k", "manifest.json")
    with pytest.warns(UserWarning, match="its manifest has checksum [0-9a-f]{12} and says [0-9a-f]{12}"):
        assert store.get("export", "k", repair=True) is None


def test_a_manifest_of_before_has_no_checksum(store, made):
    before = {name: value for name, value in made.manifest.items() if name != "checksum"}
    store.write_json(before, "artifacts", "export", "k", "manifest.json")
    assert store.get("export", "k").manifest == before


def test_a_listing_that_fails_or_leaves_files_out_for_a_moment_is_no_damage(tmp_path):
    store = Store(f"disturbed://{tmp_path.name}", tmp_path / "scratch")
    Disturbed.disturb()
    store.commit(write_files(tmp_path / "out", data="1"), {"stage": "export", "key": "k", "metrics": {}})
    Disturbed.disturb(find=["before"])
    with pytest.raises(OSError, match="Input/output error"):
        store.get("export", "k")
    Disturbed.disturb(find=["nothing"])
    assert store.get("export", "k") is not None and not store.names("damaged")


@pytest.mark.parametrize("text", ["null", "[]", "3", "{}", '{"stage": "export", "key": "k", "files": [1]}'])
def test_json_of_another_form_is_damage_and_its_file_is_named(store, made, text):
    store.write_bytes(text.encode(), "artifacts", "export", "k", "manifest.json")
    with pytest.warns(UserWarning, match=r"export/k/manifest\.json has another form \("):
        assert store.get("export", "k", repair=True) is None
    assert len(store.fs.find(store.join("damaged"))) == 2


def test_a_folder_that_cannot_be_read_is_an_error_and_one_that_is_gone_is_empty(tmp_path):
    file = tmp_path / "file"
    file.write_text("1")
    with pytest.raises(NotADirectoryError):
        sizes_below(file)
    assert sizes_below(tmp_path / "nowhere") == {} and sizes_below(tmp_path) == {"file": 1}


KEY = "0" * 64


def files(store: Store) -> dict[str, int]:
    return {path: entry["size"] for path, entry in store.fs.find(store.root, detail=True).items()}


@pytest.mark.parametrize("why", ["RLHF_READ_ONLY is set: unset it", "this user may not write to it"])
def test_nothing_is_written_to_or_removed_from_a_read_only_store(store, tmp_path, monkeypatch, why):
    store.write_json({}, "pins", "first.json")
    before = files(store)
    if "READ_ONLY" in why:
        monkeypatch.setenv("RLHF_READ_ONLY", "1")
    else:
        # As where the disk is read-only: no folder can be made either.
        store.read_only = True
        monkeypatch.setattr(type(store.fs), "makedirs", lambda *_, **__: 1 / 0)
        monkeypatch.setattr(type(store.fs), "mkdir", lambda *_, **__: 1 / 0)
    made = write_files(tmp_path / "made", model="weights")
    for change in (
        lambda: store.write_json({}, "x.json"),
        lambda: store.remove(store.join("pins", "first.json")),
        lambda: store.remove_folder(store.join("pins")),
        lambda: store.set_aside("sft", KEY),
        lambda: store.commit(made, {"stage": "sft", "key": KEY}),
        lambda: create(store, store.join("new"), b""),
        lambda: pin(store, "first"),
        lambda: unpin(store, "first"),
        lambda: lease(store, "sft", KEY, print).__enter__(),
    ):
        with pytest.raises(ReadOnlyStore, match=why):
            change()
    assert why in str(audit_log.append(store, "pin"))
    assert files(store) == before and made.exists()


def test_a_folder_of_another_user_is_read_only_and_its_scratch_is_elsewhere(tmp_path):
    assert not Store(str(tmp_path)).read_only and not Store(str(tmp_path / "none")).read_only
    child = os.fork()
    if not child:
        status = 1
        try:
            # Root may write to any folder.
            if not os.getuid():
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            store = Store("/", "/nowhere")
            status = 0 if store.read_only and str(store.scratch) == "/nowhere" else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_errors_that_refuse_are_told_from_others():
    import errno

    assert refused(OSError(errno.EROFS, "read-only")) and refused(PermissionError("Access Denied"))
    assert not refused(OSError(errno.EIO, "broken")) and not refused(FileNotFoundError())
