"""Each state of the rounds that teaches nothing is named in the report."""

import pytest

from flows.recipe.fork import Fork
from flows.recipe.reading import load_recipe
from flows.report.advice import round_warnings, run_warnings, uneven_rounds
from flows.report.measures import round_series
from flows.report.run_view import RunView
from stages.store.artifacts import Store

HEALTHY = {"entropy": [1.0] * 3, "kl": [0.01] * 3, "mean_length": [5.0] * 3, "zero_variance": [0.3] * 3}


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({}, None),
        ({"zero_variance": [0.6, 0.7, 0.8], "pass_rate": [0.0, 0.05, 0.0]}, "Dead groups"),
        ({"zero_variance": [0.95, 0.96, 1.0], "pass_rate": [0.9, 0.95, 1.0]}, "Reward saturation"),
        ({"mean_length": [5.0, 8.0, 12.0], "pass_rate": [0.4, 0.4, 0.3]}, "Length hacking"),
        ({"mean_length": [5.0, 8.0, 12.0], "pass_rate": [0.1, 0.4, 0.8]}, "Length"),
        ({"effective_sample_size": [0.99, 0.4, None]}, "Few effective samples"),
        ({"grad_norm": [1.0, 1.1, 0.9, 40.0]}, "Gradient spike"),
        ({"mismatch_kl": [1e-6, 0.02, 1e-6]}, "Mismatch"),
        ({"drift_kl": [0.02, 0.13, 0.02]}, "Drift within a round"),
        ({"kl": [0.0, 0.006, 0.006, 0.367]}, "KL growth"),
        ({"kl": [0.0, 0.1, 0.3, 5.0]}, "KL blow-up"),
        ({"zero_variance": [0.09, 0.5, 0.55, 0.59]}, "Fading signal"),
    ],
)
def test_a_state_that_teaches_nothing_has_its_own_name(change, title):
    assert [w.title for w in round_warnings(HEALTHY | change, {})] == ([] if title is None else [title])


@pytest.mark.parametrize(
    "change",
    [
        {"zero_variance": [0.6, 0.6, 0.7], "pass_rate": [0.0] * 3},
        {"zero_variance": [0.09, 0.5, 0.55, 0.59]},
    ],
)
def test_refills_are_no_advice_where_the_recipe_cannot_have_them(change):
    texts = [round_warnings(HEALTHY | change, {}, refills=refills)[0].text for refills in (True, False)]
    assert ["rl.refills" in text for text in texts] == [True, False]


def test_the_few_groups_of_rounds_in_which_the_first_long_completions_are_under_way_are_no_dead_ones():
    series = {"round": [0, 1, 2, 3], "zero_variance": [1.0, 1.0, 1.0, 0.8], "pass_rate": [0.0] * 4}
    assert round_warnings(series, {}) and not round_warnings(series, {}, uneven={0, 1})


CARRY = "rl.partial={round_tokens: 3}"
"""Of 8 tokens: the first two rounds lack completions that take three."""
GROWING = [100 * 1.35**i for i in range(10)]


def of_lengths(lengths, sets, earlier=None, shared=0):
    """Titles of the warnings of a run with these mean lengths, a round each; `earlier` made those that are shared."""
    recipe = load_recipe("smoke", sets=[f"rl.rounds={len(lengths)}", *sets])
    if earlier is not None:
        before = load_recipe("smoke", sets=earlier).rl
        assert before is not None
        part = {"until": shared, "rl": before.model_dump(mode="json")}
        node = f"round-{shared - 1:03d}.update"
        fork = Fork.model_validate({"run": "first", "node": node, "digest": "a" * 64, "earlier": [part]})
        recipe = recipe.model_copy(update={"fork": fork})
    record = {"recipe": recipe.model_dump(mode="json"), "nodes": {}}
    for i, length in enumerate(lengths):
        record["nodes"][f"round-{i:03d}.rollout"] = {"metrics": {"mean_length": length}}
    sampling = RunView(Store("unused"), record).sampling()
    assert sorted(sampling) == list(range(len(lengths)))
    found = run_warnings(record, round_series(record), {}, {}, uneven_rounds(sampling))
    return [warning.title for warning in found]


