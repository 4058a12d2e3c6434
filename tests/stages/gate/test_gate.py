"""The gate promotes what is better on the same problems and keeps to every bound, and says what others missed."""

import json

import pytest

from rlhf.stages.gate import stage
from rlhf.stages.gate.settings import FLIPS, RESAMPLES, Config, Gate, Guard
from rlhf.stages.store.artifacts import ArtifactError
from rlhf.tuning.evaluation import permutation, statistics
from tests.stages.support import context

COUNT = 40
BAD, GOOD = [[0.0, 0.0]] * COUNT, [[1.0, 1.0]] * COUNT
MIXED = [[1.0, 0.0]] * COUNT


@pytest.fixture
def sides(lab):
    """Makes evaluations of a champion and a new policy with these verdicts and further metrics."""

    def make(before, after, other=None, **new):
        data = lab.data(COUNT)
        one = lab.evaluation(lab.policy("one", data), data, before, **(other or {}))
        return lab.evaluation(lab.policy("two", data), data, after, **new), one

    return make


def missed(found):
    return {check["name"] for check in found["checks"] if not check["holds"]}


def test_a_better_policy_is_promoted_with_its_figures(lab, sides):
    found, policy = lab.decide(*sides(BAD, GOOD))
    assert found["decision"] == "promoted" and found["reasons"] == []
    assert found["candidate"] == policy.digest and found["champion"] not in (None, policy.digest)
    assert found["difference"]["mean"] == 1 and found["difference"]["problems"] == COUNT
    assert found["difference"]["low"] > 0.8
    written = next(path for path in lab.folder.glob("*/decision.json"))
    assert json.loads(written.read_text()) == found


def test_a_difference_that_the_problems_cannot_tell_from_none_is_refused(lab, sides):
    better_by_one = [[1.0, 1.0], *MIXED[1:]]
    found, _ = lab.decide(*sides(MIXED, better_by_one))
    assert found["decision"] == "refused" and missed(found) == {"min_difference"}
    assert found["difference"]["mean"] > 0 >= found["difference"]["low"]
    assert "the lower end is not above 0" in found["reasons"][0]


def test_the_lower_end_must_be_above_the_least_difference(lab, sides):
    sides = sides(BAD, MIXED)
    assert lab.decide(*sides, min_difference=0.3)[0]["decision"] == "promoted"
    assert missed(lab.decide(*sides, min_difference=0.6)[0]) == {"min_difference"}


def test_another_judge_can_decide(lab, sides):
    sides = sides(GOOD, BAD, {"polite": 0.0}, polite=1.0)
    assert lab.decide(*sides, metric="polite")[0]["decision"] == "promoted"
    worse, _ = lab.decide(*sides)
    assert worse["decision"] == "refused" and worse["difference"]["high"] < 0


def test_the_choice_among_several_asks_for_a_smaller_p_of_the_test(lab, sides):
    # 12 of 40 problems are better and 3 worse: enough for one policy, too little for the best of many.
    before = [[0.0, 0.0]] * 12 + [[1.0, 1.0]] * 3 + MIXED[15:]
    after = [[1.0, 1.0]] * 12 + [[0.0, 0.0]] * 3 + MIXED[15:]
    sides = sides(before, after)
    one, many = (lab.decide(*sides, candidates=n)[0] for n in (1, 40))
    assert one["decision"] == "promoted" and many["decision"] == "refused"
    # Probabilities are drawn as finely as their level asks.
    drawn = dict.fromkeys(("level", "p", "signs", "bound"))
    assert one["difference"] | drawn == many["difference"] | drawn
    # Of 15 coins 12 or more are heads.
    heads = (455 + 105 + 15 + 1) / 2**15
    assert one["difference"]["clusters"] == 15
    for found in (one, many):
        assert heads <= found["difference"]["p"] < 1.1 * heads
    assert (one["difference"]["level"], many["difference"]["level"]) == pytest.approx((0.025, 0.025 / 40))
    assert "is above 0.000625 (best of 40)" in many["reasons"][0]


