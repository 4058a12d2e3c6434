"""A sample's own fault is content and bears a limit; an outage is none and ends the stage (R25)."""

import errno
import http.client
import urllib.error

import pytest

from rlhf.tuning.rewards.failures import Outage, TooManyFailures, check_failures, kind_of, tallied
from rlhf.tuning.rewards.samples import Outcome, outcome_of

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
