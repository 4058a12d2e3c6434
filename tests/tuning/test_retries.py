"""Retries: as many tries as asked for, and none for an error that would come again."""

import pytest

from rlhf.tuning import retries
from rlhf.tuning.retries import pause, retried


@pytest.fixture
def waits(monkeypatch):
    """The waits in place of waiting."""
    found = []
    monkeypatch.setattr(retries.time, "sleep", found.append)
    return found


def failing(times, error=OSError):
    """A function that raises so often, and then returns how often it was called."""
    calls = []

    def action():
        calls.append(1)
        if len(calls) <= times:
            raise error(f"try {len(calls)}")
        return len(calls)

    return action


@pytest.mark.parametrize(("failures", "expected"), [(0, []), (1, [0.5]), (3, [0.5, 1.0, 2.0])])
def test_waits_double_until_a_try_succeeds(waits, failures, expected):
    assert retried(failing(failures), tries=4, first_seconds=0.5) == failures + 1
    assert waits == expected


def test_the_error_of_the_last_try_is_raised(waits):
    with pytest.raises(OSError, match="try 3"):
        retried(failing(9), tries=3, first_seconds=1.0)
    assert waits == [1.0, 2.0]


def test_an_error_that_does_not_pass_is_raised_at_once(waits):
    with pytest.raises(KeyError, match="try 1"):
        retried(failing(9, KeyError), tries=3, first_seconds=1.0, passing=lambda e: isinstance(e, OSError))
    assert waits == []


def test_a_pause_has_a_limit():
    assert [pause(n, 0.25, 1.0) for n in range(4)] == [0.25, 0.5, 1.0, 1.0]
