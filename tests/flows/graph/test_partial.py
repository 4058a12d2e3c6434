"""Which stage samples the rounds of a recipe that carries completions, and how old their tokens may become."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest

from flows.graph.build import build
from flows.graph.changes import setting
from flows.graph.keying import key_parts
from flows.graph.taken import _check_sampling
from flows.recipe.fork import Fork, check_fork
from flows.recipe.model import RL, RecipeError
from flows.recipe.reading import load_recipe
from stages.store.artifacts import Artifact, ArtifactError, Store
from stages.store.keys import config_content, differences

CARRY = "rl.partial={round_tokens: 3}"


def graph(*sets: str) -> dict[str, Any]:
    return {n.name: n for n in build(load_recipe("smoke", sets=list(sets)))}


def rollouts(nodes: dict[str, Any]) -> list[Any]:
    return [node for name, node in nodes.items() if name.endswith(".rollout")]


def test_each_round_reads_what_the_one_before_has_left_and_the_last_leaves_nothing():
    nodes = graph(CARRY)
    found = rollouts(nodes)
    assert [node.stage for node in found] == ["partial"] * 3
    assert [node.config.round_tokens for node in found] == [3, 3, None]
    carried = [node.inputs.get("carried") for node in found]
    assert carried[0] is None
    assert [(one.node, one.parts) for one in carried[1:]] == [
        (f"round-00{i}.rollout", ("carried/", "segments/")) for i in (0, 1)
    ]
    assert [nodes[f"round-00{i}.update"].config.off_policy for i in range(3)] == [False, True, True]


def test_completions_begin_with_the_random_numbers_and_prompts_of_whole_rounds():
    mine, whole = rollouts(graph(CARRY)), rollouts(graph())
    assert [(n.seed, n.config.order_seed, n.config.prompts) for n in mine] == [
        (n.seed, n.config.order_seed, n.config.prompts) for n in whole
    ]


def test_a_recipe_that_carries_nothing_has_the_stages_and_settings_that_it_had():
    for node in rollouts(graph()):
        assert node.stage == "rollout" and "round_tokens" not in type(node.config).model_fields
        parts = key_parts(node, {}, partial=True)
        # The code of carried completions is no part of its key.
        assert not [name for name in parts["code"] if "carried" in name or "segments" in name or "partial" in name]


@pytest.mark.parametrize(
    ("sets", "bound", "lags"),
    [
        # 8 tokens in pieces of 3 take three rounds.
        ([], 2, [0, 0, 0]),
        (["rl.staleness=1"], 3, [0, 1, 1]),
        (["rl.partial.max_lag=1"], 1, [0, 0, 0]),
        (["rl.rollout.max_tokens=9"], 2, [0, 0, 0]),
        (["rl.rollout.max_tokens=10"], 3, [0, 0, 0]),
    ],
)
def test_the_bound_on_lag_counts_staleness(sets, bound, lags):
    found = rollouts(graph(CARRY, *sets))
    assert {node.config.max_lag for node in found} == {bound}
    assert [node.config.lag for node in found] == lags


def idle(*sets: str) -> list[int]:
    nodes = graph("rl.rounds=8", *sets)
    return [node.config.max_idle_rounds for node in nodes.values() if node.stage == "update"]


def test_rounds_in_which_the_first_completions_are_under_way_are_no_idle_ones():
    limit = load_recipe("smoke").rl.update.max_idle_rounds
    assert limit == 3 and idle() == [3] * 8
    # With two rounds before the first that counts, round 4 is the third that does.
    assert idle(CARRY) == idle(CARRY, "rl.staleness=1") == [4] + [5] * 3 + [3] * 4
    assert idle(CARRY, "rl.partial.max_lag=1") == [4] * 3 + [3] * 5
    assert idle(CARRY, "rl.update.max_idle_rounds=1") == [2, 3] + [1] * 6
    # The last round, which carries nothing, counts; those before it do no more than they did.
    assert idle(CARRY, "rl.rounds=4") == [4, 5, 5, 5]
    assert idle(CARRY, "rl.rounds=2") == [4, 4]


@pytest.mark.parametrize(("of", "limits"), [("null", [4, 5, 5, 5, 3, 3, 3, 3]), ("{round_tokens: 3}", [4, 5, 5, 5])])
def test_rounds_before_a_fork_count_no_more_behind_it(of, limits):
    before = load_recipe("smoke", sets=[CARRY, "rl.rounds=8"]).rl
    assert before is not None
    part = {"until": 2, "rl": before.model_dump(mode="json")}
    fork = {"run": "first", "node": "round-001.update", "digest": "a" * 64, "earlier": [part]}
    recipe = load_recipe("smoke", sets=[f"rl.partial={of}", f"rl.rounds={len(limits)}"])
    nodes = build(recipe.model_copy(update={"fork": Fork.model_validate(fork)}))
    assert [node.config.max_idle_rounds for node in nodes if node.stage == "update"] == limits


def test_rounds_behind_a_fork_go_on_with_what_those_before_it_have_left():
    before = load_recipe("smoke", sets=[CARRY]).rl
    assert before is not None
    part = {"until": 2, "rl": before.model_dump(mode="json")}
    fork = {"run": "first", "node": "round-001.update", "digest": "a" * 64, "earlier": [part]}

    def forked(*sets: str) -> list[Any]:
        recipe = load_recipe("smoke", sets=list(sets))
        return rollouts({n.name: n for n in build(recipe.model_copy(update={"fork": Fork.model_validate(fork)}))})

    found = forked("rl.rounds=4")
    assert [node.stage for node in found] == ["partial", "partial", "partial", "rollout"]
    assert [node.config.round_tokens for node in found[:3]] == [3, 3, None]
    assert found[2].inputs["carried"].node == "round-001.rollout" and found[2].config.max_lag == 2
    # One that carries from there on has nothing to go on with, where the rounds before it carried nothing.
    part["rl"] = load_recipe("smoke").rl.model_dump(mode="json")
    assert "carried" not in forked(CARRY, "rl.rounds=4")[2].inputs
    # The last round of the run that is shared has left nothing, also where the fork is longer.
    part["rl"], part["until"] = before.model_dump(mode="json"), 3
    fork["node"] = "round-002.update"
    longer = forked(CARRY, "rl.rounds=5")
    assert [node.config.round_tokens for node in longer] == [3, 3, None, 3, None]
    assert ["carried" in node.inputs for node in longer] == [False, True, True, False, True]


def test_a_fork_that_carries_no_more_may_be_as_stale_as_it_says():
    before = load_recipe("smoke", sets=[CARRY, "rl.partial.max_lag=1"])
    assert before.rl is not None
    part = {"until": 2, "rl": before.rl.model_dump(mode="json")}
    fork = {"run": "first", "node": "round-001.update", "digest": "a" * 64, "earlier": [part]}
    recipe = load_recipe("smoke", sets=["rl.rounds=4", "rl.staleness=2"])
    recipe = recipe.model_copy(update={"fork": Fork.model_validate(fork)})
    first = rollouts({n.name: n for n in build(recipe)})[2]
    assert (first.stage, first.config.round_tokens, first.config.lag) == ("partial", None, 2)
    assert first.config.max_lag == 2


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["rl.partial={round_tokens: 8}"],
            "partial.round_tokens 8 is not below rollout.max_tokens 8: every completion",
        ),
        (["rl.partial={round_tokens: 0}"], "greater than or equal to 1"),
        (["rl.partial.max_lag=2", "rl.staleness=2"], "partial.max_lag 2 is not above staleness 2, which counts too"),
        (["rl.refills=1"], "refills replace groups of their round .*: leave refills or partial out"),
        (["rl.update={algorithm: remax}"], "update.algorithm remax compares with greedy completions"),
        (
            ["rl.rollout.engine={kind: vllm, version: '1', url: 'http://host:8000'}"],
            "partial needs the engine in the worker: vllm servers cannot go on .* leave out rollout.engine, or partial",
        ),
        (
            ["rl.rollout.engine={kind: native, version: '1', url: 'http://host:8000'}"],
            "in the worker: native servers cannot go on .*; leave out rollout.engine.url, or partial",
        ),
        (["environment={name: guess}"], "rl.partial carries completions of one turn, and with the section environment"),
        (["rl.partial={round_token: 3}"], "did you mean round_tokens"),
    ],
)
def test_what_cannot_be_carried_is_refused_with_the_fields_and_what_to_do(sets, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("smoke", sets=[CARRY, *sets])


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["rl.rollout.max_tokens=9"], "rl.rollout.max_tokens is 9, and 8 in the shared rounds, which have left"),
        (["rl.rollout.temperature=0.5"], "rl.rollout.temperature is 0.5, and 1.0 in the shared rounds"),
        (["rl.partial=null", "rl.refills=1"], "no round with rl.refills, greedy baselines or an engine of servers"),
    ],
)
def test_a_fork_that_could_not_go_on_with_what_is_carried_is_refused(sets, message):
    from flows.recipe.partial import check_going_on

    before, now = (load_recipe("smoke", sets=[CARRY, *more]).rl for more in ([], sets))
    assert isinstance(before, RL) and isinstance(now, RL)
    with pytest.raises(ValueError, match=message):
        check_going_on(now, before)


@pytest.mark.parametrize(("shared", "refused"), [(2, True), (3, False)])
def test_behind_the_last_round_of_a_run_nothing_is_under_way(shared, refused):
    before = load_recipe("smoke", sets=[CARRY]).rl
    now = load_recipe("smoke", sets=[CARRY, "rl.rounds=5", "rl.rollout.max_tokens=9"]).rl
    assert before is not None and before.rounds == 3
    part = {"until": shared, "rl": before.model_dump(mode="json")}
    node = f"round-00{shared - 1}.update"
    fork = Fork.model_validate({"run": "first", "node": node, "digest": "a" * 64, "earlier": [part]})
    with pytest.raises(ValueError, match="have left completions under way") if refused else nullcontext():
        check_fork(fork, now, before)


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (["rl.rollout.temperature=0.9"], "rl.rollout.temperature: 1.0 -> 0.9"),
        (["rl.partial.round_tokens=4", "rl.partial.max_lag=2"], "rl.partial.round_tokens: 3 -> 4"),
        (["rl.partial.max_lag=1"], "rl.partial.max_lag: 2 -> 1"),
        (["rl.staleness=1", "rl.partial.max_lag=2"], "rl.staleness: 0 -> 1"),
    ],
)
def test_a_setting_of_rounds_that_carry_is_named_by_its_place_in_the_recipe(tmp_path, sets, told):
    first, other = (graph(CARRY, *more)["round-001.rollout"] for more in ([], sets))
    changed = differences(config_content(first.config), config_content(other.config))
    assert [setting(other.stage, line) for line in changed] == [told]
    made = Artifact(Store(str(tmp_path)), {"config": first.config.model_dump(mode="json"), "digest": "a" * 64})
    with pytest.raises(ArtifactError, match=f"^{told}: the rollouts are those of run first"):
        _check_sampling(dataclasses.replace(other, taken="first"), made)
