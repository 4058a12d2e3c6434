"""A policy gains nothing by what has no score, its own or the champion's, nor by losses that a sample has missed."""

import numpy as np
import pytest

from rlhf.stages.gate.decide import compare
from rlhf.stages.gate.settings import Config
from rlhf.tuning.evaluation.verdicts import Judged

pytestmark = pytest.mark.slow

COUNT = 60
TIMEOUT = "took longer than 10 s"


@pytest.fixture
def evaluated(lab):
    """Makes the evaluation of a policy: of each place and sample a score and a failure, by two judges."""
    data = lab.data(COUNT)

    def make(name, decides, polite=lambda i, s: (1.0, None)):
        tables, failed = [], []
        for of in (decides, polite):
            tables.append([[failure or score for score, failure in (of(i, 0), of(i, 1))] for i in range(COUNT)])
            failed.append(sum(isinstance(value, str) for row in tables[-1] for value in row))
        known = [0.0 if isinstance(value, str) else value for row in tables[1] for value in row if value is not None]
        further = {"polite": {"score": sum(known) / len(known), "judge_failures": failed[1]}}
        metrics = {"score": 0.5, "judge_failures": failed[0], "judges": further}
        return lab.evaluation(lab.policy(name, data), data, *tables, **metrics)

    return make


def right(i, s):
    return float(i % 2), None


def test_a_judge_that_ran_out_of_time_on_the_champion_makes_no_better_policy(lab, evaluated):
    busy = evaluated("old", lambda i, s: (None, TIMEOUT) if i % 2 and i < 28 else right(i, s))
    found, _ = lab.decide(evaluated("new", right), busy)
    assert found["decision"] == "refused" and found["difference"]["mean"] == 0
    # Of 14 problems the champion has no score at all.
    assert (found["difference"]["problems"], found["difference"]["without"]) == (COUNT - 14, 14)
    assert "14 without a score" in found["reasons"][0]


def test_a_judge_that_the_policy_breaks_counts_against_it(lab, evaluated):
    fails = evaluated("new", lambda i, s: (None, TIMEOUT) if i % 4 == 3 else (1.0, None))
    found, _ = lab.decide(fails, evaluated("old", lambda i, s: (1.0, None)))
    assert found["difference"]["mean"] == pytest.approx(-0.25) and found["difference"]["unscored"] == COUNT // 2
    assert "30 completions without a score count as the lowest" in found["reasons"][0]


@pytest.mark.parametrize("samples", [(0, 1), (0,)], ids=["problems", "samples"])
def test_a_policy_to_whose_answers_the_judge_does_not_apply_does_not_win_on_the_rest(lab, evaluated, samples):
    old = evaluated("old", lambda i, s: (float(i % 5 < 3), None))
    new = evaluated("new", lambda i, s: (None, None) if i >= 20 and s in samples else (1.0, None))
    found, _ = lab.decide(new, old)
    lost = (COUNT - 20) * len(samples)
    assert (found["difference"]["problems"], found["difference"]["unscored"]) == (COUNT, lost)
    assert found["difference"]["mean"] == pytest.approx(1 - lost / (2 * COUNT) - 0.6)


@pytest.mark.parametrize("lost", [(None, TIMEOUT), (None, None)], ids=["failed", "does not apply"])
def test_a_problem_without_a_score_of_either_counts_for_nobody(lab, evaluated, lost):
    def with_few(score):
        return lambda i, s: lost if i < 10 else (score, None)

    found, _ = lab.decide(evaluated("new", with_few(1.0)), evaluated("old", with_few(0.0)))
    assert found["decision"] == "promoted"
    assert [found["difference"][k] for k in ("problems", "without", "unscored")] == [COUNT - 10, 10, 0]


def test_scores_below_none_make_a_failure_no_gain(lab, evaluated):
    found, _ = lab.decide(evaluated("new", lambda i, s: (None, TIMEOUT)), evaluated("old", lambda i, s: (-3.0, None)))
    assert found["difference"]["mean"] == 0


def test_failures_lower_no_bar_and_pass_none(lab, evaluated):
    def fails(to, score):
        return lambda i, s: (None, TIMEOUT) if i < to else (score, None)

    whole, half = evaluated("old", right, fails(0, 1.0)), evaluated("older", right, fails(30, 1.0))
    worse = evaluated("new", right, fails(0, 0.7))
    for other in (whole, half):
        found, _ = lab.decide(worse, other, guards={"polite": {"fall": 0.2}})
        assert "polite 0.7 is below 0.8 (fall 0.2 from 1 of champion)" in found["reasons"]
    # Where less is better, what its judge failed on counts as the most.
    rude = evaluated("rude", right, fails(6, 0.0))
    found, _ = lab.decide(rude, evaluated("old", right, fails(0, 0.0)), guards={"polite": {"rise": 0.05, "most": 0.05}})
    assert "polite 0.1 is above 0.05" in found["reasons"]
    assert "polite 0.1 is above 0.05 (rise 0.05 from 0 of champion)" in found["reasons"]


