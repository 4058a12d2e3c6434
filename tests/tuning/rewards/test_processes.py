"""Rewards run where they can be killed (R20)."""

import math
import os
import time

from tuning.rewards.processes import evaluate


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
    return [0.5]


def samples(*texts):
    return [{"prompt": "p", "completion": t, "completion_ids": [1], "answer": "4", "metadata": {}} for t in texts]


def test_a_reward_that_loops_for_ever_costs_one_sample():
    found = evaluate(f"{__name__}:loops_on_one", {}, samples("a", "loop", "b", "c"), seconds=1.0)
    assert [o.value for o in found] == [1.0, None, 1.0, 1.0]
    assert found[1].failure == "timeout after 1 s"


def test_failures_are_rows_with_a_reason():
    found = evaluate(f"{__name__}:breaks", {}, samples("x", "raise", "nan", "none", "exit", "y"), seconds=5.0)
    assert [o.value for o in found] == [0.5, None, None, None, None, 0.5]
    assert "no such answer" in found[1].failure
    assert "not finite" in found[2].failure
    assert found[3].failure is None
    assert "status 3" in found[4].failure


def test_built_in_functions_are_found_by_name():
    found = evaluate("exact_match", {}, samples("4", " 4 ", "5"), seconds=5.0)
    assert [o.value for o in found] == [1.0, 1.0, 0.0]
