"""A cluster's runner and this machine's processes prepare the same bytes, also after a kill."""

import json
import signal
import subprocess
import sys

import fsspec
import pytest

from stages.prepare.stage import Config
from tests.stages.prepare.support import digests, write
from tests.tuning.data.run import job_server


@pytest.fixture
def settings(pairs, tmp_path):
    """Of several blocks and shards, with a copy by weight, equal records and one that is dead."""
    source = write(tmp_path / "data.jsonl", [*pairs, *pairs[:5], {"prompt": 3}])
    sources = {"sources": [{"source": source, "weight": 2}]}
    return sources | {"shards": 3, "near_duplicates": 0.9, "chunk_megabytes": 0.002}


def finished(folder):
    """The receipts of finished shards below a URL, and when each was written."""
    fs, path = fsspec.core.url_to_fs(folder, use_listings_cache=False)
    found = {name: about for name, about in fs.find(path, detail=True).items() if "-merged/" in name}
    return {name: str(about["LastModified"]) for name, about in found.items() if name.endswith(".json")}


def test_a_portable_runner_gives_the_bytes_of_this_machine(run, settings, tmp_path, s3):
    """Its workers leave their pieces in a bucket, and there the shards that they make of them."""
    metrics, out = run(Config(**settings))
    assert metrics["records"] == {"read": 66, "kept": 60, "duplicates": 5, "dropped": 0, "dead": 1}
    with job_server(tmp_path) as options:
        runner = {"name": "PortableRunner", "options": options, "scratch": f"{s3}/portable"}
        again, other = run(Config(**settings, runner=runner))
    assert digests(other) == digests(out) and again == metrics
    assert len(finished(f"{s3}/portable")) == 6 * 3


def test_a_merge_that_was_killed_goes_on_from_its_finished_shards(run, base, settings, tmp_path, s3, capsys):
    expected = digests(run(Config(**settings))[1])
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with job_server(tmp_path / "first") as options:
        runner = {"name": "PortableRunner", "options": options, "scratch": f"{s3}/killed"}
        command = [sys.executable, "-m", "tests.stages.prepare.killed", str(base.local()), str(tmp_path / "place")]
        command += [json.dumps(settings | {"runner": runner}), "4"]
        killed = subprocess.run(command, capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
        before = finished(f"{s3}/killed")
        assert 4 <= len(before) < 6 * 3
    with job_server(tmp_path / "second") as options:
        runner = {"name": "PortableRunner", "options": options, "scratch": f"{s3}/killed"}
        _, out = run(Config(**settings, runner=runner), work=tmp_path / "place" / "work")
    after = finished(f"{s3}/killed")
    assert len(after) == 6 * 3 and {name: after[name] for name in before} == before
    assert f"resumed: {len(before)} of 18 shards of the data were there" in capsys.readouterr().out
    assert digests(out) == expected
