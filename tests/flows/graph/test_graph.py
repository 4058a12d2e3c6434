"""The graph of a recipe: what is made from what, and which change reaches which key."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.graph.keying import key_of, key_parts
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.contract.registry import stage
from rlhf.stages.store.artifacts import Artifact, Store


def graph(*sets: str) -> dict[str, Any]:
    return {n.name: n for n in build(load_recipe("smoke", sets=list(sets)))}


def inputs(node: Any) -> dict[str, str]:
    return {name: i.node for name, i in node.inputs.items()}


@pytest.fixture(scope="module")
def made(smoke_store: Path) -> dict[str, Artifact]:
    """The artifacts of the smoke run by node."""
    store = Store(str(smoke_store))
    record = store.read_json("runs", "first", "run.json")
    found = {name: store.get(e["stage"], e["key"]) for name, e in record["nodes"].items()}
    assert all(a is not None for a in found.values())
    return found


def changed(made: dict[str, Artifact], *sets: str) -> set[str]:
    """Nodes whose key differs with these settings, were all their inputs as they are."""
    nodes = graph(*sets)
    old = [n for n in nodes if n in made and all(i.node in made for i in nodes[n].inputs.values())]
    return {n for n in old if key_of(key_parts(nodes[n], made)) != made[n].key}


def test_the_order_is_one_in_which_every_input_is_made_before():
    seen: set[str] = set()
    for name, node in graph().items():
        assert {i.node for i in node.inputs.values()} <= seen
        seen.add(name)


def test_the_first_round_is_sampled_from_the_kernels_that_an_adapter_is_trained_over():
    nodes = graph("rl.update.lora.quantize=nf4", "rl.rounds=2")
    assert [nodes[f"round-00{i}.rollout"].config.quantize for i in range(2)] == ["nf4", "none"]
    assert graph("rl.update.lora.rank=4")["round-000.rollout"].config.quantize == "none"


def test_refills_know_what_the_update_does_with_completions_cut_off():
    for truncated in ("keep", "mask-loss", "mask"):
        nodes = graph("rl.refills=1", f"rl.update={{algorithm: grpo, truncated: {truncated}}}")
        assert nodes["round-000.refill-1"].config.truncated == truncated


def test_baselines_and_refills_are_scored_on_the_scale_of_the_rounds_own_rollouts():
    normed = "rl.score.rewards.exact.normalise=batch"
    nodes = graph(normed, "rl.update={algorithm: remax}")
    assert inputs(nodes["round-001.greedy-score"])["scale"] == "round-001.score"
    assert "scale" not in inputs(nodes["round-001.score"])
    nodes = graph(normed, "rl.refills=2")
    assert [inputs(nodes[f"round-000.refill-{i}-score"])["scale"] for i in (1, 2)] == ["round-000.score"] * 2
    assert not any("scale" in inputs(node) for node in graph("rl.refills=1").values())


def test_what_each_stage_reads():
    nodes = graph()
    assert list(nodes)[:4] == ["base", "prepare", "sft", "reward"]
    assert inputs(nodes["sft"]) == {"base": "base", "data": "prepare", "tokenizer": "base"}
    assert inputs(nodes["reward"]) == {"base": "base", "data": "prepare", "tokenizer": "base"}
    assert inputs(nodes["round-000.rollout"]) == {"policy": "sft", "data": "prepare", "tokenizer": "base"}
    read = {"rollouts": "round-000.rollout", "reward": "reward", "tokenizer": "base"}
    assert inputs(nodes["round-000.score"]) == read
    assert inputs(nodes["round-001.rollout"])["policy"] == "round-000.update"
    assert inputs(nodes["round-001.update"]) == {
        "policy": "round-000.update",
        "rollouts": "round-001.rollout",
        "scores": "round-001.score",
        "tokenizer": "base",
        "reference": "sft",
    }
    assert inputs(nodes["evaluate.base"])["policy"] == "base"
    assert inputs(nodes["evaluate.rl"])["policy"] == inputs(nodes["export"])["policy"] == "round-002.update"


@pytest.mark.parametrize(
    ("sets", "gone"),
    [
        (["sft=null"], {"sft", "evaluate.sft"}),
        (["evaluate=null"], {"evaluate.base", "evaluate.sft", "evaluate.rl"}),
        (["export=null"], {"export"}),
        (["rl.rounds=2"], {"round-002.rollout", "round-002.score", "round-002.update"}),
        (["rl=null"], {f"round-00{i}.{s}" for i in range(3) for s in ("rollout", "score", "update")} | {"evaluate.rl"}),
    ],
)
def test_a_section_that_is_left_out_leaves_its_nodes_out(sets, gone):
    assert set(graph()) - set(graph(*sets)) == gone


def test_each_round_stores_weights_if_another_worker_samples():
    nodes = graph("workers.sample={}")
    settings = [nodes[f"round-00{i}.update"].config for i in range(3)]
    assert [(s.store_state, s.store_weights) for s in settings] == [(False, True), (True, False), (True, False)]


def test_updates_have_the_limits_of_prompts_and_completions():
    """Shapes on accelerators follow them; those of an episode are one."""
    update = graph("data.max_prompt_tokens=70", "rl.rollout.max_tokens=9")["round-001.update"].config
    assert (update.prompt_limit, update.completion_limit, update.programs) == (70, 9, 4)
    adapter = graph("rl.update={lora: {}, top_entropy: 0.2}")["round-001.update"].config
    assert adapter.programs == 8
    played = graph("environment={name: guess, max_tokens: 96}")["round-001.update"].config
    assert (played.prompt_limit, played.completion_limit) == (0, 96)


def test_the_reference_moves_to_the_policy_of_every_so_many_rounds():
    """ProRL's reset; the policies that later rounds read are stored, not rebuilt."""
    nodes = graph("rl.rounds=5", "rl.reference_every=2", "rl.checkpoint_every=5")
    updates = [nodes[f"round-00{i}.update"] for i in range(5)]
    assert [inputs(node)["reference"] for node in updates] == [
        "sft", "sft", "round-001.update", "round-001.update", "round-003.update"
    ]  # fmt: skip
    assert [node.config.store_state for node in updates] == [False, True, False, True, True]
    assert not any(node.config.store_weights for node in updates)
    with pytest.raises(RecipeError, match="reference_every moves the reference of the KL"):
        graph("rl.reference_every=2", "rl.update.kl_coef=0")


