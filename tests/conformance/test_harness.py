"""The runner refuses what it does not know."""

from typing import Any

import pytest

from .harness import Case


def made(**changes: Any) -> Case:
    raw = {"id": "x", "op": "y", "params": {"a": 1}, "inputs": {"z": [1.0]}, "expected": {"loss": 1.0}} | changes
    return Case("family", raw, {})


def used(case: Case) -> Case:
    case.param("a")
    assert case["z"].shape == (1,)
    return case


def test_a_matching_case_passes() -> None:
    used(made()).check({"loss": 1.0 + 5e-7, "more": 2.0})


@pytest.mark.parametrize(
    ("changes", "got", "message"),
    [
        ({}, {"loss": 1.0 + 5e-6}, "Not equal to tolerance"),
        ({}, {}, "not computed"),
        ({}, {"loss": [1.0]}, "shape"),
        ({"params": {"a": 1, "b": None}}, {"loss": 1.0}, "parameters the runner does not know"),
        ({"inputs": {"z": [1.0], "w": 2}}, {"loss": 1.0}, "inputs the runner does not know"),
        ({"expected": {"metrics": {"m": 1.0}}}, {"metrics": {}}, "unknown metric"),
        ({"extra": 1}, {"loss": 1.0}, "unknown keys"),
        ({"compare": {"loss": "rows"}}, {"loss": 1.0}, "unknown comparison"),
    ],
)
def test_anything_unknown_fails(changes: dict[str, Any], got: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        used(made(**changes)).check(got)


def test_words_of_a_convention_are_checked() -> None:
    case = made(params={"agg": "median"})
    with pytest.raises(AssertionError, match="only"):
        case.known("agg", "mean")
