"""The same recipe on four devices: parameters cut over them, the same keys, the same losses."""

import os

import pytest

from tests.support import with_devices

pytestmark = pytest.mark.slow


def test_four_devices_find_what_one_finds(rlhf, smoke_store, tmp_path, record):
    environment = with_devices(4, os.environ["XLA_FLAGS"])
    rlhf("run", "smoke", "--no-prefect", "--name", "four", "--set", f"store={tmp_path}", env=environment)
    one, four = record(smoke_store, "first")["nodes"], record(tmp_path, "four")["nodes"]
    assert one.keys() == four.keys() and all(node["state"] == "made" for node in four.values())
    assert one["sft"]["key"] == four["sft"]["key"]
    for name, metric in [("sft", "loss"), ("reward", "loss"), ("reward", "heldout_accuracy")]:
        assert four[name]["metrics"][metric] == pytest.approx(one[name]["metrics"][metric], abs=1e-4), name
