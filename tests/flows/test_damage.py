"""What a disk has changed without changing a size is made again before anything is made of it; what a kill has left
behind a commit is removed."""

import shutil
import time

import pytest

from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.running.session import Session
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.leases import this_process


@pytest.mark.slow
def test_a_changed_byte_in_an_input_is_found_before_a_stage_reads_it(store, record, capsys):
    nodes = record(store, "first")["nodes"]
    place = Store(str(store))
    base = place.get("base", nodes["base"]["key"])
    path = base.local("model") / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    shutil.rmtree(store / "artifacts" / "prepare")

    run = Session(load_recipe("smoke", sets=[f"store={store}"]), ConsoleReporter(), "again")
    try:
        assert run.run_node("base")[0] == "hit"
        state, prepared = run.run_node("prepare")
    finally:
        run.finish("failed")
    assert (state, prepared.digest) == ("made", nodes["prepare"]["digest"])
    assert run.record["nodes"]["base"]["state"] == "made"
    assert run.made["base"].digest == nodes["base"]["digest"]
    assert place.verify(place.get("base", nodes["base"]["key"])) is None
    out = " ".join(capsys.readouterr().out.split())
    assert "! base: " in out and "model.safetensors has checksum" in out and "computed again" in out


def test_work_and_the_lease_that_a_kill_just_after_a_commit_has_left_are_removed(store, record):
    nodes = record(store, "first")["nodes"]
    others = ("base", "prepare")
    for stage in others:
        (store / "work" / stage / nodes[stage]["key"] / "checkpoints").mkdir(parents=True)
        gone = {"token": "a" * 32, "beat": time.time()} | this_process() | {"started": 1.0}
        Store(str(store)).write_json(gone, "leases", f"{stage}-{nodes[stage]['key']}.json")
    run = Session(load_recipe("smoke", sets=[f"store={store}"]), ConsoleReporter(), "again")
    for stage in others:
        assert run.run_node(stage)[0] == "hit"
        assert not (store / "work" / stage / nodes[stage]["key"]).exists()
    assert list((store / "leases").iterdir()) == []
    run.finish("failed")
