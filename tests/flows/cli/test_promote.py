"""Names of policies by commands: promoted, listed, taken in place of a run, rolled back."""

import pytest
import typer

from rlhf.flows.cli.promote import _changed
from rlhf.stages.serving.policy import open_policy
from rlhf.stages.serving.settings import PolicyPlace
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.registry import Policy, note_decision, promote
from tests.flows.commands import typed


def invoke(*args, code: int = 0) -> str:
    return typed(*args, code=code).output


def test_a_name_is_taken_in_place_of_a_run(store):
    place = Store(str(store))
    export = place.read_json("runs", "first", "run.json")["nodes"]["export"]
    on = ("--store", store)
    assert "no names in" in invoke("champions", *on)
    assert "champion" in invoke("export", "champion", *on, code=2)
    promoted = invoke("promote", "first", *on, "--reason", "the first")
    assert promoted.startswith(f"champion 1  run first export  digest {export['digest'][:12]}")
    assert export["key"] in invoke("export", "champion", *on)
    assert "this policy already" in invoke("promote", "first", *on, code=2)
    # A policy that was trained and not exported has a name as well, but no folder.
    invoke("promote", "first", *on, "--node", "sft")
    assert "not an exported folder" in invoke("export", "champion", *on, code=2)
    assert "back to 1" in invoke("rollback", *on, "--reason", "it forgot")
    assert export["key"] in invoke("export", "champion", *on)
    listed = invoke("champions", *on).splitlines()
    assert [line.split("  ")[0] for line in listed] == ["champion 3", "champion 2", "champion 1"]
    assert listed[0].endswith("(it forgot)") and listed[2].endswith("(the first)")
    assert "no entry 9" in invoke("rollback", *on, "--to", 9, code=2)


def test_a_policy_that_the_gate_has_refused_has_a_name_by_force_though_nothing_was_exported(store):
    place = Store(str(store))
    record = place.read_json("runs", "first", "run.json")
    policy = record["nodes"]["round-002.update"]
    record["nodes"]["export"] = {k: record["nodes"]["export"][k] for k in ("stage", "key")} | {"state": "refused"}
    refused = {"decision": "refused", "candidate": policy["digest"], "name": "champion", "reasons": ["too long"]}
    place.write_json(record | {"status": "refused", "decision": refused}, "runs", "first", "run.json")
    note_decision(place, "champion", policy["digest"], "the gate of run first has refused this policy: too long")
    on = ("--store", store)
    told = invoke("promote", "first", *on, code=2)
    assert "the gate of run first has refused this policy: too long; --force promotes it anyway" in told
    # The decision outlives the run that has made it.
    place.write_json(record | {"name": "same"}, "runs", "same", "run.json")
    place.remove_folder(place.join("runs", "first"))
    assert "the gate of run first has refused this policy: too long" in invoke(
        "promote", "same", "--node", "round-002.update", *on, code=2
    )
    promoted = invoke("promote", "same", "--node", "round-002.update", *on, "--force")
    assert promoted.startswith(f"champion 1  run same round-002.update  digest {policy['digest'][:12]}")
    assert "forced past its gate" in promoted


def test_servers_that_follow_are_promised_a_policy_of_their_base_alone(store):
    place, on = Store(str(store)), ("--store", store)
    assert "--follow` loads it within half a minute" in invoke("promote", "first", *on)
    assert "--follow` loads it within half a minute" in invoke("promote", "first", "--node", "sft", *on)
    first = place.read_json("registry", "champion", "000001.json")
    other = first["policy"] | {"base": "f" * 64, "digest": "e" * 64}
    place.write_json(first | {"number": 3, "policy": other, "previous": 2}, "registry", "champion", "000003.json")
    said = "its base model differs from the previous entry's: restart the servers of champion, also with --follow"
    for args in (("rollback", "--to", 1), ("promote", "first", "--node", "sft")):
        assert (said in invoke(*args, *on)) == (args[0] == "rollback")


def test_a_name_keeps_its_policy_where_the_run_names_another_by_now(store):
    place = Store(str(store))
    invoke("promote", "first", "--store", store)
    record = place.read_json("runs", "first", "run.json")
    kept = record["nodes"]["export"]["key"]
    record["nodes"]["export"] |= {k: record["nodes"]["sft"][k] for k in ("stage", "key", "digest")}
    place.write_json(record, "runs", "first", "run.json")
    assert kept in invoke("export", "champion", "--store", store)


def test_a_policy_whose_bytes_have_changed_leaves_the_store_by_no_command(store, tmp_path):
    place = Store(str(store))
    record = place.read_json("runs", "first", "run.json")["nodes"]
    export = place.get("export", record["export"]["key"])
    path = export.local() / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said = "model.safetensors has checksum"
    for command in (("export", "first", "--to", tmp_path / "out"), ("promote", "first")):
        assert said in invoke(*command, "--store", store, code=2)
    assert not (tmp_path / "out").exists()
    assert "no names in" in invoke("champions", "--store", store)
    opened = PolicyPlace(
        store=str(store), stage="export", key=export.key, digest=export.digest, base=record["base"]["key"]
    )
    with pytest.raises(SystemExit, match=said):
        open_policy(opened)


def test_a_pin_or_a_name_that_comes_too_late_for_a_collection_says_so(store, capsys):
    place, on = Store(str(store)), ("--store", store)
    nodes = place.read_json("runs", "first", "run.json")["nodes"]
    assert "gone" not in invoke("pin", "first", *on)
    place.remove_folder(place.join("artifacts", "export", nodes["export"]["key"]))
    assert f"! 1 of its {len(nodes)} artifacts are gone" in invoke("pin", "first", *on)
    policy = Policy("first", "export", "export", nodes["export"]["key"], nodes["export"]["digest"], "b", "b")
    with pytest.raises(typer.Exit):
        _changed(place, "promote", "champion", promote(place, "champion", policy, ""))
    assert "the policy is gone: `rlhf gc` deletes it" in capsys.readouterr().err
