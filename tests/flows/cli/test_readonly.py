"""With RLHF_READ_ONLY=1 commands look at a store and change nothing; those that would are refused with the reason."""

import json

import pytest


@pytest.fixture
def look(rlhf_here, store, tmp_path, monkeypatch):
    """Runs a command on a store that must be afterwards as it was before."""

    def files():
        return {path: path.stat().st_mtime_ns for path in sorted(store.rglob("*")) if path.is_file()}

    before = files()

    def run(*arguments, code=0, command=rlhf_here):
        done = command(*arguments, "--store", store, code=code)
        assert files() == before
        assert "Traceback" not in done.stderr, done.stderr
        return done

    path = next((store / "artifacts" / "export").glob("*/model.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    before = files()
    monkeypatch.setenv("RLHF_READ_ONLY", "1")
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "own"))
    return run


def test_what_looks_works_and_a_damaged_artifact_is_told_not_moved(look, rlhf):
    assert "finished" in look("runs").stdout
    assert "worker.log" in look("show", "first").stdout
    assert "---- sft" in look("logs", "first").stdout
    assert "1 miss" in look("plan", "smoke").stdout
    found = json.loads(look("verify", "--json", code=1).stdout)
    assert len(found["damaged"]) == 1 and "it stays where it is: the store is read-only" in found["damaged"][0]
    done = look("export", "first", code=2, command=rlhf)
    assert "it stays where it is: the store is read-only here" in done.stderr
    assert "the report was not written" in look("audit", "first", code=1).stderr


@pytest.mark.slow
def test_what_would_change_it_is_refused(look, rlhf):
    for command in (["run", "smoke", "--no-prefect"], ["run", "smoke"], ["pin", "first"], ["report", "first"]):
        assert "RLHF_READ_ONLY is set: unset it to change a store" in look(*command, code=2, command=rlhf).stderr
