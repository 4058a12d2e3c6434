"""Each state of the rounds that teaches nothing is named in the report."""

import pytest

from flows.report.advice import round_warnings

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
    ],
)
def test_a_state_that_teaches_nothing_has_its_own_name(change, title):
    assert [w.title for w in round_warnings(HEALTHY | change, {})] == ([] if title is None else [title])


@pytest.mark.parametrize(("worst", "titles"), [(0.0103, []), (0.06, ["Stale rollouts"])])
def test_rollouts_of_an_older_policy_are_no_disagreement(worst, titles):
    found = round_warnings(HEALTHY | {"mismatch_kl": [0.0, worst]}, {"off_policy": True})
    assert [w.title for w in found] == titles
