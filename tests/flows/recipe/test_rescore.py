"""`rlhf rescore` reuses the rollouts of a run, and names mistakes in its options."""

import pytest

from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.recipe.rescore import rescored
from rlhf.flows.running.checks import check
from rlhf.stages.store.artifacts import Store


@pytest.fixture
def record():
    sets = ["reward=null", "rl.score.rewards.model={function: exact_match, squash: none}"]
    return {"name": "first", "recipe": load_recipe("smoke", sets=sets).model_dump(mode="json")}


@pytest.mark.parametrize(
    ("rewards", "sets", "said"),
    [
        (["mine=no_module_here:f"], [], "rl.score.rewards.mine.function: no module 'no_module_here'"),
        (["game=environment"], [], "rl.score.rewards.game asks an environment, but the section environment is"),
        (["matches"], ["rl.score.rewards.matches.arguments.patern=x"], "rl.score.rewards.matches.arguments: matches"),
        (["exact_match"], ["rl.score.rewards.exact_match.wight=1"], "--set rl.score.rewards.exact_match.wight: unkn"),
        (["=exact_match"], [], "--reward '=exact_match': expected FUNCTION or NAME=FUNCTION"),
        (["mine="], [], "--reward 'mine=': expected FUNCTION or NAME=FUNCTION"),
        (["matches", "matches"], [], "--reward matches: two rewards have the name matches"),
        ([], ["rl.rounds=0"], "--set rl.rounds: Input should be greater than or equal to 1"),
        ([], ["store=elsewhere", "rl.rounds=x"], "--set rl.rounds: Input should be a valid integer"),
    ],
)
def test_a_mistake_names_the_option(record, tmp_path, rewards, sets, said):
    with pytest.raises(RecipeError) as raised:
        again = rescored(record, rewards, sets, str(tmp_path))
        # The rollouts are in no store.
        check(again.model_copy(update={"rl": again.rl.model_copy(update={"rollouts_from": None})}))
    assert said in str(raised.value)


def test_settings_of_a_record_have_no_lines(record, tmp_path):
    broken = {**record, "recipe": record["recipe"] | {"seed": -1}}
    with pytest.raises(RecipeError, match="^run first: seed: Input should be greater"):
        rescored(broken, ["exact_match"], [], str(tmp_path))


def test_what_was_scored_again_is_scored_again_from_the_run_that_sampled(record, tmp_path):
    again = rescored(record, ["exact_match"], [], str(tmp_path))
    assert again.rl.rollouts_from == record["name"]
    nodes = {"round-000.rollout": {"stage": "rollout", "digest": "d"}, "round-000.score": {"stage": "score"}}
    second = {"name": "second", "recipe": again.model_dump(mode="json"), "nodes": nodes}
    sets = ["rl.score.rewards.matches.arguments.pattern=x"]
    # Its own record lists them too, where the first one is gone.
    assert rescored(second, ["matches"], sets, str(tmp_path)).rl.rollouts_from == "second"
    # So it does where that one has sampled anew since.
    for digest, source in (("other", "second"), ("d", record["name"])):
        first = record | {"nodes": {"round-000.rollout": {"stage": "rollout", "digest": digest}}}
        Store(str(tmp_path)).write_json(first, "runs", record["name"], "run.json")
        assert rescored(second, ["matches"], sets, str(tmp_path)).rl.rollouts_from == source


def test_a_limit_that_was_wider_stays(record, tmp_path):
    record["recipe"]["rl"]["update"]["max_mismatch_kl"] = 5.0
    assert rescored(record, ["exact_match"], [], str(tmp_path)).rl.update.max_mismatch_kl == 5.0


def test_a_rescored_run_corrects_for_the_drift_unless_an_option_says_otherwise(record, tmp_path):
    record["recipe"]["rl"]["update"] |= {"max_mismatch_kl": 0.02, "old_logps": "sampler"}
    update = rescored(record, ["exact_match"], [], str(tmp_path)).rl.update
    assert (update.max_mismatch_kl, update.short_of_groups, update.old_logps) == (1.0, "train", "trainer")
    kept = ["rl.update.max_mismatch_kl=0.02", "rl.update.short_of_groups=stop", "rl.update.old_logps=sampler"]
    update = rescored(record, ["exact_match"], kept, str(tmp_path)).rl.update
    assert (update.max_mismatch_kl, update.short_of_groups, update.old_logps) == (0.02, "stop", "sampler")


def test_another_algorithm_brings_its_own_settings(record, tmp_path):
    update = rescored(record, [], ["rl.update.algorithm=dapo"], str(tmp_path)).rl.update
    wanted = load_recipe("smoke", sets=["rl.update.algorithm=dapo"]).rl.update
    assert update == wanted.model_copy(update={"max_mismatch_kl": 1.0, "short_of_groups": "train"})
