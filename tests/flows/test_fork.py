"""A fork shares what is before it with its run, as that is, and goes on with other settings."""

import dataclasses
import json
import re

import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.graph.reuse import taken_artifact
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.running.forking import forked
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.keys import published
from rlhf.tuning.algorithms.registry import ALGORITHMS

DIGEST = "0" * 64


def record_of(*sets: str, name: str = "first") -> dict:
    """The record of a run of the smoke recipe that has finished, as far as a fork reads it."""
    recipe = load_recipe("smoke", sets=list(sets))
    return of_recipe(recipe, name)


def of_recipe(recipe: Recipe, name: str) -> dict:
    nodes = {n.name: {"stage": n.stage, "state": "made", "digest": DIGEST} for n in build(recipe)}
    return {"name": name, "recipe": json.loads(recipe.model_dump_json()), "nodes": nodes}


def nodes_of(recipe: Recipe) -> dict:
    return {n.name: n for n in build(recipe)}


def same(old, new) -> bool:
    """Whether two nodes have one key, given equal inputs."""
    return (old.config, old.inputs, old.seed) == (new.config, new.inputs, new.seed)


def test_nodes_before_the_fork_are_those_of_the_run_and_nodes_behind_it_have_the_new_settings():
    record = record_of()
    fork = forked(record, "round=2", ["rl.update.kl_coef=0.5", "rl.rounds=4"], ".rlhf")
    old, new = nodes_of(load_recipe("smoke")), nodes_of(fork)
    before = {n for n in old if n.startswith(("round-000", "round-001")) or n in ("base", "prepare", "sft", "reward")}
    assert all(same(old[n], new[n]) for n in before - {"round-001.update"})
    assert {n for n, node in new.items() if node.shared} == before
    before_it = old["round-000.update"].config.kl_coef
    assert [new[f"round-00{i}.update"].config.kl_coef for i in range(4)] == [before_it] * 2 + [0.5] * 2
    # The state of the last shared round goes on.
    assert new["round-002.update"].inputs["policy"].node == "round-001.update"
    assert {n: node.digest for n, node in new.items() if node.digest} == {"round-001.update": DIGEST}
    # A dumped recipe reads back.
    assert Recipe.model_validate_json(fork.model_dump_json()) == fork


def test_rounds_behind_a_fork_draw_on_where_those_before_it_ended():
    def firsts(recipe: Recipe) -> list[int]:
        rollouts = [n.config for n in build(recipe) if n.stage == "rollout"]
        return [c.round * c.prompts if c.first is None else c.first for c in rollouts]

    def refills(recipe: Recipe) -> list[int]:
        return [n.config.start for n in build(recipe) if n.stage == "refill"]

    refilled = record_of("rl.refills=2", "rl.rollout.prompts=8")
    fork = forked(refilled, "round=2", ["rl.rollout.prompts=4", "rl.refills=1", "rl.rounds=4"], ".rlhf")
    assert firsts(fork) == [0, 8, 16, 20]
    assert refills(fork) == [0, 8, 16, 24, 32, 36]
    # With as many prompts, keys are those of a run without a fork.
    plain = forked(record_of(), "round=1", ["rl.update.kl_coef=0.5"], ".rlhf")
    assert [n.config.first for n in build(plain) if n.stage == "rollout"] == [None] * 3


def test_a_fork_with_staleness_samples_from_the_policies_before_it():
    fork = forked(record_of("rl.rounds=4"), "round=2", ["rl.staleness=1"], ".rlhf")
    nodes = nodes_of(fork)
    sampled = [nodes[f"round-00{i}.rollout"].inputs["policy"].node for i in range(4)]
    assert sampled == ["sft", "round-000.update", "round-000.update", "round-001.update"]
    assert [nodes[f"round-00{i}.update"].config.off_policy for i in range(4)] == [False, False, True, True]
    less = nodes_of(forked(record_of("rl.rounds=4", "rl.staleness=2"), "round=2", ["rl.staleness=0"], ".rlhf"))
    sampled = [less[f"round-00{i}.rollout"].inputs["policy"].node for i in range(4)]
    assert sampled == ["sft", "sft", "round-001.update", "round-002.update"]
    order = list(less)
    assert all(order.index(i.node) < order.index(n) for n in order for i in less[n].inputs.values())


def test_a_fork_of_a_fork_keeps_the_settings_of_each_stretch():
    first = forked(record_of("rl.rounds=6"), "round=2", ["rl.update.kl_coef=0.5"], ".rlhf")
    later = forked(of_recipe(first, "second"), "round=4", ["rl.update.kl_coef=0.25"], ".rlhf")
    kl = [nodes_of(later)[f"round-00{i}.update"].config.kl_coef for i in range(6)]
    assert kl[2:] == [0.5, 0.5, 0.25, 0.25] and kl[0] == kl[1] not in kl[2:]
    assert later.fork is not None and later.fork.run == "second" and later.fork.round == 4
    # Before the first fork nothing of it is left.
    early = forked(of_recipe(first, "second"), "round=1", ["rl.update.kl_coef=0.25"], ".rlhf")
    assert early.fork is not None and [part.until for part in early.fork.earlier] == [1]