JUDGED = "preference={loss: dpo}"


def test_the_policy_that_is_judged_and_exported_is_the_last_one_trained():
    nodes = graph("rl=null", "reward=null", JUDGED)
    assert [n for n in nodes if n not in ("base", "prepare")] == [
        "sft", "preference", "evaluate.base", "evaluate.sft", "evaluate.preference", "export",
    ]  # fmt: skip
    assert inputs(nodes["preference"]) == {"policy": "sft", "reference": "sft", "data": "prepare", "tokenizer": "base"}
    assert inputs(nodes["evaluate.preference"])["policy"] == inputs(nodes["export"])["policy"] == "preference"


@pytest.mark.parametrize(
    ("sets", "node", "read"),
    [
        (["sft=null"], "round-000.rollout", {"policy": "base"}),
        (["sft=null"], "round-000.update", {"reference": "base"}),
        (["sft=null", JUDGED], "preference", {"policy": "base"}),
        ([JUDGED], "round-000.rollout", {"policy": "preference"}),
        ([JUDGED], "round-000.update", {"reference": "preference"}),
        (["preference={loss: orpo}"], "preference", {"reference": None}),
        (["preference={loss: kto}"], "preference", {"data": "prepare"}),
        (["rl.update.kl_coef=0"], "round-000.update", {"reference": None}),
        (["rl.update.algorithm=ppo"], "round-000.update", {"reward": "reward"}),
        (["rl.score.rewards.model={function: exact_match, squash: none}"], "round-000.score", {"reward": None}),
    ],
)
def test_a_stage_reads_what_its_settings_need(sets, node, read):
    found = inputs(graph(*sets)[node])
    assert {role: found.get(role) for role in read} == read


def test_kto_reads_labels_where_the_data_has_them():
    nodes = graph("preference={loss: kto}", "data.splits=[sft,preference,labelled,prompts,heldout]")
    assert "data" not in inputs(nodes["preference"])
    assert nodes["preference"].inputs["labelled"].parts == ("labelled/", "heldout_labelled/")


@pytest.mark.parametrize(
    ("teacher", "policy", "source"),
    [
        ("sft", "base", "sft"),
        ("base", "sft", "base"),
        ("random:tiny", "sft", "teacher"),
        ("rl", "base", "round-002.update"),
    ],
)
def test_teachers_and_their_students(teacher, policy, source):
    nodes = graph(f"distill={{teacher: '{teacher}'}}")
    found = inputs(nodes["distill"])
    assert (found["policy"], found["teacher"]) == (policy, source)
    last = "distill" if teacher == "rl" else "round-002.update"
    assert inputs(nodes["export"])["policy"] == last
    assert inputs(nodes["round-000.rollout"])["policy"] == ("sft" if teacher == "rl" else "distill")
    if source == "teacher":
        assert nodes["teacher"].config.source == teacher
        assert nodes["teacher"].seed != nodes["base"].seed


