"""After a collection the plan of a kept run is all hits, and a policy between its stored rounds can be replayed."""

import json

import pytest

from rlhf.stages.store.artifacts import Store


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
