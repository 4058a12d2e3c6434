"""The champion is what was better on the same problems: a run promotes its policy, is refused, or has nothing new.

Policies are better or worse by what their data teaches. Nothing moves the name but a decision that was made about the
policy that it stands for.
"""

import dataclasses
import json
import subprocess

import pytest

from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.report.terminal import LastingConsole
from rlhf.flows.running.closing import close, status_at_end
from rlhf.flows.running.runner import stages_of
from rlhf.flows.running.session import Session
from rlhf.stages.store import registry
from tests.flows.nights import BAD, GOOD, Nights, records, states
from tests.flows.prefect_server import prefect_server
from tests.support import RLHF, until, write_files

pytestmark = pytest.mark.slow


def test_better_is_promoted_the_same_is_nothing_new_and_worse_is_refused(tmp_path, rlhf, rlhf_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nights = Nights(tmp_path, rlhf)
    first = nights.run("first")
    assert first["status"] == "finished" and first["decision"]["decision"] == "promoted"
    assert first["decision"]["entry"] == 1 and first["decision"]["difference"]["low"] > 0
    entry = registry.current(nights.store, "champion")
    assert entry.policy.node == "export" and entry.policy.digest == first["nodes"]["export"]["digest"]
    assert entry.policy.trained == first["nodes"]["sft"]["digest"] == first["decision"]["candidate"]
    assert entry.reason.startswith("run first, the first: score +")

    again = nights.run("again")
    assert again["status"] == "nothing new" and nights.champion() == "1 first"
    # Also the champion's evaluation is that of the first night.
    assert states(again, "made") == {"gate"}

    nights.has(records(32, BAD))
    worse = nights.run("worse", code=3)
    assert worse["status"] == "refused" and nights.champion() == "1 first"
    assert worse["nodes"]["export"]["state"] == "refused" and "digest" not in worse["nodes"]["export"]
    assert "the lower end is not above 0" in worse["decision"]["reasons"][0]
    for text in (f"worse  refused  {worse['started']}", "refused: score -"):
        assert text in rlhf_here("show", "worse", "--store", nights.url).stdout
    on = ("--store", nights.url)
    assert "its gate has refused the policy" in rlhf_here("export", "worse", *on, code=2).stderr
    assert "--force" in rlhf_here("promote", "worse", *on, "--node", "sft", code=2).stderr
    forced = rlhf_here("promote", "worse", *on, "--node", "sft", "--force").stdout
    assert "forced past its gate" in forced and registry.current(nights.store, "champion").forced
    assert "run worse is at its end (refused)" in rlhf_here(*nights.arguments("worse"), code=2).stderr


def test_nights_with_growing_data(tmp_path, rlhf):
    of = {"start_from": "champion", "gate": {"guards": {"truncated": {"rise": 0.5}}}}
    nights = Nights(
        tmp_path, rlhf, **of, data={"source": "records.jsonl", "system_prompt": None, "new_since": "champion"}
    )
    day1, day2 = records(11, GOOD), records(64, GOOD, 100)
    nights.has(day1)
    one = nights.run("one")
    assert one["decision"]["decision"] == "promoted" and "start" not in one["nodes"]
    nights.has([*day1, *day2])
    two = nights.run("two")
    assert two["decision"]["decision"] == "promoted" and nights.champion() == "2 two"
    assert two["nodes"]["start"]["metrics"]["trained"] == 11
    assert two["nodes"]["fresh"]["metrics"] == {"rows": {"sft": 64}, "trained": {"sft": 11}}
    three = nights.run("three")
    assert three["status"] == "nothing new" and nights.champion() == "2 two"
    assert set(three["nodes"]) == {"base", "prepare", "start", "fresh"}
    assert three["decision"]["reasons"] == ["the data has no new rows for sft"]
    # What the champion of before was trained on is known by way of the one that started from it.
    assert three["nodes"]["start"]["metrics"]["trained"] == 75
    nights.has([*day1, *day2, *records(32, BAD, 300)])
    four = nights.run("four", code=3)
    assert four["nodes"]["fresh"]["metrics"]["rows"] == {"sft": 32} and nights.champion() == "2 two"
    assert "refused" in rlhf("runs", "--store", nights.url).stdout
    assert "laws are broken" not in rlhf("audit", "four", "--store", nights.url).stdout
    # Refused data was not trained on by the champion: the next night may try it again, with other settings.
    five = nights.run("five", "--set", "sft.optimizer.learning_rate=1e-9", code=3)
    assert five["nodes"]["fresh"]["state"] == "hit"


def test_a_kill_between_decision_and_promotion_costs_nothing(tmp_path, rlhf):
    nights = Nights(tmp_path, rlhf)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([RLHF, *nights.arguments("k")], stdout=log, stderr=log, cwd=tmp_path)
        # The record says so when the export begins, before the name moves.
        until(lambda: (nights.store.read_json("runs", "k", "run.json") or {}).get("decision"), 240, 0.002)
        process.kill()
        process.wait()
    assert nights.champion() == "none" and nights.record("k")["status"] == "running"
    record = nights.run("k")
    assert record["decision"]["entry"] == 1 and nights.champion() == "1 k" and record["tries"] == 2
    assert states(record, "made") <= {"export"}


def test_a_policy_that_was_taken_back_is_not_promoted_from_the_cache(tmp_path, rlhf):
    nights = Nights(tmp_path, rlhf, gate={"first": "promote"})
    nights.run("weak", "--set", "sft.epochs=1", "--set", "sft.optimizer.learning_rate=1e-6")
    nights.run("strong")
    assert nights.champion() == "2 strong"
    rlhf("rollback", "--store", nights.url, "--reason", "it is rude")
    assert nights.champion() == "3 weak"
    again = nights.run("again", code=3)
    assert states(again, "made") == {"gate"} and nights.champion() == "3 weak"
    (reason,) = again["decision"]["reasons"]
    assert "taken back before" in reason and "entry 3" in reason and "it is rude" in reason
    # By hand it can be, and then the same recipe has nothing new.
    assert "taken back before" in rlhf("promote", "strong", "--store", nights.url, code=2).stderr
    rlhf("promote", "strong", "--store", nights.url, "--force")
    assert nights.run("after")["status"] == "nothing new"


def test_it_is_decided_again_where_the_champion_has_changed_meanwhile(tmp_path, rlhf):
    nights = Nights(tmp_path, rlhf)
    nights.run("good")
    good = registry.current(nights.store, "champion").policy
    rlhf("promote", "good", "--store", nights.url, "--node", "base")
    nights.has([*records(32, GOOD), *records(8, GOOD, 500)])
    recipe = load_recipe(str(nights.folder / "night.yaml"), sets=[f"data.source={tmp_path / 'records.jsonl'}"])
    session = Session(recipe, ConsoleReporter(LastingConsole(file=(tmp_path / "out").open("w"))), "late")
    made = []
    for node in stages_of(session):
        if node.name == "export" and made.count("gate") == 1:
            assert session.record["decision"]["decision"] == "promoted"
            registry.promote(nights.store, "champion", good, "by hand, at the same moment")
        session.run_node(node.name)
        made.append(node.name)
    status = status_at_end(session)
    close(session, status)
    # As good as the new champion is not better.
    assert status == "refused" and nights.champion() == "3 good"
    assert made.count("gate") == 2 and made.count("sft") == 1 and made.count("evaluate.champion") == 2
    assert nights.record("late")["nodes"]["export"]["state"] == "refused"
    assert "decided again" in (tmp_path / "out").read_text()


def test_prefect_tells_the_ends_of_nights_apart(tmp_path, rlhf):
    nights = Nights(tmp_path / "nights", rlhf)
    with prefect_server(tmp_path) as prefect:
        seen = []
        for name, code, rows in (("one", 0, GOOD), ("two", 0, GOOD), ("three", 3, BAD)):
            nights.has(records(32, rows))
            arguments = [word for word in nights.arguments(name) if word != "--no-prefect"]
            rlhf(*arguments, code=code, cwd=nights.folder, env=prefect.env)
            run = prefect.flow_run(name)
            seen.append((run["state_type"], run["state_name"]))
            rows = json.loads(prefect.artifacts(run)["night-gate"]["data"])
            assert [row["check"] for row in rows] == ["min_difference", "audit"]
        assert seen == [("COMPLETED", "Promoted"), ("COMPLETED", "Nothing new"), ("COMPLETED", "Refused")]


def test_a_champion_of_another_tokenizer_or_one_that_is_gone_is_told_before_any_training(tmp_path, rlhf):
    nights = Nights(tmp_path, rlhf)
    first = nights.run("first")
    place, champion = nights.store, registry.current(nights.store, "champion").policy
    files = dict.fromkeys(("config.json", "tokenizer__tokenizer.json", "model__config.json"), "{}")
    base = write_files(tmp_path / "base", **files)
    made = place.commit(base, {"stage": "base", "key": "f" * 64, "inputs": {}, "config": {}, "metrics": {}})
    foreign = dataclasses.replace(champion, base=made.key, base_digest=made.digest)
    registry.promote(place, "foreign", foreign, "of another base")
    nights.has(records(40, GOOD))
    more = ("--set", "gate.name=foreign")
    said = rlhf(*nights.arguments("second", *more), code=1, cwd=tmp_path).stderr
    assert "foreign (run first) has another tokenizer than base.source random:tiny" in said
    assert set(nights.record("second")["nodes"]) == {"base"}
    place.set_aside("sft", first["nodes"]["sft"]["key"])
    said = rlhf(*nights.arguments("third"), code=2, cwd=tmp_path).stderr
    assert "the policy of champion (run first, entry 1) is gone" in said and "rlhf rollback" in said
