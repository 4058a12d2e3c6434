"""Rewards run where they can be killed (R20)."""

import dataclasses
import math
import os
import time

from tuning.rewards.processes import evaluate
from tuning.rewards.samples import Sample


def loops_on_one(prompts, completions, **_):
    while completions[0] == "loop":
        time.sleep(0.1)
    return [1.0]


def breaks(prompts, completions, **_):
    match completions[0]:
        case "raise":
            raise KeyError("no such answer")
        case "exit":
            os._exit(3)
        case "nan":
            return [math.nan]
        case "none":
            return [None]
        case "eat":
            return [float(len(bytearray(2**32)))]
    return [0.5]


def samples(*texts):
    return [Sample("p", t, [1], "4") for t in texts]


def test_a_reward_that_loops_for_ever_costs_one_sample():
    found = evaluate(f"{__name__}:loops_on_one", {}, samples("a", "loop", "b", "c"), seconds=1.0)
    assert [o.value for o in found] == [1.0, None, 1.0, 1.0]
    assert found[1].failure == "timeout after 1 s"


def test_failures_are_rows_with_a_reason():
    found = evaluate(f"{__name__}:breaks", {}, samples("x", "raise", "nan", "none", "exit", "eat", "y"), seconds=5.0)
    assert [o.value for o in found] == [0.5, None, None, None, None, None, 0.5]
    assert "no such answer" in found[1].failure
    assert "not finite" in found[2].failure
    assert found[3].failure is None
    assert "status 3" in found[4].failure
    assert found[5].failure == "MemoryError: more than 2048 MB"


def sees_columns(prompts, completions, *, difficulty, answer, factor, **_):
    return [factor * d + float(a) for d, a in zip(difficulty, answer, strict=True)]


def test_entries_of_the_metadata_are_columns_and_outcomes_are_told_in_order():
    given = [dataclasses.replace(s, metadata={"difficulty": i}) for i, s in enumerate(samples("a", "b", "c"))]
    told = []
    evaluate(
        f"{__name__}:sees_columns", {"factor": 2.0}, given, seconds=5.0, finished=lambda i, o: told.append((i, o.value))
    )
    assert told == [(0, 4.0), (1, 6.0), (2, 8.0)]


def test_built_in_functions_are_found_by_name():
    found = evaluate("exact_match", {}, samples("4", " 4 ", "5"), seconds=5.0)
    assert [o.value for o in found] == [1.0, 1.0, 0.0]