def test_a_ready_reward_model_is_fetched_once_before_anything_trains():
    ready = "{function: reward_model, source: some/folder}"
    plain = "rl.score.rewards.model={function: exact_match, squash: none}"
    nodes = graph(f"rl.score.rewards.a={ready}", f"rl.score.rewards.b={ready}", plain, "reward=null")
    assert [n for n in nodes if n.startswith("scorer")] == ["scorer-1"]
    assert list(nodes)[:4] == ["base", "prepare", "scorer-1", "sft"]
    assert nodes["scorer-1"].config.source == "some/folder"
    scorers = dict.fromkeys(["scorer_a", "scorer_b"], "scorer-1")
    for name in ("round-000.score", "round-002.score"):
        assert inputs(nodes[name]) == {"rollouts": name.replace("score", "rollout"), **scorers}
    assert "scorer_a" not in inputs(graph()["round-000.score"])


@pytest.mark.parametrize(
    ("rounds", "every", "stored"), [(3, 2, [1, 2]), (4, 2, [1, 3]), (3, 1, [0, 1, 2]), (3, 9, [2])]
)
def test_weights_are_stored_every_so_many_rounds_and_after_the_last(rounds, every, stored):
    nodes = graph(f"rl.rounds={rounds}", f"rl.checkpoint_every={every}")
    assert [i for i in range(rounds) if nodes[f"round-{i:03d}.update"].config.store_state] == stored


EVERY = ("rl.rounds=5", "rl.checkpoint_every=5", "evaluate.every=2")
BEST = (*EVERY, "evaluate.load_best_model_at_end=true", "evaluate.metric_for_best_model=pass_at_2")


def test_policies_are_evaluated_every_so_many_rounds_right_after_their_update():
    nodes = graph(*EVERY)
    rounds = [n for n in nodes if n.endswith(".evaluate")]
    # The last policy is evaluated after the rounds.
    assert rounds == ["round-001.evaluate", "round-003.evaluate"]
    assert inputs(nodes["round-003.evaluate"])["policy"] == "round-003.update"
    order = list(nodes)
    assert order.index("round-003.evaluate") == order.index("round-003.update") + 1
    # On the same random numbers as all others, with the same settings.
    assert {nodes[n].seed for n in rounds} == {nodes["evaluate.base"].seed}
    assert inputs(nodes["export"])["policy"] == "round-004.update"
    assert [n for n in graph(*EVERY, "evaluate=null") if "evaluate" in n] == []


def test_the_best_policy_of_the_evaluated_rounds_ends_the_rl():
    nodes = graph(*BEST)
    judged = ["001", "003", "004"]
    assert inputs(nodes["select"]) == {f"candidate_{n}": f"round-{n}.update" for n in judged} | {
        f"evaluation_{n}": f"round-{n}.evaluate" for n in judged
    }
    assert nodes["select"].inputs["evaluation_001"].parts == ("scores.json",)
    assert nodes["select"].config.metric == "pass_at_2"
    assert inputs(nodes["export"])["policy"] == inputs(nodes["evaluate.rl"])["policy"] == "select"
    # A choice needs no replay.
    stored = [n[6:9] for n, node in nodes.items() if n.endswith(".update") and node.config.store_state]
    assert stored == judged
    assert inputs(graph(*BEST, "distill={teacher: rl}")["distill"])["teacher"] == "select"
    assert "select" not in graph(*EVERY)


def test_seeds_differ_by_stage_and_round_and_follow_the_run_s():
    one, two = graph(), graph("seed=1")
    seeds = {name: node.seed for name, node in one.items()}
    assert len({seeds["sft"], seeds["reward"], seeds["round-000.rollout"], seeds["round-001.rollout"]}) == 4
    same = {name for name, seed in seeds.items() if two[name].seed == seed}
    assert same == {n for n in seeds if one[n].stage in ("prepare", "score", "export")}
    # All policies are judged on the same random numbers.
    assert seeds["evaluate.base"] == seeds["evaluate.sft"] == seeds["evaluate.rl"]


ROUNDS = range(3)


def rounds(stage: str) -> set[str]:
    return {f"round-{i:03d}.{stage}" for i in ROUNDS}