def test_too_few_problems_that_differ_cannot_show_it(lab, sides):
    before, after = [[0.0, 0.0]] * 5 + MIXED[5:], [[1.0, 1.0]] * 5 + MIXED[5:]
    found, _ = lab.decide(*sides(before, after))
    assert found["decision"] == "refused" and found["difference"]["low"] > 0
    assert found["difference"]["p"] == pytest.approx(2**-5, rel=0.1)
    assert "5 independent problems that differ cannot show it at level 0.025: p is at least 2^-5" in found["reasons"][0]
    sixth = lab.decide(*sides([[0.0, 0.0]] * 6 + MIXED[6:], [[1.0, 1.0]] * 6 + MIXED[6:]))[0]
    assert sixth["decision"] == "promoted" and sixth["difference"]["p"] == pytest.approx(2**-6, rel=0.1)


def test_a_refusal_says_p_by_both_tests(lab, sides):
    # Nine problems gain a little, none loses: such signs are rare, and so few problems could hide losses.
    before = [[0.0, 0.5]] * COUNT
    found, _ = lab.decide(*sides(before, [[0.1, 0.6]] * 9 + before[9:]))
    assert found["decision"] == "refused" and found["difference"]["low"] > 0
    assert "the larger of 0.002 by the signs of the differences and 0." in found["reasons"][0]
    assert found["difference"]["signs"] < 0.025 < found["difference"]["bound"] == found["difference"]["p"]


def test_with_a_margin_below_none_the_losses_that_may_be_hidden_count(lab, sides):
    # Of forty problems none differs: up to a tenth may be lost, and one in fifty by far.
    equal = [[float(i % 2)] * 2 for i in range(40)]
    found, _ = lab.decide(*sides(equal, equal), min_difference=-0.02)
    assert missed(found) == {"min_difference"} and found["difference"]["p"] == pytest.approx(0.98**40, rel=0.1)
    assert "p 0.4" in found["reasons"][0] and "is above 0.025" in found["reasons"][0]
    assert "by the signs" not in found["reasons"][0]
    assert lab.decide(*sides(equal, equal), min_difference=-0.1)[0]["decision"] == "promoted"
    # The best of ten has to show a tenth of that p.
    assert lab.decide(*sides(equal, equal), min_difference=-0.1, candidates=10)[0]["decision"] == "refused"


def test_every_floor_and_guard_that_is_missed_is_a_reason(lab, sides):
    sides = sides(BAD, GOOD, {"mean_length": 10.0}, mean_length=31.0, truncated=0.4, polite=0.5)
    asked = {
        "floors": {"score": 0.9, "polite": 0.8, "answered": 0.5},
        "guards": {
            "mean_length": {"most": 30, "times": 2, "rise": 25},
            "truncated": {"rise": 0.2},
            "polite": {"fall": 0.2},
        },
    }
    found, _ = lab.decide(*sides, **asked)
    assert found["decision"] == "refused"
    assert missed(found) == {
        *("floors.polite", "floors.answered", "guards.mean_length.most", "guards.mean_length.times"),
        *("guards.truncated.rise", "guards.polite.fall"),
    }
    reasons = " | ".join(found["reasons"])
    for said in (
        "polite 0.5 is below 0.8",
        "answered has no figure",
        "mean_length 31 is above 30",
        "mean_length 31 is above 20 (times 2 from 10 of champion)",
        "truncated 0.4 is above 0.3 (rise 0.2 from 0.1 of champion)",
        "polite 0.5 is below 0.8 (fall 0.2 from 1 of champion)",
    ):
        assert said in reasons
    kept = {c["name"] for c in found["checks"]} - missed(found)
    assert kept == {"min_difference", "floors.score", "guards.mean_length.rise"}


def test_a_guard_whose_figure_the_champion_alone_lacks_says_so(lab, sides):
    found, _ = lab.decide(*sides(BAD, GOOD, answered=0.9), guards={"answered": {"fall": 0.1}})
    assert "answered has no figure in the evaluation of champion" in found["reasons"][0]


