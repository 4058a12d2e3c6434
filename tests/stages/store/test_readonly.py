"""A read-only store is never changed."""

import os

import pytest

from rlhf.stages.store import audit_log
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.exclusive import create
from rlhf.stages.store.leases import lease
from rlhf.stages.store.pins import pin, unpin
from rlhf.stages.store.readonly import ReadOnlyStore, refused
from tests.support import write_files

KEY = "0" * 64


def files(store: Store) -> dict[str, int]:
    return {path: entry["size"] for path, entry in store.fs.find(store.root, detail=True).items()}


def test_with_the_variable_nothing_is_written_or_removed(store, tmp_path, monkeypatch):
    store.write_json({}, "pins", "first.json")
    before = files(store)
    monkeypatch.setenv("RLHF_READ_ONLY", "1")
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
        with pytest.raises(ReadOnlyStore, match="RLHF_READ_ONLY is set: unset it"):
            change()
    assert "RLHF_READ_ONLY" in str(audit_log.append(store, "pin"))
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
