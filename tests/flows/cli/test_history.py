"""`rlhf history` lists what has changed a store, the newest last."""

import json
import re

import pytest

from tests.flows.commands import typed
from tests.support import write_files


@pytest.mark.slow
def test_every_command_that_changes_a_store_is_in_its_history(rlhf, store):
    def do(*arguments, code=0):
        return typed(*arguments, "--store", store, code=code).stdout

    rlhf("rerun", "first", "--stage", "export", "--no-prefect", "--store", store)
    do("pin", "first", "--note", "of the paper")
    do("unpin", "first")
    do("promote", "first", "--reason", "best")
    do("export", "first", "--to", store.parent / "copy")
    next((store / "artifacts" / "score").glob("*/scores/*.parquet")).write_bytes(b"x")
    do("verify", code=1)
    do("gc", "--keep", "0", "--grace", "0", "--yes")
    # What only looks is not there.
    do("runs")
    do("gc")
    found = json.loads(do("history", "--json"))["events"]
    # What the run of the fixture left.
    found = found[next(i for i, e in enumerate(found) if e.get("forced")) :]
    first = ("run", found[0]["run"], "partial")
    of_first = {"pin": "pinned", "unpin": "unpinned", "promote": "champion is entry 1"}
    of_first["export"] = f"copied to {store.parent / 'copy'}"
    told = [(e["what"], e.get("run"), e["outcome"]) for e in found]
    assert told[:5] == [first, *((what, "first", outcome) for what, outcome in of_first.items())]
    assert told[5] == ("verify", None, "1 set aside") and found[6]["what"] == "gc" and len(found) == 7
    assert re.fullmatch(r"freed \d+ bytes", found[6]["outcome"])
    assert found[0]["forced"] == ["export"]
    assert found[0]["command"].startswith("rlhf rerun first --stage export --no-prefect --store ")
    lines = do("history").splitlines()
    assert re.match(r"20\d\d-.* UTC  \S+@\S+  promote  first  champion is entry 1  ", lines[-4])
    assert do("history", "--most", "1").splitlines()[0] == lines[-1]


@pytest.mark.slow
def test_a_trail_that_cannot_be_written_fails_no_run(rlhf, tmp_path):
    place = write_files(tmp_path / "store", trail="a file where the folder has to be")
    options = ["--no-prefect", "--store", place, "--only", "base"]
    assert "the trail has no entry of this run" in rlhf("run", "smoke", *options).stdout
