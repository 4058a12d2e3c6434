"""What an environment settles in other sections: the longest completion, and where rewards of turns count."""

import json

import pytest

from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.flows.recipe.rescore import rescored

PPO = "algorithm: ppo, critic: {start: policy}"
BI_LEVEL = "algorithm: ppo, critic: {start: policy, bi_level_gae: true}"
CLIP = "{rewards: {game: {function: environment, clip: [-1.0, 1.0]}}}"
SHAPES = [
    CLIP,
    "{rewards: {game: {function: environment, squash: sigmoid}}}",
    "{rewards: {game: {function: environment, normalise: batch}}}",
    "{truncated: zero}",
]


@pytest.fixture
def loaded(tmp_path):
    """A recipe in an environment, whose section `rl` has these settings of update, score and rollout."""

    def load(update: str, score: str = "{}", rollout: str = "{}", environment: str = "{name: guess}") -> Recipe:
        path = tmp_path / "mine.yaml"
        rl = f"rl: {{update: {{{update}}}, score: {score}, rollout: {rollout}}}\n"
        path.write_text(f"environment: {environment}\n{rl}")
        found = load_recipe(str(path))
        assert Recipe.model_validate_json(json.dumps(found.model_dump(mode="json"))) == found
        return found

    return load


@pytest.mark.parametrize("score", SHAPES)
def test_rewards_of_turns_that_are_not_what_counts_are_credited_to_the_trajectory(loaded, score):
    update = loaded(PPO, score).rl.update
    assert update.credit == "trajectory" and not update.credits_turns


@pytest.mark.parametrize(
    "score",
    [
        "{}",
        "{rewards: {game: {function: environment, weight: 0.5}}}",
        "{rewards: {game: {function: environment}, exact: {function: exact_match, clip: [0.0, 1.0]}}}",
        "{rewards: {game: {function: environment, weight: 0.0, clip: [0.0, 1.0]}, exact: {function: exact_match}}}",
        "{truncated: zero, rewards: {exact: {function: exact_match}}}",
    ],
)
def test_rewards_of_turns_that_count_as_they_are_stay_on_their_turns(loaded, score):
    for algorithm in (PPO, BI_LEVEL, "algorithm: gigpo"):
        assert loaded(algorithm, score).rl.update.credits_turns


@pytest.mark.parametrize("score", SHAPES)
@pytest.mark.parametrize(
    ("update", "who"),
    [
        (f"{PPO}, credit: turn", "rl.update.credit: turn"),
        ("algorithm: reinforce-pp, credit: turn", "rl.update.credit: turn"),
        ("algorithm: gigpo", "rl.update.algorithm: gigpo"),
        (BI_LEVEL, "rl.update.critic.bi_level_gae"),
    ],
)
def test_what_needs_rewards_of_turns_is_refused_where_they_are_not_what_counts(loaded, update, who, score):
    with pytest.raises(RecipeError) as e:
        loaded(update, score)
    cause = "rl.score.truncated: zero" if "truncated" in score else "rl.score.rewards.game."
    assert who in str(e.value) and cause in str(e.value) and "credit: trajectory" in str(e.value)
    if "credit" not in update:
        assert not loaded(f"{update}, credit: trajectory", score).rl.update.credits_turns


def test_the_budget_of_dr_grpo_is_that_of_all_turns(loaded):
    turns, tokens = "{name: guess, turns: 3}", "{max_tokens: 32}"
    assert loaded("algorithm: dr-grpo", rollout=tokens, environment=turns).rl.update.constant == 96.0
    assert loaded("algorithm: dr-grpo", rollout=tokens).rl.update.constant == 8 * 32.0
    assert loaded("algorithm: dr-grpo", environment=turns).rl.update.constant == 3 * 64.0
    assert loaded("algorithm: dr-grpo, constant: 7.0", environment=turns).rl.update.constant == 7.0
    assert loaded("algorithm: dr-grpo", rollout=tokens, environment="null").rl.update.constant == 32.0


def test_the_update_takes_the_weight_of_the_environments_rewards(loaded):
    half = "{rewards: {game: {function: environment, weight: 0.5}, right: {function: exact_match, weight: 2.0}}}"
    assert loaded("", half).rl.update.environment_weight == 0.5
    with pytest.raises(RecipeError, match=r"update\.environment_weight 1\.0 differs from the weight 0\.5"):
        loaded("environment_weight: 1.0", half)


def test_without_an_environment_nothing_has_its_weight_and_with_one_it_is_the_total(tmp_path):
    path = tmp_path / "mine.yaml"
    for text, weight in (("name: mine\n", 0.0), ("environment: {name: guess}\n", 1.0)):
        path.write_text(text)
        assert load_recipe(str(path)).rl.update.environment_weight == weight


@pytest.mark.parametrize(
    ("rewards", "sets", "weight"),
    [
        (["exact_match"], [], 0.0),
        (["game=environment"], [], 1.0),
        (["game=environment"], ["rl.score.rewards.game.weight=0.5"], 0.5),
        ([], ["rl.score.rewards.environment.weight=2.0"], 2.0),
    ],
)
def test_a_run_in_an_environment_is_scored_again_by_any_rewards(loaded, rewards, sets, weight):
    """The update's weight of the environment's rewards follows from the new ones."""
    record = {"name": "played", "recipe": loaded("").model_dump(mode="json")}
    again = rescored(record, rewards, sets, "store")
    assert again.rl.update.environment_weight == weight and again.rl.rollouts_from == "played"