def test_without_a_policy_to_compare_with_only_absolute_bounds_count(lab, sides):
    new, _ = sides(BAD, BAD)
    asked = {"floors": {"truncated": 0.0}, "guards": {"mean_length": {"most": 11, "times": 0.1}}}
    found, _ = lab.decide(new, **asked)
    assert found["decision"] == "promoted" and found["difference"] is None
    assert [c["name"] for c in found["checks"]] == ["floors.truncated", "guards.mean_length.most"]


def test_a_policy_that_was_taken_back_is_refused_whatever_it_shows(lab, sides):
    new, old = sides(BAD, GOOD)
    policy = lab.input(new, "policy")
    found, _ = lab.decide(new, old, withdrawn={policy.digest: "entry 3, too long in use"})
    assert found["decision"] == "refused" and missed(found) == {"rollback"}
    assert "entry 3, too long in use" in found["reasons"][0]


def test_the_champion_itself_is_nothing_new(lab):
    data = lab.data(COUNT)
    policy = lab.policy("one", data)
    found, _ = lab.decide(lab.evaluation(policy, data, GOOD), lab.evaluation(policy, data, GOOD))
    assert found["decision"] == "nothing new"


def test_a_run_that_breaks_a_law_is_refused(lab, sides):
    new, old = sides(BAD, GOOD)
    # It has no pass@1 in its metrics, and its verdicts give one: a law of evaluations is broken.
    inputs = {
        "candidate": new, "against": old, "policy": lab.input(new, "policy"), "champion": lab.input(old, "policy"),
        "data": lab.input(new, "data"), "node_prepare": lab.input(new, "data"), "node_evaluate.rl": new,
    }  # fmt: skip
    found = stage.run(context(Config(audit=True, against="champion"), lab.folder / "audited", inputs=inputs))
    assert found["decision"] == "refused" and missed(found) == {"audit"}
    assert "rates (" in found["reasons"][0]


def test_problems_that_a_policy_was_trained_on_are_not_compared(lab):
    tonight = lab.data(COUNT)
    # Another night had another division: it trained on ten of the problems of tonight.
    before = lab.data(1, trained=[f"q{i}" for i in range(10)])
    old = lab.evaluation(lab.policy("one", before), tonight, [[1.0, 1.0]] * 10 + BAD[10:])
    new = lab.evaluation(lab.policy("two", tonight), tonight, [[0.0, 0.0]] * 10 + GOOD[10:])
    found, _ = lab.decide(new, old)
    compared = found["difference"]
    assert compared["mean"] == 1 and (compared["problems"], compared["excluded"]) == (COUNT - 10, 10)
    assert compared["clusters"] == COUNT - 10 and compared["p"] < 1e-3
    everything = lab.data(1, trained=[f"q{i}" for i in range(COUNT)])
    known = lab.evaluation(lab.policy("three", everything), tonight, BAD)
    found, _ = lab.decide(new, known)
    assert missed(found) == {"min_difference"} and "no held-out problem is left" in found["reasons"][0]


@pytest.fixture
def overlap(lab):
    """Makes evaluations of a champion that was trained on ten of the held-out problems, and of a new policy."""

    def make(before, after, lengths=(), **new):
        tonight, last = lab.data(COUNT), lab.data(1, trained=[f"q{i}" for i in range(10)])
        one = lab.evaluation(lab.policy("one", last), tonight, before)
        return lab.evaluation(lab.policy("two", tonight), tonight, after, lengths=lengths, **new), one

    return make


def test_bounds_are_of_the_problems_that_are_compared(lab, overlap):
    # The champion knows the ten by heart: of the others the new policy is better, of all it seems worse.
    new, old = overlap([[1.0, 1.0]] * 10 + BAD[10:], [[0.0, 0.0]] * 10 + [[1.0, 1.0]] * 9 + BAD[19:])
    found, _ = lab.decide(new, old, floors={"score": 0.29}, guards={"score": {"fall": 0.0}, "pass_at_2": {"fall": 0.0}})
    assert found["decision"] == "promoted"
    assert {c["name"]: c["figure"] for c in found["checks"][1:]} == {
        name: pytest.approx(9 / 30) for name in ("floors.score", "guards.score.fall", "guards.pass_at_2.fall")
    }
    assert found["checks"][1]["said"] == "score 0.3 is at least 0.29 without the 10 problems trained on"


