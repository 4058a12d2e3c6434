"""Rounds that do more than sample, score, update: other rewards on old rollouts, older policies, refills, baselines."""

import json

import pytest

from rlhf.flows.graph.build import build
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.common.tables import read_rows
from rlhf.stages.store.artifacts import Store
from tests.judge_server import judge_server


def graph(*sets):
    return {n.name: n for n in build(load_recipe("smoke", sets=[*sets]))}


def states(record, *names):
    return {n: record["nodes"][n]["state"] for n in names}


def rows(store, record, node, part):
    entry = record["nodes"][node]
    artifact = Store(str(store)).get(entry["stage"], entry["key"])
    return read_rows(artifact, part)


def test_a_stale_round_samples_from_the_policy_before_the_last_and_waits_for_no_update():
    nodes = graph("rl.staleness=1", "rl.rounds=3")
    assert [nodes[f"round-00{i}.rollout"].inputs["policy"].node for i in range(3)] == ["sft", "sft", "round-000.update"]
    assert [nodes[f"round-00{i}.update"].config.off_policy for i in range(3)] == [False, True, True]
    order = list(nodes)
    assert order.index("round-001.rollout") < order.index("round-000.update") < order.index("round-002.rollout")


@pytest.mark.slow
def test_other_rewards_on_the_rollouts_of_a_run_sample_nothing(rlhf, store, record):
    letters = ["--reward", "letters=matches", "--set", "rl.score.rewards.letters.arguments={pattern: '.*[a-m].*'}"]
    rlhf("rescore", "first", *letters, "--no-prefect", "--name", "again", "--store", store)
    first, again = record(store, "first"), record(store, "again")
    for i in range(3):
        name = f"round-00{i}"
        assert again["nodes"][f"{name}.rollout"]["digest"] == first["nodes"][f"{name}.rollout"]["digest"]
        expected = {f"{name}.rollout": "hit", f"{name}.score": "made", f"{name}.update": "made"}
        assert states(again, *expected) == expected
    assert again["worker_starts"] == 1
    assert set(rows(store, again, "round-001.score", "scores/")[0]["rewards"]) == {"letters"}
    # The policy of the second round is not the one that its rollouts came from; the first round's is.
    assert again["nodes"]["round-000.update"]["metrics"]["mismatch_kl"] < 1e-6
    assert again["nodes"]["round-001.update"]["metrics"]["mismatch_kl"] > 1e-6

    heavier = ["--set", "rl.score.rewards.letters.weight=2"]
    rlhf("rescore", "again", *heavier, "--no-prefect", "--name", "third", "--store", store)
    third = record(store, "third")
    expected = {"round-002.rollout": "hit", "round-000.score": "made"}
    assert states(third, *expected) == expected


@pytest.mark.slow
def test_a_run_whose_judge_is_down_goes_on_when_it_is_up_and_ends_where_rounds_train_nothing(rlhf, store, record):
    with judge_server(lambda body: "5") as (url, _):
        port = int(url.rpartition(":")[2].removesuffix("/v1"))
    # One verdict for all: every group ties.
    judge = f"{{function: judge, arguments: {{url: '{url}', model: m, retries: 0}}}}"
    sets = [f"store={store}"]
    sets += [f"rl.score.rewards.{name}.weight=0" for name in ("exact", "digits", "model")]
    sets += [f"rl.score.rewards.j={judge}", "rl.update.max_idle_rounds=2", "evaluate=null", "export=null"]
    command = ["run", "smoke", "--no-prefect", *[word for item in sets for word in ("--set", item)]]
    before = {path.name for path in (store / "artifacts" / "score").iterdir()}
    down = rlhf(*command, "--name", "down", code=1)
    assert "reward j: no verdict" in down.stderr and "cannot be reached" in down.stderr
    assert "finished stages are kept; the same command continues" in down.stderr
    assert {path.name for path in (store / "artifacts" / "score").iterdir()} == before
    with judge_server(lambda body: "5", port) as (_, asked):
        idle = rlhf(*command, "--name", "idle", code=1)
        assert "2 rounds in a row have taught nothing" in idle.stderr and "the same command" not in idle.stderr
        assert "taught nothing: the completions of each prompt score alike" in idle.stdout
        assert "reward 0.500" in idle.stdout
        rlhf(*command, "--set", "rl.update.max_idle_rounds=9", "--name", "through")
    assert len(asked) == 3 * 32
    through = record(store, "through")["nodes"]
    assert [through[f"round-00{i}.update"]["metrics"]["idle_rounds"] for i in range(3)] == [1, 2, 3]
    assert through["round-000.update"]["state"] == "hit"


@pytest.mark.slow
def test_what_cannot_be_scored_again_is_said(rlhf, store):
    options = ["--no-prefect", "--store", store]
    assert "nothing would change: name a --reward" in rlhf("rescore", "first", *options, code=2).stderr
    # Ratios are of one temperature, and these completions were drawn at another.
    cooler = ["--set", "rl.rollout.temperature=0.5", "--set", "rl.update.temperature=0.5"]
    refused = rlhf("rescore", "first", "--reward", "exact_match", *cooler, *options, code=2).stderr
    assert "rl.rollout.temperature: 1.0 -> 0.5: the rollouts are those of run first" in refused


