"""Commands that look print one JSON document on standard output with `--json`."""

import json
from pathlib import Path

from typer.testing import CliRunner

from rlhf.flows.cli.app import app
from tests.flows.commands import typed


def shown(store: Path, *arguments: str, code: int = 0) -> dict:
    return json.loads(typed(*arguments, "--json", "--store", store, code=code).stdout)


def test_names_of_policies_with_their_histories(store):
    for reason in ("it is the first", "again"):
        CliRunner().invoke(app, ["promote", "first", "--store", str(store), "--reason", reason])
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
