"""A sample's own fault is content and bears a limit; totals leave it out. An outage ends the stage (R25)."""

import errno
import http.client
import urllib.error

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf.tuning.algorithms.advantages import group_advantages
from rlhf.tuning.rewards.failures import Outage, TooManyFailures, check_failures, kind_of, tallied
from rlhf.tuning.rewards.samples import Outcome, outcome_of
from rlhf.tuning.rewards.totals import Part, RewardFailed, bounded, scales_of, totals

GOOD, BAD, NONE = Outcome(1.0), Outcome(None, "KeyError: 'x'"), Outcome(None)


def caused(error, cause):
    error.__cause__ = cause
    return error


class ServerError(Exception):
    status_code = 503


ServerError.__module__ = "some_client.errors"
TimedOut = type("ReadTimeout", (type("Timeout", (OSError,), {"__module__": "requests.exceptions"}),), {})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError(), "outage"),
        (http.client.RemoteDisconnected(), "outage"),
        (urllib.error.URLError("name or service not known"), "outage"),
        (urllib.error.HTTPError("u", 503, "busy", None, None), "outage"),
        (urllib.error.HTTPError("u", 401, "no such key", None, None), "outage"),
        (urllib.error.HTTPError("u", 400, "context too long", None, None), "sample"),
        *((urllib.error.HTTPError("u", status, "no", None, None), "refusal") for status in (403, 404, 451, 500)),
        (caused(Outage("busy"), urllib.error.HTTPError("u", 403, "no", None, None)), "outage"),
        (ServerError(), "outage"),
        (TimedOut(), "outage"),
        (OSError(errno.ENOSPC, "disk full"), "outage"),
        (OSError(errno.EIO, "a disk failed"), "outage"),
        (caused(ValueError("judge"), ConnectionResetError()), "outage"),
        (Outage("later"), "outage"),
        (FileNotFoundError(errno.ENOENT, "x"), "sample"),
        # Raised by hand in rewards that limit their own time.
        (TimeoutError("my own limit"), "sample"),
        # Of code that a completion wrote.
        (ModuleNotFoundError("no module x"), "sample"),
        (KeyError("x"), "sample"),
    ],
    ids=repr,
)
def test_whose_fault_an_exception_is(error, kind):
    assert kind_of(error) == kind


def test_a_few_failures_pass_and_more_end_the_stage_with_the_commonest_reason():
    # A tenth of 11, rounded up, is 2.
    check_failures({"a": [GOOD] * 9 + [BAD] * 2}, 0.1)
    check_failures({"a": [BAD], "b": [NONE]}, 0.1)
    column = [GOOD, Outcome(None, "rare"), BAD, BAD, NONE]
    with pytest.raises(TooManyFailures, match=r"reward a failed on 3 of 5 .*2 times, first on completion 2.*KeyError"):
        check_failures({"b": [GOOD] * 5, "a": column}, 0.1)
    with pytest.raises(TooManyFailures, match=r"reward a \(mine:f\) failed on 3 of 5 .*, or raise max_failed_fraction"):
        check_failures({"a": column}, 0.1, functions={"a": "mine:f"})
    with pytest.raises(TooManyFailures, match="give the same command again; no failure is kept"):
        check_failures({"a": [BAD] * 5}, 0.1)
    check_failures({"a": [BAD] * 5}, 1.0)
    with pytest.raises(TooManyFailures):
        check_failures({"a": [GOOD] * 99 + [BAD]}, 0.0)


def test_one_outage_ends_the_stage_whatever_the_limit():
    with pytest.raises(Outage, match="no verdict on 1 of 3 completions: refused"):
        check_failures({"a": [GOOD, BAD, Outcome(None, "refused", "outage")]}, 1.0)


def test_what_does_not_apply_is_counted_apart():
    assert tallied([GOOD, BAD, BAD, NONE]) == tallied([BAD, NONE, GOOD, BAD])
    found = tallied([GOOD, BAD, BAD, NONE])
    assert (found.failed, found.unscored, found.reasons) == (2, 1, {"KeyError: 'x'": 2})


def test_a_number_that_is_not_finite_is_a_failure():
    assert outcome_of(float("nan")) == Outcome(None, "not finite: nan")
    # Finite, and infinite in a table of float32, where it would be no failure and no total.
    assert outcome_of(-1e39) == Outcome(None, "beyond 1e+30, which no total can hold: -1e+39")
    assert outcome_of(1e29).value == 1e29
    assert (outcome_of(None), outcome_of(0.5)) == (Outcome(None), Outcome(0.5))