EVALUATIONS = {"evaluate.base", "evaluate.sft", "evaluate.rl"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "reached"),
    [
        (["sft.optimizer.learning_rate=0.001"], {"sft"}),
        (["reward.centering=0.1"], {"reward"}),
        (["rl.score.rewards.digits.weight=0.25"], rounds("score")),
        (["rl.update.clip_low=0.1"], rounds("update")),
        (["rl.rollout.max_tokens=9"], rounds("rollout")),
        (["rl.rollout.shard_prompts=2"], rounds("rollout")),
        (["rl.rollout.temperature=0.9"], rounds("rollout") | rounds("update")),
        (["evaluate.samples=3"], EVALUATIONS),
        (["export.name=other"], {"export"}),
        (["data.heldout_fraction=0.2"], {"prepare"}),
        (["rl.rounds=9"], set()),
        (["rl.checkpoint_every=1"], set()),
        (["evaluate.every=1", "evaluate.load_best_model_at_end=true"], set()),
        (["sft.checkpoint_every=1", "reward.checkpoint_every=1"], set()),
        (["sft.compute.tokens_per_micro_batch=64", "rl.rollout.compute.rollout_rows=3"], set()),
        (["data.workers=2", "data.chunk_megabytes=1.0", "rl.score.workers=1", "evaluate.workers=1"], set()),
        (["name=other", "description=another", "retries=5", "store=/elsewhere"], set()),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_a_setting_changes_the_keys_of_its_own_stage_alone(made, sets, reached):
    assert changed(made, *sets) == reached


def test_a_key_holds_the_content_of_the_parts_that_are_read(made):
    parts = {name: key_parts(node, made) for name, node in graph().items()}
    assert parts["sft"]["inputs"]["data"] == made["prepare"].part_digest(("sft/", "heldout_sft/"))
    assert parts["reward"]["inputs"]["data"] == made["prepare"].part_digest(("preference/", "heldout_preference/"))
    assert parts["round-000.rollout"]["inputs"]["data"] == made["prepare"].part_digest(("prompts/",))
    assert parts["evaluate.base"]["inputs"]["data"] == made["prepare"].part_digest(("heldout/",))
    assert parts["evaluate.base"]["inputs"]["policy"] == made["base"].digest
    assert parts["sft"]["versions"]["jax"][0].isdigit()


def test_what_is_computed_is_of_one_kind_of_device(made):
    device = {name: key_parts(node, made)["device"] for name, node in graph().items() if name in made}
    assert {name for name, kind in device.items() if not kind} == {"prepare"}
    (kind,) = set(device.values()) - {""}
    assert made["sft"].manifest["device"].startswith(f"{kind} x")
    # Scores by functions are shared by all kinds; those of a reward model are not.
    assert [stage("score").computes(c) for c in (stage("score").config(), graph()["round-000.score"].config)] == [
        False,
        True,
    ]


def test_a_rollout_records_the_policy_that_made_it(made):
    from rlhf.stages.common.tables import read_rows

    for number, policy in enumerate(["sft", "round-000.update", "round-001.update"]):
        rows = read_rows(made[f"round-{number:03d}.rollout"], "rollouts/")
        assert {r["policy"] for r in rows} == {made[policy].digest}
        assert len(rows) == 8 * 4


def test_a_reward_function_that_is_edited_in_place_is_other_content(made, tmp_path, monkeypatch):
    path = tmp_path / "my_rewards.py"
    path.write_text("def f(prompts, completions, **_):\n    return [1.0 for _ in prompts]\n")
    monkeypatch.syspath_prepend(tmp_path)
    sets = ["rl.score.rewards.exact.function='my_rewards:f'", "evaluate.judge='my_rewards:f'"]

    def keys() -> dict[str, str]:
        return {name: key_of(key_parts(node, made)) for name, node in graph(*sets).items()}

    before = keys()
    path.write_text("# a remark\n" + path.read_text())
    assert keys() == before
    path.write_text(path.read_text().replace("1.0", "2.0"))
    after = keys()
    assert {name for name in after if after[name] != before[name]} == rounds("score") | EVALUATIONS


def test_a_graph_is_built_in_proportion_to_its_rounds() -> None:
    calls = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    found = []
    for rounds in (50, 400):
        recipe = load_recipe("smoke", sets=[f"rl.rounds={rounds}"])
        build(recipe)
        calls = 0
        sys.setprofile(counted)
        try:
            nodes = build(recipe)
        finally:
            sys.setprofile(None)
        found.append(calls / len(nodes))
    assert found[1] < 1.1 * found[0], found
