"""What workers share below the scratch URL goes once the data is committed; a try that fails leaves it to the next."""

import dataclasses
import json

import fsspec
import pytest

from rlhf.stages.prepare.stage import PrepareError
from rlhf.stages.store.artifacts import Store
from rlhf.stages.worker.loaded_code import SourceDiffers
from rlhf.stages.worker.process import Events, run_request
from tests.stages.prepare.support import request, write
from tests.stages.store.disturbed import Disturbed

pytestmark = pytest.mark.slow

KEY = "d" * 64
RECORDS = [{"prompt": f"p{number}", "completion": f"c{number}"} for number in range(50)]
SPLITS = {"splits": ["sft", "heldout"], "sft_fraction": 1.0}


@pytest.fixture
def prepare(tmp_path, s3):
    """Has a worker prepare records in a store, with a folder of the bucket to share; returns the events' file."""
    source = write(tmp_path / "data.jsonl", [*RECORDS, {"prompt": 3}])

    def prepare(scratch, key_parts=None, **settings):
        config = {"source": source, "runner": {"scratch": scratch}} | SPLITS | settings
        ask = dataclasses.replace(request(tmp_path, **config), key_parts=key_parts or {})
        with (tmp_path / "events").open("w") as events:
            run_request(ask, {}, Events(events))
        return [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]

    return prepare


def shared(scratch):
    """Files below a URL, of others among them."""
    fs, path = fsspec.core.url_to_fs(scratch, use_listings_cache=False)
    return {name.removeprefix(f"{path}/") for name in fs.find(path)}


def lines(events):
    return [event["line"] for event in events if event["event"] == "log"]


def begun_by_others(scratch):
    with fsspec.open(f"{scratch}/others/pieces/x", "w") as file:
        file.write("of another preparation")


@pytest.mark.parametrize("place", ["bucket", "folder"])
def test_what_workers_share_goes_behind_the_commit_and_nothing_else(prepare, s3, tmp_path, place):
    scratch = f"{s3}/kept" if place == "bucket" else str(tmp_path / "scratch")
    (tmp_path / "scratch" / "others" / "pieces").mkdir(parents=True)
    begun_by_others(scratch)
    with pytest.raises(PrepareError, match="1 of 51 records"):
        prepare(scratch, max_dead_fraction=0)
    assert [name for name in shared(scratch) if name.startswith(f"{KEY}/pieces/")]
    assert "resumed: 1 of 1 parts of the data are finished" in lines(prepare(scratch))
    assert shared(scratch) == {"others/pieces/x"}
    assert Store(str(tmp_path / "store")).get("prepare", KEY) is not None


def test_what_may_be_of_edited_code_goes_with_the_work_folder(prepare, s3, tmp_path):
    # The digest of a rule when the key was made, which is another one at the end.
    before = {"sources": {"module:rules_of_yesterday": "0" * 64}}
    with pytest.raises(SourceDiffers, match="rules_of_yesterday was edited while prepare ran"):
        prepare(f"{s3}/edited", before)
    assert shared(f"{s3}/edited") == set() and not (tmp_path / "store" / "work" / "prepare" / KEY).exists()


class Locked(Disturbed):
    """A bucket of which the credentials are for adding to it."""

    protocol = "locked"

    def rm_file(self, *arguments, **named):
        raise PermissionError("Access Denied")


def test_what_cannot_be_removed_is_told_and_fails_nothing(prepare, tmp_path):
    fsspec.register_implementation("locked", Locked, clobber=True)
    events = prepare("locked://kept")
    assert Store(str(tmp_path / "store")).get("prepare", KEY) is not None and shared("locked://kept")
    (told,) = [line for line in lines(events) if "not removed" in line]
    assert f"locked://kept/{KEY}" in told and "Access Denied" in told
