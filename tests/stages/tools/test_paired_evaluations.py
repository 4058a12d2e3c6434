"""Two evaluations are compared only where one and the same question was put to both policies, and judged alike."""

import json

import pytest

from rlhf.stages.evaluate import Config
from rlhf.stages.tools.paired_evaluations import paired
from tests.stages.gate.support import Lab

COUNT = 12
CODE = {"module:mine": "a", "package:math-verify": "0.5.2"}
SETTINGS = {"judge": "matches", "judge_arguments": {"pattern": "^[0-9]+$"}, "samples": 2, "max_tokens": 8}


@pytest.fixture
def evaluated(tmp_path):
    """Makes the evaluation of a policy with these settings, and these digests of code."""
    lab = Lab(tmp_path)
    data = lab.data(COUNT)

    def make(score, code=None, raw=False, metadata=(), asked=(1,), unscored=0, **settings):
        given = SETTINGS | settings
        config = given if raw else Config.model_validate(given).model_dump(mode="json")
        policy = lab.policy("one", data)
        scores = [[None, None]] * unscored + [[score, score]] * (COUNT - unscored)
        return lab.evaluation(policy, data, scores, config=config, sources=code or {}, metadata=metadata, asked=asked)

    return make


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"judge_arguments": {"pattern": ".*"}}, 'judge_arguments.pattern: "^[0-9]+$" -> ".*"'),
        ({"temperature": 0.0}, "temperature: 1.0 -> 0.0"),
        ({"max_tokens": 64}, "max_tokens: 8 -> 64"),
        ({"judge": "exact_match", "judge_arguments": {}}, 'judge: "matches" -> "exact_match"'),
        ({"seconds": 1.0}, "seconds: 10.0 -> 1.0"),
        ({"samples": 1}, "samples: 2 -> 1"),
        ({"code": {"module:mine": "b"}}, 'module:mine: "a" -> "b"'),
        ({"code": CODE | {"package:math-verify": "0.9.0"}}, 'package:math-verify: "0.5.2" -> "0.9.0"'),
        ({"code": {"module:mine": "a"}}, "package:math-verify: "),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_other_settings_are_told_with_both_values_and_nothing_is_better(evaluated, change, told):
    found = paired(evaluated(0.0, CODE), evaluated(1.0, **({"code": CODE} | change)))
    assert found.difference is None and "they were evaluated with other settings or code" in found.reason
    assert told in found.reason


def test_a_prompt_under_another_system_prompt_is_another_one(evaluated):
    plain, told = evaluated(0.0), evaluated(1.0, asked=[1, 9])
    found = paired(plain, told)
    assert found.difference is None and found.places == []
    assert found.reason == "they have no prompt in common, or other system prompts"
    assert paired(told, told).difference is not None


def test_the_problems_of_a_difference_are_those_with_a_score_on_both_sides(evaluated):
    found = paired(evaluated(0.0), evaluated(1.0, unscored=5))
    assert found.difference is not None and found.difference.problems == COUNT - 5 and len(found.places) == COUNT


def test_what_changes_no_verdict_does_not_matter(evaluated):
    further = {"polite": {"function": "matches", "arguments": {"pattern": "please"}}}
    other = evaluated(1.0, judges=further, problems=50, shard_prompts=3, workers=5, every=2, max_failed_fraction=0.5)
    found = paired(evaluated(0.0), other)
    assert found.reason == "" and found.difference is not None and found.difference.verdict == "better"


def test_judges_of_the_same_code_and_packages_are_compared(evaluated):
    assert paired(evaluated(0.0, CODE), evaluated(1.0, dict(reversed(CODE.items())))).difference is not None


def test_a_problem_whose_metadata_has_changed_is_another_one(evaluated):
    old = [json.dumps({"tests": [place], "level": 1}) for place in range(COUNT)]
    # The same content in another order, and one problem whose tests are others.
    new = [json.dumps({"level": 1, "tests": [place]}) for place in range(COUNT)]
    new[3] = json.dumps({"level": 1, "tests": [3, 4]})
    found = paired(evaluated(0.0, metadata=old), evaluated(1.0, metadata=new))
    assert found.places == [(place, place) for place in range(COUNT) if place != 3]
    assert found.difference is not None and found.difference.problems == COUNT - 1


def test_settings_of_another_version_are_compared_as_they_are(evaluated):
    old = evaluated(0.0, raw=True, judge_model="small")
    assert paired(old, evaluated(1.0, raw=True, judge_model="small")).difference is not None
    assert 'judge_model: "small" -> "large"' in paired(old, evaluated(1.0, raw=True, judge_model="large")).reason
