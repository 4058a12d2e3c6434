"""Commands that look print one JSON document with `--json`, and change nothing with RLHF_READ_ONLY=1."""

import json
from pathlib import Path

import pytest

from tests.flows.commands import typed

pytestmark = pytest.mark.slow


def shown(store: Path, *arguments: str, code: int = 0) -> dict:
    return json.loads(typed(*arguments, "--json", "--store", store, code=code).stdout)


def test_names_of_policies_with_their_histories(store):
    for reason in ("it is the first", "again"):
        typed("promote", "first", "--store", store, "--reason", reason, code=2 * (reason == "again"))
    (entry,) = shown(store, "champions")["champion"]
    assert entry["policy"]["run"] == "first" and entry["reason"] == "it is the first"


def test_what_they_say_is_what_the_text_says(store):
    assert {n["state"] for n in shown(store, "plan", "smoke")["nodes"]} == {"hit"}
    assert [r["name"] for r in shown(store, "runs")["runs"]] == ["first"]
    nodes = shown(store, "show", "first")["nodes"]
    assert {n["state"] for n in nodes} == {"made"} and all(n["digest"] and n["metrics"] for n in nodes)
    report = store / "runs" / "first" / "report.html"
    assert shown(store, "show", "first")["report"] == str(report)
    # As a run leaves it that is killed.
    report.unlink()
    assert shown(store, "show", "first")["report"] is None
    text = typed("show", "first", "--store", store).stdout
    assert "report  none: type `rlhf report first`" in text
    laws = shown(store, "audit", "first")
    assert laws["broken"] == [] and {"holds", "no case"} == {law["state"] for law in laws["laws"]}


def test_a_damaged_artifact_is_in_the_document_and_in_the_exit_status(store):
    next((store / "artifacts" / "score").glob("*/scores/*.parquet")).write_bytes(b"x")
    found = shown(store, "verify", code=1)
    assert found["artifacts"] == 17 and len(found["damaged"]) == 1 and "scores" in found["damaged"][0]


def test_an_error_is_no_document(store):
    done = typed("show", "frist", "--json", "--store", store, code=2)
    assert done.stdout == "" and "did you mean first?" in done.stderr


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


def test_what_would_change_it_is_refused(look, rlhf):
    for command in (["run", "smoke", "--no-prefect"], ["run", "smoke"], ["pin", "first"], ["report", "first"]):
        assert "RLHF_READ_ONLY is set: unset it to change a store" in look(*command, code=2, command=rlhf).stderr
