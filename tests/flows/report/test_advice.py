"""Each state of the rounds that teaches nothing is named in the report."""

import pytest

from rlhf.flows.report.advice import round_warnings, run_warnings

HEALTHY = {"entropy": [1.0] * 3, "kl": [0.01] * 3, "mean_length": [5.0] * 3, "zero_variance": [0.3] * 3}


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({}, None),
        ({"entropy": [0.9, 0.2, 0.01]}, "Entropy collapse"),
        ({"zero_variance": [0.6, 0.7, 0.8], "pass_rate": [0.0, 0.05, 0.0]}, "Dead groups"),
        ({"zero_variance": [0.95, 0.96, 1.0], "pass_rate": [0.9, 0.95, 1.0]}, "Reward saturation"),
        ({"mean_length": [5.0, 8.0, 12.0], "pass_rate": [0.4, 0.4, 0.3]}, "Length hacking"),
        ({"mean_length": [5.0, 8.0, 12.0], "pass_rate": [0.1, 0.4, 0.8]}, None),
        ({"effective_sample_size": [0.99, 0.4, None]}, "Few effective samples"),
        ({"grad_norm": [1.0, 1.1, 0.9, 40.0]}, "Gradient spike"),
        ({"mismatch_kl": [1e-6, 0.02, 1e-6]}, "Mismatch"),
        ({"drift_kl": [0.02, 0.13, 0.02]}, "Drift within a round"),
        ({"kl": [0.0, 0.006, 0.006, 0.367]}, "KL growth"),
        ({"kl": [0.0, 0.1, 0.3, 5.0]}, "KL growth"),
        ({"zero_variance": [0.09, 0.5, 0.55, 0.59]}, "Reward saturation"),
    ],
)
def test_a_state_that_teaches_nothing_has_its_own_name(change, title):
    assert [w.title for w in round_warnings({}, HEALTHY | change)] == ([] if title is None else [title])


@pytest.mark.parametrize(("worst", "titles"), [(0.0103, []), (0.06, ["Stale rollouts"])])
def test_rollouts_of_an_older_policy_are_no_disagreement(worst, titles):
    record = {"recipe": {"rl": {"update": {"off_policy": True}}}}
    found = round_warnings(record, HEALTHY | {"mismatch_kl": [0.0, worst]})
    assert [w.title for w in found] == titles


@pytest.mark.parametrize(
    ("scores", "titles"), [([0.532, 0.529, 0.531], ["Flat reward model"]), ([0.5, 0.6, 0.7], []), ([0.532, 0.531], [])]
)
def test_a_reward_model_that_does_not_move_is_named(scores, titles):
    series = HEALTHY | {"pass_rate": [0.52, 0.7, 0.84], "reward_model": scores}
    record = {"recipe": {"rl": {"score": {"rewards": {"model": {"function": "reward_model"}}}}}}
    assert [w.title for w in round_warnings(record, series)] == titles


def test_rewarded_code_that_may_deceive_its_tests_is_counted():
    record = {"nodes": {f"round-{i:03d}.score": {"metrics": {"suspect_code": i}} for i in range(3)}}
    assert [w.text[:1] for w in run_warnings(record, {}, {}, {}) if w.title == "Suspect code"] == ["3"]
    assert run_warnings({"nodes": {}}, {}, {}, {}) == []


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
    (warning,) = run_warnings({}, {}, {"base": policy, "sft": policy}, {})
    assert warning.text.startswith("90 % of the completions of base and 90 % of the completions of SFT reached")
