"""Which runs a collection keeps: the newest of each recipe, and those that are running, pinned, named or taken from."""

import datetime
import json
import threading

import pytest

from rlhf.flows.recipe.retention import Retention
from rlhf.flows.retention import roots_of
from rlhf.stages.store.artifacts import ArtifactError, Store
from rlhf.stages.store.collect import Limits, collect
from rlhf.stages.store.leases import this_process
from rlhf.stages.store.pins import pin
from rlhf.stages.store.registry import Policy, promote
from tests.stages.store.graphs import put


@pytest.fixture
def store(tmp_path):
    """Runs r0 (oldest, 9 days ago) to r9 of the recipes a (even) and b (odd); all are finished."""
    place = Store(str(tmp_path))
    for i in range(10):
        write(place, i)
    return place


def write(store, i, status="finished", **recipe):
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9 - i)
    value = {
        "name": f"r{i}",
        "recipe": {"name": "ab"[i % 2], "rl": None} | recipe,
        "status": status,
        "started": began.isoformat(),
        "process": this_process(),
        "nodes": {
            "sft": {"stage": "sft", "key": f"k{i}", "digest": f"d{i}", "state": "made"},
            "update": {"stage": "update", "key": f"u{i}", "state": "failed"},
        },
    }
    store.write_json(value, "runs", f"r{i}", "run.json")


def kept(store, keep, days=None, recipe=None):
    return {run.name for run in roots_of(store, Retention(keep=keep, keep_days=days), recipe).runs if run.why}


def test_the_newest_of_each_recipe_and_those_of_the_last_days_stay(store):
    assert kept(store, 1) == {"r8", "r9"} and kept(store, 2) == {"r6", "r7", "r8", "r9"} and kept(store, 0) == set()
    assert kept(store, 0, 3.5) == {"r6", "r7", "r8", "r9"}
    assert kept(store, 1, recipe="b") == {"r0", "r2", "r4", "r6", "r8", "r9"}


def test_a_run_that_was_killed_is_as_old_as_its_record(store):
    record = store.read_json("runs", "r3", "run.json")
    now = datetime.datetime.now(datetime.UTC)
    store.write_json(record | {"saved": now.isoformat()}, "runs", "r3", "run.json")
    ages = {run.name: now.timestamp() - run.ended for run in roots_of(store, Retention(keep=1)).runs}
    assert abs(ages["r3"]) < 1 and ages["r4"] > 86400


def test_unfinished_runs_do_not_push_out_finished_ones(store):
    write(store, 8, "failed")
    assert kept(store, 1) == {"r6", "r8", "r9"}


def test_running_pinned_and_named_runs_and_those_taken_from_stay(store):
    write(store, 0, "running")
    pin(store, "r1")
    for run in ("r5", "r2"):
        promote(store, "champion", Policy(run, "sft", "sft", "k", f"digest of {run}", "k", "base"), "")
    write(store, 9, rl={"rollouts_from": "r3"})
    write(store, 3, rl={"rollouts_from": "r4"})
    found = {run.name: run for run in roots_of(store, Retention(keep=1)).runs}
    assert {n for n, run in found.items() if run.why} == {f"r{i}" for i in (0, 1, 2, 3, 4, 5, 8, 9)}
    assert [n for n, run in found.items() if run.active] == ["r0"]
    assert found["r9"].refs == (("sft", "k9", "d9"), ("update", "u9", ""))
    assert found["r9"].pending == {("update", "u9")}


def test_nothing_is_collected_past_a_record_that_cannot_be_read(store):
    store.write_bytes(b"{half", "runs", "r5", "run.json")
    with pytest.raises(ArtifactError, match="r5"):
        roots_of(store, Retention(keep=1))


@pytest.mark.slow
def test_the_command_shows_first_deletes_when_told_and_keeps_what_is_pinned(store, rlhf):
    rlhf("pin", "r3", "--store", store.root, "--note", "of the paper")
    shown = rlhf("gc", "--store", store.root, "--keep", 1, "--grace", 0, "--dry-run").stdout
    assert "pinned: of the paper" in shown and "7 runs" in shown and "nothing was deleted" in shown
    assert len(store.names("runs")) == 10
    done = json.loads(rlhf("gc", "--store", store.root, "--keep", 1, "--grace", 0, "--yes", "--json").stdout)
    assert done["done"] and store.names("runs") == ["r3", "r8", "r9"] == sorted(n for n, w in done["runs"].items() if w)


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_of_a_host_whose_clock_is_wrong_lives_as_long_as_it_gives_signs_of_life(tmp_path, alive):
    store = Store(str(tmp_path))
    made = put(store, 1)
    behind = datetime.timedelta(hours=2)
    process = {"pid": 77, "started": 5.0, "host": "elsewhere boot pid:[1]"}

    def save():
        now = (datetime.datetime.now(datetime.UTC) - behind).isoformat()
        node = {"stage": made.stage, "key": made.key, "digest": made.digest, "state": "made"}
        value = {"name": "far", "recipe": {"name": "r"}, "status": "running", "started": now, "saved": now}
        store.write_json(value | {"process": process, "nodes": {made.stage: node}}, "runs", "far", "run.json")

    save()
    ended = threading.Event()

    def saves():
        while not ended.wait(0.1):
            save()

    thread = threading.Thread(target=saves)
    if alive:
        thread.start()
    try:
        limits = Limits(grace_seconds=-60.0, settle_seconds=0.0, sign_seconds=1.0)
        done = collect(store, lambda: roots_of(store, Retention(keep=0)), limits)
    finally:
        ended.set()
        if alive:
            thread.join()
    assert done.runs == ([] if alive else ["far"])
    assert (store.get(made.stage, made.key) is not None, store.names("runs")) == (alive, ["far"] if alive else [])


@pytest.mark.slow
def test_a_kept_run_is_all_hits_and_can_be_replayed_after_a_collection(store, rlhf, record):
    other = ["--set", f"store={store}", "--set", "sft.optimizer.learning_rate=0.002"]
    rlhf("run", "smoke", "--no-prefect", "--name", "second", *other)
    place = Store(str(store))
    before = set(place.all_keys())
    done = json.loads(rlhf("gc", "--store", store, "--keep", 1, "--grace", 0, "--yes", "--json").stdout)
    assert place.names("runs") == ["second"] and done["freed_bytes"] > 0
    kept = {(e["stage"], e["key"]) for e in record(store, "second")["nodes"].values()}
    assert set(place.all_keys()) == kept < before
    assert "0 miss, 0 wait" in rlhf("plan", "smoke", *other).stdout
    assert not place.get(*entry(record, store, "round-000.update")).has("state/")
    again = rlhf("rerun", "second", "--store", store, "--stage", "round-001.update", "--no-prefect").stdout
    assert "replaying the update of round 0 from its stored rollouts" in again
    assert "the output is the same as before" in again
    assert "0 damaged" in rlhf("verify", "--store", store).stdout


def entry(record, store, node):
    found = record(store, "second")["nodes"][node]
    return found["stage"], found["key"]