def test_a_failure_counts_as_the_lowest_or_highest_score_of_its_own_judge(lab, evaluated):
    # The other judge's scores go to 800.
    def polite(i, s):
        return (None, TIMEOUT) if (i, s) == (0, 0) else (0.0, None)

    rude = evaluated("rude", lambda i, s: (800.0, None), polite)
    old = evaluated("old", lambda i, s: (700.0, None), lambda i, s: (0.0, None))
    found, _ = lab.decide(rude, old, guards={"polite": {"rise": 0.05}})
    assert found["decision"] == "promoted"
    # Scores below 0: half of the failures of a judge that gives -3 are no -1.5.
    worse = evaluated("worse", right, lambda i, s: (None, TIMEOUT) if s else (-3.0, None))
    before = evaluated("before", right, lambda i, s: (-1.0, None))
    found, _ = lab.decide(worse, before, floors={"polite": -1.6}, guards={"polite": {"fall": 0.6}})
    told = ["polite -3 is below -1.6", "polite -3 is below -1.6 (fall 0.6 from -1 of champion)"]
    assert set(told) <= set(found["reasons"])


def test_what_a_judge_does_not_apply_to_passes_no_bound(lab, evaluated):
    few = evaluated("few", right, lambda i, s: (1.0, None) if i == 0 else (None, None))
    found, _ = lab.decide(few, evaluated("old", right), floors={"polite": 0.9}, guards={"polite": {"fall": 0.1}})
    assert "polite 0.01667 is below 0.9" in found["reasons"]
    assert "polite 0.01667 is below 0.9 (fall 0.1 from 1 of champion)" in found["reasons"]


@pytest.mark.parametrize("lost", [(None, TIMEOUT), (None, None)], ids=["failed", "does not apply"])
def test_a_bar_of_the_champion_is_held_to_the_problems_that_both_have_a_score_of(lab, evaluated, lost):
    # Right on 54 of 60, of which its judge has lost six: 48 of 54. The new one is right on 47 of these.
    old = evaluated("old", lambda i, s: (0.0, None), lambda i, s: lost if i < 6 else (float(i < 54), None))
    new = evaluated("new", lambda i, s: (1.0, None), lambda i, s: (float(i < 53), None))
    bounds = {"polite": {"fall": 0.01}}
    found, _ = lab.decide(new, old, guards=bounds, floors={"polite": 0.88})
    assert found["reasons"] == ["polite 0.8704 is below 0.8789 (fall 0.01 from 0.8889 of champion)"]
    better = evaluated("better", lambda i, s: (1.0, None), lambda i, s: (float(i < 54), None))
    assert lab.decide(better, old, guards=bounds)[0]["decision"] == "promoted"


def test_a_champion_of_whose_answers_the_judge_has_no_score_sets_no_bar(lab, evaluated):
    old = evaluated("old", lambda i, s: (None, TIMEOUT if i < 5 else None))
    new = evaluated("new", lambda i, s: (0.0, None) if i < 5 else (None, None), lambda i, s: (1.0, None))
    # Failures count as 0 in an evaluation's own figures.
    assert old.metrics["score"] is not None
    found, _ = lab.decide(new, old, metric="polite", guards={"score": {"fall": 0.01}})
    assert found["decision"] == "refused" and any("score" in r and "no figure" in r for r in found["reasons"])


def table(gaps: np.ndarray) -> tuple[Judged, Judged]:
    """Two policies whose scores differ by these gaps, between 0 and 1."""
    gaps = np.asarray(gaps, np.float64)[:, None]
    before = np.where(gaps < 0, -gaps, 0.0)
    places, groups = list(range(len(gaps))), [str(i) for i in range(len(gaps))]
    answers: list[list[str | None]] = [[None]] * len(gaps)
    none = np.zeros(gaps.shape, bool)
    return tuple(Judged(places, groups, scores, answers, none) for scores in (before, before + gaps))


@pytest.mark.parametrize(
    ("problems", "lost"),
    [(100, 0.02), (150, 0.01), (500, 0.005)],
)
def test_many_small_gains_and_a_few_whole_losses_are_no_better_policy_more_often_than_said(problems, lost):
    # Gains of a quarter on four times as many problems as are lost whole: the true mean is 0.
    rng = np.random.default_rng(0)
    nights, promoted = 200, 0
    for _ in range(nights):
        gaps = rng.choice([0.25, -1.0, 0.0], problems, p=[4 * lost, lost, 1 - 5 * lost])
        compared = compare(Config(), *table(gaps), set())
        promoted += compared.is_above(0.0)
    # What the level promises of so many; the signs alone promote three times as many and more.
    assert promoted <= 0.025 * nights, promoted


def test_what_is_at_its_bound_holds_in_any_order_of_the_rows(lab):
    data = lab.data(150)
    config = {"floors": {"score": 0.6}}
    missed = 0
    for seed in range(5):
        scores = np.random.default_rng(seed).permutation([1.0] * 90 + [0.0] * 60)
        mean = float(np.mean([s * (1 + 1e-16 * seed) for s in scores])) - 1e-16 * seed
        policy = lab.policy(f"p{seed}", data)
        found, _ = lab.decide(lab.evaluation(policy, data, [[s, s] for s in scores], score=mean), **config)
        missed += found["decision"] != "promoted"
    assert missed == 0
    for before, bound in ((0.8, {"fall": 0.1}), (0.7, {"rise": 0.1})):
        after = 0.7 if "fall" in bound else 0.8
        one = lab.evaluation(lab.policy("old", data), data, [[0.0, 0.0]] * 150, polite=before)
        two = lab.evaluation(lab.policy("new", data), data, [[1.0, 1.0]] * 150, polite=after)
        assert lab.decide(two, one, guards={"polite": bound})[0]["decision"] == "promoted"