@pytest.mark.parametrize(
    ("lengths", "sets", "titles"),
    [
        # Rounds that carry completions begin with short ones and end with what was left.
        ([3, 5, 7, 7, 20], [CARRY], []),
        ([3, 5, 7, 7, 20], [], ["Length hacking"]),
        ([3, 5, 7, 15, 9], [CARRY], ["Length hacking"]),
        # Lags grow with the lengths.
        (GROWING, [CARRY, "rl.partial.max_lag=5"], ["Length hacking"]),
        (GROWING, [CARRY, "rl.staleness=3"], ["Length hacking"]),
        ([3, 7, 7, 7, 20], [CARRY, "rl.partial.max_lag=1"], []),
    ],
)
def test_lengths_are_compared_from_the_round_on_that_has_long_completions(lengths, sets, titles):
    assert of_lengths(lengths, sets) == titles


def test_a_run_with_carried_completions_is_not_told_of_refills():
    for sets, told in (([], True), ([CARRY], False)):
        recipe = load_recipe("smoke", sets=["rl.rounds=3", *sets]).model_dump(mode="json")
        series = {"round": [5, 6, 7], "zero_variance": [0.8] * 3, "pass_rate": [0.0] * 3}
        (warning,) = run_warnings({"recipe": recipe, "nodes": {}}, series, {}, {})
        assert warning.title == "Dead groups" and ("rl.refills" in warning.text) is told


@pytest.mark.parametrize(
    ("lengths", "sets", "earlier", "shared", "titles"),
    [
        # Behind the fork completions are carried: the first two rounds there lack the long ones.
        ([9, 9, 9, 4, 6, 9, 9, 9], [CARRY], ["rl.rounds=5"], 3, []),
        ([4, 4, 4, 2, 3, 5, 9, 9], [CARRY], ["rl.rounds=5"], 3, ["Length hacking"]),
        # The fork leaves them out: its first round has what was left.
        ([3, 5, 7, 7, 15], [], [CARRY, "rl.rounds=9"], 4, []),
        ([3, 5, 7, 7, 9, 15], [], [CARRY, "rl.rounds=9"], 4, ["Length hacking"]),
    ],
)
def test_lengths_of_a_fork_are_compared_by_the_settings_of_each_round(lengths, sets, earlier, shared, titles):
    assert of_lengths(lengths, sets, earlier, shared) == titles


@pytest.mark.parametrize(("worst", "titles"), [(0.0103, []), (0.06, ["Stale rollouts"])])
def test_rollouts_of_an_older_policy_are_no_disagreement(worst, titles):
    found = round_warnings(HEALTHY | {"mismatch_kl": [0.0, worst]}, {"off_policy": True})
    assert [w.title for w in found] == titles


@pytest.mark.parametrize(
    ("scores", "titles"),
    [([0.532, 0.529, 0.531], ["Flat reward model"]), ([0.5, 0.6, 0.7], []), ([0.532, 0.531], [])],
)
def test_a_reward_model_that_does_not_move_is_named(scores, titles):
    series = HEALTHY | {"pass_rate": [0.52, 0.7, 0.84], "reward_model": scores}
    assert [w.title for w in round_warnings(series, {}, ["model"])] == titles


def test_a_reward_that_compares_and_is_called_alone_is_told_its_setting():
    scores = [{"alike": ["rank", "style"]}, {"alike": ["rank"]}]
    record = {"nodes": {f"round-{i:03d}.score": {"metrics": {"reward": 0.0} | m} for i, m in enumerate(scores)}}
    (warning,) = run_warnings(record, {}, {}, {})
    assert warning.title == "Reward without a difference"
    assert "“rank” gave all" in warning.text and "rl.score.rewards.rank.batch: group" in warning.text
    record["nodes"]["round-002.score"] = {"metrics": {"reward": 1.0}}
    assert run_warnings(record, {}, {}, {}) == []


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"heldout_accuracy": 0.55, "calibration_error": 0.1}, "it ranks 55 % of the held-out pairs"),
        ({"heldout_accuracy": 0.9, "calibration_error": 0.271}, "off by 0.27"),
        ({"heldout_accuracy": 0.9, "calibration_error": 0.1}, None),
    ],
)
def test_a_weak_reward_model_is_named(metrics, said):
    found = run_warnings({"nodes": {"reward": {"metrics": metrics}}}, {}, {}, {})
    assert said in found[0].text if said else not found


def test_a_policy_that_was_only_cut_off_is_named_whatever_it_scores():
    policy = {"score": 0.0, "score_low": 0.0, "score_high": 0.0, "truncated": 0.896}
    better = policy | {"score": 0.8, "score_low": 0.7, "score_high": 0.9, "truncated": 0.0}
    (warning,) = run_warnings({}, {}, {"base": policy, "sft": better}, {})
    assert warning.title == "Cut off" and "90 % of the completions of base" in warning.text