def test_a_fork_may_be_at_a_stage_before_the_rounds_and_change_the_algorithm():
    fork = forked(record_of(), "sft", ["rl.update.algorithm=dapo"], ".rlhf")
    dapo = load_recipe("smoke", sets=["rl.update.algorithm=dapo"])
    assert fork.rl.update.clip_high == dapo.rl.update.clip_high
    assert {n.name for n in build(fork) if n.shared} == {"base", "prepare", "sft"}
    start = forked(record_of(), "round=0", [], ".rlhf").fork
    assert start is not None and start.node == "sft" and start.earlier == []


@pytest.mark.parametrize(
    ("first", "change"),
    [
        ("rl.update.algorithm=dr-grpo", "rl.update.algorithm=dapo"),
        ("rl.update.algorithm=dppo", "rl.update.algorithm=grpo"),
        ("rl.update.algorithm=dr-grpo", "rl.rollout.max_tokens=12"),
        ("preference={}", "preference.loss=simpo"),
        ("preference={loss: ipo}", "preference.loss=dpo"),
        ("preference={loss: orpo}", "preference.loss=exo-pair"),
        ("preference={}", "preference.lora={rank: 2}"),
        ("preference={}", "preference.optimizer.name=lion"),
        ("rl.update={algorithm: ppo, lora: {rank: 2}, critic: {gamma: 0.9}}", "rl.update.lora=null"),
        ("rl.update={algorithm: ppo, critic: {gamma: 0.9}}", "rl.update.lora={rank: 2}"),
        ("rl.update={algorithm: ppo, critic: {optimizer: {name: lion}}}", "rl.update.critic.optimizer.name=adamw"),
    ],
)
def test_another_choice_brings_its_own_defaults(first, change):
    fork, wanted = forked(record_of(first), "sft", [change], ".rlhf"), load_recipe("smoke", sets=[first, change])
    assert (fork.rl, fork.preference) == (wanted.rl, wanted.preference)


@pytest.mark.parametrize(
    "sets",
    [
        ["preference={loss: simpo, lora: {rank: 2}, optimizer: {name: lion}}"],
        ["rl.update={algorithm: ppo, critic: {optimizer: {name: lion}}}"],
        ["rl.update={algorithm: ppo, critic: {optimizer: {name: lion, beta2: 0.9}}}"],
        ["rl.update={algorithm: ppo, optimizer: {name: lion}, critic: {optimizer: {name: sgd}, gamma: 0.9}}"],
        ["rl.update={algorithm: ppo, lora: {rank: 2}, critic: {optimizer: {name: muon}}}"],
        ["sft.optimizer.name=lion", "reward={optimizer: {name: muon, beta2: 0.9}}", "rl.update.optimizer.name=sgd"],
    ],
)
def test_a_fork_without_changes_has_the_recipe_of_its_run(sets):
    wanted = load_recipe("smoke", sets=sets).model_dump(exclude={"fork"})
    assert forked(record_of(*sets), "sft", [], ".rlhf").model_dump(exclude={"fork"}) == wanted


def test_a_fork_from_a_record_has_the_texts_that_the_policy_reads():
    record = record_of()
    record["recipe"]["data"]["system_prompt"] = text = "Use GET http://tool/find?key=guess or ssh://alice@host."
    assert forked(record | {"recipe": published(record["recipe"])}, "base", [], ".rlhf").data.system_prompt == text


def test_settings_that_follow_from_other_sections_follow_from_the_new_ones(tmp_path):
    path = tmp_path / "game.yaml"
    path.write_text("environment: {name: guess}\nrl: {update: {algorithm: ppo, critic: {start: policy}}}")
    shaped, plain = "rl.score.rewards={e: {function: environment, squash: sigmoid}}", "rl.score.rewards.e.squash=none"
    record = of_recipe(load_recipe(str(path), sets=[shaped]), "first")
    assert record["recipe"]["rl"]["update"]["credit"] == "trajectory"
    assert forked(record, "sft", [plain], ".rlhf").rl == load_recipe(str(path), sets=[shaped, plain]).rl
    named = of_recipe(load_recipe(str(path), sets=["rl.update.credit=trajectory"]), "first")
    assert forked(named, "sft", [], ".rlhf").rl.update.credit == "trajectory"


def test_the_data_follows_from_the_new_sections_only_where_it_is_not_shared():
    without = ["rl=null", "reward=null"]
    assert forked(record_of("data.sft_fraction=0.3"), "base", without, ".rlhf").data.sft_fraction == 0.3
    record = of_recipe(load_recipe("smoke", {"data": {"source": "addition"}}, sets=["rl.rounds=1"]), "first")
    assert forked(record, "base", without, ".rlhf").data.splits == load_recipe("smoke", sets=without).data.splits
    assert forked(record, "prepare", without, ".rlhf").data.splits == load_recipe("smoke").data.splits


