"""With RLHF_READ_ONLY=1 commands look at a store and change nothing; those that would are refused with the reason."""

from __future__ import annotations

import json
import os

import pytest

READ_ONLY = os.environ | {"RLHF_READ_ONLY": "1"}


@pytest.fixture
def look(rlhf, store, tmp_path):
    """Runs a command on a store that must be afterwards as it was before."""

    def files():
        return {path: path.stat().st_mtime_ns for path in sorted(store.rglob("*")) if path.is_file()}

    before = files()

    def run(*arguments, code=0):
        done = rlhf(*arguments, "--store", store, code=code, env=READ_ONLY | {"RLHF_SCRATCH": str(tmp_path / "own")})
        assert files() == before
        assert "Traceback" not in done.stderr, done.stderr
        return done

    path = next((store / "artifacts" / "export").glob("*/model.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    before = files()
    return run


def test_what_looks_works_and_a_damaged_artifact_is_told_not_moved(look):
    assert "finished" in look("runs").stdout
    assert "worker.log" in look("show", "first").stdout
    assert "---- sft" in look("logs", "first").stdout
    assert "1 miss" in look("plan", "smoke").stdout
    found = json.loads(look("verify", "--json", code=1).stdout)
    assert len(found["damaged"]) == 1 and "it stays where it is: the store is read-only" in found["damaged"][0]
    done = look("export", "first", code=2)
    assert "it stays where it is: the store is read-only here" in done.stderr
    assert "the report was not written" in look("audit", "first", code=1).stderr


def test_what_would_change_it_is_refused(look):
    for command in (["run", "smoke", "--no-prefect"], ["run", "smoke"], ["pin", "first"], ["report", "first"]):
        assert "RLHF_READ_ONLY is set: unset it to change a store" in look(*command, code=2).stderr