def test_what_a_policy_knows_by_heart_lifts_it_above_no_floor(lab):
    dirty, clean = lab.data(1, trained=[f"q{i}" for i in range(20)]), lab.data(COUNT)
    new = lab.evaluation(lab.policy("two", dirty), clean, [[1.0, 1.0]] * 28 + BAD[28:])
    old = lab.evaluation(lab.policy("one", clean), clean, BAD)
    for other in (old, None):
        found, _ = lab.decide(new, other, floors={"score": 0.6})
        assert missed(found) == {"floors.score"} and "score 0.4 is below 0.6 without the 20" in found["reasons"][0]


def test_lengths_and_judges_are_those_of_the_other_problems(lab, overlap):
    new, old = overlap(BAD, GOOD, lengths=[10] * 10 + [20] * 15 + [60] * 15, polite=0.5)
    figures = lab.decide(new, old, floors={"mean_length": 0, "truncated": 0, "polite": 0, "score_of_ended": 0})[0]
    assert {c["name"]: c["figure"] for c in figures["checks"][1:]} == {
        "floors.mean_length": 40.0, "floors.truncated": 0.5, "floors.polite": 0.5, "floors.score_of_ended": 1.0
    }  # fmt: skip


def test_a_figure_that_is_known_for_all_problems_only_is_missed(lab, overlap):
    found, _ = lab.decide(*overlap(BAD, GOOD, speed=3.0), floors={"speed": 1.0})
    assert missed(found) == {"floors.speed"}
    assert "speed cannot be judged without the 10 problems trained on" in found["reasons"][0]
    data = lab.data(COUNT)
    new, old = (lab.evaluation(lab.policy(n, data), data, s, speed=3.0) for n, s in (("two", GOOD), ("one", BAD)))
    assert lab.decide(new, old, floors={"speed": 1.0})[0]["decision"] == "promoted"


def test_a_champion_whose_training_is_not_known_is_an_error(lab):
    tonight, before = lab.data(COUNT), lab.data(1, trained=["gamma"])
    old = lab.evaluation(lab.policy("one", before), tonight, BAD)
    new = lab.evaluation(lab.policy("two", tonight), tonight, GOOD)
    lab.store.set_aside(before.stage, before.key)
    with pytest.raises(ArtifactError, match="its data .prepare/"):
        lab.decide(new, old)


def test_evaluations_of_different_problems_or_settings_are_no_pair(lab):
    one, other = lab.data(COUNT), lab.data(COUNT - 1)
    new = lab.evaluation(lab.policy("two", one), one, GOOD)
    with pytest.raises(ValueError, match="held-out problems"):
        lab.decide(new, lab.evaluation(lab.policy("one", other), other, BAD[1:]))
    # A judge that was edited while the run went on.
    edited = lab.evaluation(lab.policy("one", one), one, BAD, sources={"module:mine": "2"})
    with pytest.raises(ValueError, match="the code of module:mine"):
        lab.decide(lab.evaluation(lab.policy("two", one), one, GOOD, sources={"module:mine": "1"}), edited)


def test_settings_that_could_not_decide_are_refused():
    assert (RESAMPLES, FLIPS) == (statistics.RESAMPLES, permutation.FLIPS)
    with pytest.raises(ValueError, match="tails are less than one of the 2000 resamples.* at most 0.999"):
        Config(confidence=0.9995)
    assert Config(confidence=0.999, candidates=500).level == pytest.approx(1e-6)
    with pytest.raises(ValueError, match="best of 501 policies .* less than one of the 1000000 choices of signs"):
        Config(confidence=0.999, candidates=501)
    with pytest.raises(ValueError, match="guards nothing"):
        Guard()
    with pytest.raises(ValueError, match="String should match"):
        Gate(name="Best One")
