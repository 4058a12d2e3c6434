"""The graph of a gate: the champion is evaluated as the run's policies are, and the decision reads all of the run."""

import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.graph.policy_refs import Held, Standing, recorded
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe

CHAMPION = Held("champion", 3, "before", "update", "k" * 64, "d" * 64, "b" * 64, "e" * 64)
STANDING = Standing(start=CHAMPION, champion=CHAMPION, withdrawn={"f" * 64: "entry 2"})


def graph(*sets, standing=Standing()):  # noqa: B008 (frozen)
    return {n.name: n for n in build(load_recipe("smoke", sets=["gate={}", *sets]), standing)}


def inputs(node):
    return {name: source.node for name, source in node.inputs.items() if not name.startswith("node_")}


def test_the_first_policy_is_compared_with_one_of_the_run():
    nodes = graph()
    assert inputs(nodes["gate"]) == {
        "candidate": "evaluate.rl", "policy": "round-002.update", "data": "prepare", "against": "evaluate.base"
    }  # fmt: skip
    assert inputs(graph("gate.first=sft")["gate"])["against"] == "evaluate.sft"
    assert "against" not in inputs(graph("gate.first=promote")["gate"])
    # All that the audit looks at; an export is behind the gate.
    seen = {source.node for name, source in nodes["gate"].inputs.items() if name.startswith("node_")}
    assert seen == set(nodes) - {"gate", "export"}
    assert list(nodes)[-2:] == ["gate", "export"]
    assert len(graph("gate.audit=false")["gate"].inputs) == 4


def test_the_champion_is_taken_as_it_is_and_evaluated_as_the_others_are():
    nodes = graph(standing=Standing(champion=CHAMPION))
    assert nodes["champion"].held == ("update", "k" * 64, "d" * 64) and not nodes["champion"].inputs
    one, other = nodes["evaluate.champion"], nodes["evaluate.rl"]
    assert (one.config, one.seed) == (other.config, other.seed)
    assert inputs(one) == inputs(other) | {"policy": "champion"}
    assert inputs(nodes["gate"]) | {"data": ""} == {
        "candidate": "evaluate.rl", "policy": "round-002.update", "against": "evaluate.champion",
        "champion": "champion", "data": "",
    }  # fmt: skip
    # What does not read the champion is as it is without one.
    alone = graph()
    assert {n for n in alone if alone[n] != nodes[n]} == {"gate"}


def test_training_starts_from_the_champion_where_there_is_one():
    sets = ("start_from=champion", "data.new_since=champion")
    assert "start" not in graph(*sets)
    nodes = graph(*sets, standing=STANDING)
    assert nodes["start"].config.digest == "d" * 64
    assert inputs(nodes["sft"]) == {"base": "start", "data": "fresh", "tokenizer": "base"}
    assert inputs(nodes["fresh"]) == {"data": "prepare", "start": "start"}
    assert inputs(nodes["reward"])["base"] == "base"
    # The start is the champion: it is evaluated once.
    assert [n for n in nodes if n.startswith("evaluate")] == [
        f"evaluate.{label}" for label in ("base", "champion", "sft", "rl")
    ]
    without = graph(*sets, "sft=null", standing=STANDING)
    assert inputs(without["round-000.rollout"])["policy"] == "start"
    assert inputs(graph(sets[0], standing=STANDING)["sft"])["data"] == "prepare"


def test_a_choice_among_rounds_counts_as_so_many_candidates():
    choice = ("evaluate.every=1", "evaluate.load_best_model_at_end=true")
    assert graph(*choice)["gate"].config.candidates == 3
    assert graph()["gate"].config.candidates == 1
    assert graph(*choice)["gate"].config.level == pytest.approx(0.025 / 3)
    with pytest.raises(RecipeError, match=r"gate.confidence 0.9999 asks for an interval whose tails"):
        graph(*choice, "gate.confidence=0.9999")


def test_a_record_tells_what_the_run_has_found():
    assert recorded({"standing": STANDING.as_json()}) == STANDING
    assert recorded({}) == Standing()