GROUPS = [0, 0, 1, 1]


def given(*values):
    """Outcomes: a text is the cause of a failure."""
    return [Outcome(None, v) if isinstance(v, str) else Outcome(v) for v in values]


def test_a_failure_drops_counts_as_zero_or_stops():
    column = given(1.0, "timeout", 1.0, 0.0)
    found, failures = totals([column], [Part("a")], GROUPS)
    assert np.isnan(found[1]) and np.isfinite(found[[0, 2, 3]]).all() and failures[1] == "a: timeout"
    assert totals([column], [Part("a", on_failure="zero")], GROUPS)[0].tolist() == [1.0, 0.0, 1.0, 0.0]
    with pytest.raises(RewardFailed, match="reward a failed on completion 1 of the round: timeout"):
        totals([column], [Part("a", on_failure="stop")], GROUPS)


def test_a_completion_to_which_no_reward_applies_leaves_the_round_or_counts_as_zero():
    columns = [given(None, 1.0, None, "timeout"), given(None, None, 2.0, None)]
    parts = [Part("a", on_failure="zero"), Part("b")]
    found, failures = totals(columns, parts, GROUPS)
    np.testing.assert_array_equal(found, [np.nan, 1.0, 2.0, 0.0])
    assert failures == [None, None, None, "a: timeout"]
    assert totals(columns, parts, GROUPS, "zero")[0].tolist() == [0.0, 1.0, 2.0, 0.0]


def test_the_size_of_a_reward_does_not_round_away_what_tells_a_group_apart():
    near, far = ([Outcome(value=base + 0.01 * i) for i in range(len(GROUPS))] for base in (0.0, 1e6))
    part = Part("a", normalise="group")
    np.testing.assert_allclose(totals([far], [part], GROUPS)[0], totals([near], [part], GROUPS)[0], atol=1e-5)


def test_totals_on_a_given_scale_and_where_the_round_ties():
    part = Part("a", normalise="batch")
    every, some = given(1.0, 3.0, 10.0, 14.0), given(10.0, 20.0)
    whole = totals([every], [part], GROUPS)[0]
    assert totals([some], [part], [0, 1], scales=scales_of([every], [part]))[0][0] == whole[2]
    tied = scales_of([given(2.0, 2.0, None)], [part])
    # Only centred: there is no deviation to divide by.
    np.testing.assert_allclose(totals([some], [part], [0, 1], scales=tied)[0], [8.0, 18.0], rtol=2e-4)
    assert scales_of([every], [Part("a", normalise="group")]) == {}


@pytest.mark.parametrize("values", [[0.1] * 3, [0.9] * 100, [0.1 + 0.2, 0.3, 0.3], [1e-12] * 5, [0.0, 0.0], []])
def test_rewards_that_are_equal_but_for_rounding_have_no_deviation(values):
    """The mean of three times 0.1 is not 0.1, and a deviation of 1e-17 would make a refill's total 5000."""
    mean, deviation = scales_of([given(*values)], [Part("a", normalise="batch")])["a"]
    assert deviation == 1.0 and mean == pytest.approx(np.mean(values) if values else 0.0)


def test_a_value_whose_square_float32_cannot_hold_has_failed():
    """Its group would have a deviation that is infinite, and advantages of 0."""
    said = "1e+20 with weight 1 is beyond 1e+15: clip it, or lower its weight"
    assert bounded(Outcome(1e20), Part("a")) == Outcome(None, said)
    assert bounded(Outcome(-1e14), Part("a", weight=100.0)).failure is not None
    for outcome in (Outcome(1.0), Outcome(None), Outcome(None, "timeout")):
        assert bounded(outcome, Part("a", weight=100.0)) == outcome
    assert bounded(Outcome(1e20), Part("a", clip=(-1.0, 1.0))) == Outcome(1e20)
    values = np.asarray([1e15, -1e15, 0.0, 0.0], np.float32)
    for normalisation in ("std", "batch-std"):
        found = np.asarray(group_advantages(jnp.asarray(values), np.zeros(4, int), normalisation=normalisation))
        np.testing.assert_allclose(found, [1.2247, -1.2247, 0, 0], atol=1e-3)