@pytest.mark.slow
def test_refills_find_prompts_that_teach_and_every_prompt_is_accounted_for(rlhf, store, record):
    sets = ["rl.refills=2", "rl.rounds=2", "rl.update={algorithm: dapo, prompts_per_step: 4, short_of_groups: train}"]
    # Of eight random bytes about a third have one; many pairs of completions agree.
    sets += [
        "rl.rollout.completions=2",
        "rl.score.rewards={letters: {function: matches, arguments: {pattern: '.*[a-m].*'}}}",
    ]
    options = [x for s in [*sets, f"store={store}"] for x in ("--set", s)]
    rlhf("run", "smoke", "--no-prefect", "--name", "refilled", *options)
    run = record(store, "refilled")
    for i in range(2):
        name = f"round-00{i}"
        metrics = run["nodes"][f"{name}.update"]["metrics"]
        tables = [f"{name}.rollout", f"{name}.refill-1", f"{name}.refill-2"]
        sampled = [{r["prompt_id"] for r in rows(store, run, t, "rollouts/")} for t in tables]
        assert sum(map(len, sampled)) == len(set.union(*sampled)) == metrics["prompts_sampled"]
        # Each completion has one fate, under its place and sample.
        fates = rows(store, run, f"{name}.update", "fates/")
        names = [(r["place"], r["sample"]) for t in tables for r in rows(store, run, t, "rollouts/")]
        assert [(f["place"], f["sample"]) for f in fates] == names and len(set(names)) == len(names)
        assert sum(f["fate"] == "trained" for f in fates) == 2 * metrics["groups"]
        taught = metrics["prompts_sampled"] - metrics["prompts_without_signal"] - metrics["prompts_to_spare"]
        assert taught == metrics["groups"] <= 8
        assert sampled[1] or metrics["prompts_without_signal"] == 0
    again = rlhf("plan", "smoke", *options).stdout
    assert " 0 miss" in again


@pytest.mark.slow
def test_a_round_may_be_sampled_with_smaller_numbers_and_the_update_knows(rlhf, store, record):
    told = ["rl.rounds=1", "rl.rollout.engine.quantization=int8", "rl.rollout.engine.kv_cache_dtype=int8"]
    options = [word for setting in [*told, f"store={store}"] for word in ("--set", setting)]
    rlhf("run", "smoke", "--no-prefect", "--name", "small", *options)
    first, small = record(store, "first"), record(store, "small")
    names = ("sft", "round-000.rollout", "round-000.update")
    assert states(small, *names) == dict(zip(names, ("hit", "made", "made"), strict=True))
    exact, rounded = (r["nodes"]["round-000.update"]["metrics"]["mismatch_kl"] for r in (first, small))
    assert exact < 1e-10 < rounded < 0.01


@pytest.mark.slow
def test_a_greedy_completion_of_each_prompt_is_remaxs_baseline(rlhf, store, record):
    sets = ["rl.rounds=1", "rl.update={algorithm: remax, prompts_per_step: 4}", f"store={store}"]
    rlhf("run", "smoke", "--no-prefect", "--name", "remax", *[x for s in sets for x in ("--set", s)])
    run = record(store, "remax")
    sampled = rows(store, run, "round-000.rollout", "rollouts/")
    greedy = rows(store, run, "round-000.greedy", "rollouts/")
    assert [r["place"] for r in greedy] == list(dict.fromkeys(r["place"] for r in sampled))
    assert all(r["temperature"] == 0 for r in greedy)
    assert run["nodes"]["round-000.greedy-score"]["metrics"]["completions"] == len(greedy)
    assert run["nodes"]["round-000.update"]["metrics"]["steps"] > 0


@pytest.mark.slow
def test_the_best_evaluated_policy_is_exported_without_judging_it_twice(rlhf, store, record):
    # An untrained policy is told apart by the lengths of what it writes, not by what is right.
    sets = ["evaluate.every=1", "evaluate.load_best_model_at_end=true", "evaluate.metric_for_best_model=short"]
    sets += ["evaluate.judges={short: {function: length_at_most, arguments: {tokens: 1}}}", f"store={store}"]
    shown = rlhf("run", "smoke", "--no-prefect", "--name", "best", *[x for s in sets for x in ("--set", s)]).stdout
    run = record(store, "best")["nodes"]
    scores = {i: run[f"round-00{i}.evaluate"]["metrics"]["judges"]["short"]["score"] for i in range(3)}
    best = max(scores, key=lambda i: scores[i])
    chosen = run[f"round-00{best}.update"]
    assert run["select"]["metrics"]["round"] == best and run["select"]["digest"] == chosen["digest"]
    assert states({"nodes": run}, "evaluate.rl", "select") == {"evaluate.rl": "hit", "select": "made"}
    assert run["evaluate.rl"]["metrics"] == run[f"round-00{best}.evaluate"]["metrics"]
    lineage = json.loads((store / "artifacts" / "export" / run["export"]["key"] / "provenance.json").read_text())
    assert {"select", "update", "evaluate"} <= {p["stage"] for p in lineage}
    assert "RL against SFT" in shown and f"round-00{best}.evaluate" in shown


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "gspo", "gspo-token", "cispo", "rloo", "reinforce-pp"])
def test_the_graph_of_an_algorithm_without_more_inputs_is_grpos(name):
    plain = {n: sorted(node.inputs) for n, node in graph().items()}
    other = graph(f"rl.update={{algorithm: {name}, kl_coef: 0.01}}")
    assert [(n, sorted(node.inputs)) for n, node in other.items()] == list(plain.items())