def test_what_a_recipe_names_itself_stays_whatever_else_changes():
    named = ["rl.update.clip_high=0.5", "preference={beta: 0.3}", "rl.update.constant=7"]
    record = record_of("rl.update.algorithm=dr-grpo", *named)
    fork = forked(record, "sft", ["rl.rollout.max_tokens=12", "preference.loss=simpo"], ".rlhf")
    assert (fork.rl.update.clip_high, fork.preference.beta, fork.rl.update.constant) == (0.5, 0.3, 7)
    for name in set(ALGORITHMS) - {"gigpo", "online-dpo"}:
        sets = [f"rl.update.algorithm={name}", "rl.update.prompts_per_step=8"]
        assert forked(record_of(*sets), "sft", [], ".rlhf").rl == load_recipe("smoke", sets=sets).rl


@pytest.mark.parametrize(
    ("at", "sets", "message"),
    [
        ("round=9", [], "--at round=9: the run's recipe has rounds 0 to 2"),
        ("rollout", [], "--at rollout: expected round=N, or one of base, prepare, sft, reward"),
        ("round=1", ["rl.rounds=1"], "rl.rounds 1 leaves no round after the fork"),
        ("round=1", ["rl=null"], "the section rl is null"),
        ("round=1", ["rl.rollout.order_seed=7"], "would draw prompts again"),
        ("round=1", ["rl.update.lora={rank: 2}"], "an adapter is trained from the first round on"),
        ("round=1", ["rl.update.optimizer.name=sgd"], "rl.update.optimizer.name is sgd, and adamw in the shared"),
        ("round=1", ["rl.update.algorithm=ppo"], "differ in having a critic"),
        ("round=1", ["rl.update.kl_coeff=1"], "unknown key; did you mean kl_coef"),
        ("sft", ["sft=null"], "fork.node: this recipe has no sft"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_with_the_reason(at, sets, message):
    with pytest.raises(RecipeError, match=message):
        build(forked(record_of(), at, sets, ".rlhf"))


def test_a_run_that_has_not_got_so_far_is_no_place_for_a_fork():
    record = record_of()
    del record["nodes"]["round-001.update"]["digest"]
    with pytest.raises(RecipeError, match="run first has no finished round-001.update; finished are base, prepare"):
        forked(record, "round=2", [], ".rlhf")


@pytest.mark.slow
def test_a_fork_shares_artifacts_and_its_recipe_can_be_planned_rerun_and_audited(rlhf, store, record, tmp_path):
    options = ["--store", store, "--set", "rl.update.optimizer.learning_rate=0.007", "--set", "evaluate=null"]
    out = rlhf("fork", "smoke", "--at", "round=2", *options, "--no-prefect", "--name", "forked").stdout
    assert "fork of run first after round-001.update" in out
    first, fork = record(store, "first")["nodes"], record(store, "forked")["nodes"]
    made = {n for n, e in fork.items() if e["state"] == "made"}
    # The rollouts of round 2 are those of the same policy, by their key.
    assert made == {"round-002.update", "export"}
    assert all((fork[n]["digest"], fork[n]["key"]) == (first[n]["digest"], first[n]["key"]) for n in fork.keys() - made)
    audit = rlhf("audit", "forked", "--store", store).stdout
    assert re.search(r"^  holds +fork +1 forks ", audit, re.MULTILINE) and "BROKEN" not in audit
    page = (store / "runs" / "forked" / "report.html").read_text()
    assert "Fork of run <strong>first</strong> after round-001.update" in page

    file = tmp_path / "fork.yaml"
    rlhf("fork", "forked", "--at", "round=2", *options[:2], "--to", file)
    assert " 0 miss, 0 wait" in rlhf("plan", file, "--store", store).stdout
    done = rlhf("plan", file, "--store", store, "--set", "sft.epochs=9", code=2)
    assert "sft.epochs: 1 -> 9: sft is before the fork of run forked and is shared as it is" in done.stderr
    # The policy has been made anew since, with other bits.
    text = file.read_text()
    file.write_text(text.replace(fork["round-001.update"]["digest"], "f" * 64))
    done = rlhf("plan", file, "--store", store, code=2)
    assert f"fork.digest: round-001.update is {first['round-001.update']['digest'][:12]} here" in done.stderr


def test_what_is_shared_is_as_it_was_though_its_code_has_changed_since(smoke_store):
    """Keys of shared stages are looked at nowhere: the run's own artifacts are taken."""
    place = Store(str(smoke_store))
    first = place.read_json("runs", "first", "run.json")
    fork = forked(first, "round=1", [], str(smoke_store))
    shared = [node for node in build(fork) if node.shared]
    assert {n.name for n in shared} >= {"base", "prepare", "sft", "round-000.rollout", "round-000.update"}
    for node in shared:
        artifact = taken_artifact(place, node)
        assert artifact is not None and artifact.key == first["nodes"][node.name]["key"]
    # Where the run's record is gone, keys find them.
    assert all(taken_artifact(place, dataclasses.replace(node, shared="gone")) is None for node in shared)
