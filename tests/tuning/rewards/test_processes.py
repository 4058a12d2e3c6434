"""Rewards run where they can be killed (R20), and an outage there is no verdict on a sample (R25)."""

import dataclasses
import itertools
import math
import multiprocessing
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.support import python
from tuning.rewards.calls import Call, keyword_arguments
from tuning.rewards.failures import OUTAGES, Outage
from tuning.rewards.functions import exact_match, number_match
from tuning.rewards.processes import LEFT, TRIES, attempt, call_seconds, evaluate
from tuning.rewards.samples import Sample

# Each process that calls a function of this module imports it first: as slow as a module that loads models.
if multiprocessing.parent_process() is not None:
    time.sleep(0.2)


PROJECT = Path(__file__).parents[3]


class Odd(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def breaks(prompts, completions, **_):
    match completions[0]:
        case "raise":
            raise KeyError("no such answer")
        case "odd":
            raise Odd(1, 2)
        case "leave":
            raise SystemExit(1)
        case "exit":
            os._exit(3)
        case "nan":
            return [math.nan]
        case "none":
            return [None]
        case "two":
            return [1.0, 2.0]
        case "one":
            return 0.5
        case "text":
            return ["good"]
        case "eat":
            return [float(len(bytearray(2**32)))]
        case "loop":
            while True:
                pass
        case "refused":
            raise ConnectionRefusedError("port 9")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pool":
            child = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
            child.start()
            child.join()
            return [float(child.exitcode)]
        case text if text.startswith("leave-"):
            subprocess.Popen(["sleep", text.removeprefix("leave-")])
            while True:
                pass
    return [0.5]


RAISED = {
    "raise": 'raise KeyError("no such answer")', "odd": "raise Odd(1, 2)", "leave": "raise SystemExit(1)"
}  # fmt: skip
"""Lines of `breaks` that raise."""


def samples(*texts):
    return [Sample("p", t, [1], "4") for t in texts]


def outcomes(*texts, **options):
    found = attempt(f"{__name__}:breaks", {}, samples(*texts), **({"seconds": 5.0, "workers": 1} | options))
    return dict(zip(texts, found, strict=True))


def test_a_reward_that_loops_for_ever_costs_one_sample_and_its_successor_may_import_for_longer_than_the_limit():
    found = outcomes("a", "loop", "b", "c", seconds=0.3)
    assert {t: o.value for t, o in found.items()} == {"a": 0.5, "loop": None, "b": 0.5, "c": 0.5}
    assert found["loop"].failure == "timeout after 0.3 s" and not found["loop"].is_outage


def test_what_a_sample_does_to_its_call_costs_that_sample():
    lines = {text.strip(): number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)}
    at = {text: f" ({Path(__file__).name}, line {lines[line]})" for text, line in RAISED.items()}
    reasons = {
        "raise": "KeyError: 'no such answer'" + at["raise"], "odd": "Odd: 1 2" + at["odd"],
        "leave": "SystemExit: 1" + at["leave"], "nan": "not finite: nan",
        "exit": "process ended with status 3", "eat": "MemoryError: more than 2048 MB",
        "two": "TypeError: the function returned 2 values for 1 completions: expected one for each",
        "text": "TypeError: the function returned 'good' for a completion: expected a number, or None",
    }  # fmt: skip
    reasons["one"] = (
        "TypeError: the function returned 0.5 in place of a list: it gets lists of prompts and completions, and "
        "returns a number, or None, for each completion"
    )
    found = outcomes("x", *reasons, "none", "y")
    assert {t: o.failure for t, o in found.items() if o.failure} == reasons
    assert not any(o.is_outage for o in found.values())
    assert (found["x"].value, found["none"].value, found["y"].value) == (0.5, None, 0.5)


def test_what_a_reward_has_started_ends_with_its_time():
    token = f"60.{uuid.uuid4().int % 10**9:09d}"
    assert outcomes(f"leave-{token}", seconds=0.3)[f"leave-{token}"].failure == "timeout after 0.3 s"
    left = [p for p in psutil.process_iter(["cmdline"]) if token in (p.info["cmdline"] or [])]
    assert psutil.wait_procs(left, timeout=1.0)[1] == []


def test_a_caller_that_is_killed_leaves_neither_processes_nor_folders(tmp_path):
    program = "from tests.tuning.rewards.test_processes import outcomes; outcomes('loop', seconds=60.0)"
    process = python(program, cwd=PROJECT, env={"TMPDIR": str(tmp_path)})
    caller, children = psutil.Process(process.pid), []
    deadline = time.monotonic() + 60
    # At work it leads a group of its own.
    while not children and time.monotonic() < deadline:
        time.sleep(0.05)
        children = [child for child in caller.children(recursive=True) if os.getpgid(child.pid) == child.pid]
    assert children and list(tmp_path.glob("rlhf-reward-*"))
    process.kill()
    process.communicate()
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert not list(tmp_path.glob("rlhf-reward-*"))


def test_a_reward_may_start_processes():
    assert outcomes("pool")["pool"].value == 7.0


def test_a_process_that_ends_between_calls_is_replaced():
    outcomes("x")
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGKILL)
    assert outcomes("x")["x"].value == 0.5


def test_an_outage_is_told_apart_and_the_others_are_scored():
    found = outcomes("x", "refused", "killed", "y")
    assert {t: o.is_outage for t, o in found.items()} == {"x": False, "refused": True, "killed": True, "y": False}
    assert found["refused"].failure == "ConnectionRefusedError: port 9"
    assert f"killed {TRIES} times from outside" in found["killed"].failure


def test_after_outages_in_a_row_no_more_calls_are_made():
    found = attempt(f"{__name__}:breaks", {}, samples(*["refused"] * OUTAGES, "x", "y"), seconds=5.0, workers=1)
    assert all(o.is_outage for o in found) and f"not tried after {OUTAGES} calls" in found[-1].failure


def test_a_caller_that_leaves_has_no_more_calls_begun_and_gets_those_under_way():
    asks, told = itertools.count(), []
    samples = [Sample("?", "4", answer="4")] * 6
    found = attempt(
        "exact_match", {}, samples, seconds=60.0, leave=lambda: next(asks) >= 3, calls=[[0, 1], [2], [3], [4, 5]],
        finished=lambda some, outcomes: told.extend(some),
    )  # fmt: skip
    assert [outcome.value for outcome in found[:4]] == [1.0] * 4 and sorted(told) == [0, 1, 2, 3]
    assert all(outcome is LEFT and outcome.is_outage for outcome in found[4:])


def test_who_keeps_what_it_gets_gets_no_outage():
    with pytest.raises(Outage, match=f"{__name__}:breaks: no verdict on 1 of 2 completions: ConnectionRefusedError"):
        evaluate(f"{__name__}:breaks", {}, samples("x", "refused"), seconds=5.0, workers=1)
    assert [o.value for o in evaluate(f"{__name__}:breaks", {}, samples("x", "raise"), seconds=5.0, workers=1)] == [
        0.5,
        None,
    ]


def test_a_function_that_cannot_be_imported_is_an_outage():
    (found,) = attempt("no_such_package.rewards:f", {}, samples("x"), seconds=5.0, workers=1)
    assert found.is_outage and "no_such_package" in found.failure


def sees_group(prompts, completions, *, answer, factor, **_):
    """Each completion's length against the longest of its call; knows nothing about short calls."""
    if len(completions) == 1:
        raise ValueError("alone")
    return [factor * len(c) / max(map(len, completions)) for c in completions]


def test_a_call_may_have_several_samples_and_its_failure_costs_them_all():
    told = []
    found = attempt(
        f"{__name__}:sees_group", {"factor": 2.0}, samples("a", "bb", "cccc", "d"), seconds=5.0, workers=1,
        calls=[[0, 2], [1], [3]], finished=lambda some, found: told.append(some),
    )  # fmt: skip
    assert [o.value for o in found] == [0.5, None, 2.0, None]
    assert found[1].failure.startswith("ValueError: alone (test_processes.py, line ")
    assert sorted(told) == [[0, 2], [1], [3]]


@pytest.mark.parametrize(("name", "arguments"), [("judge", {"timeout": 30.0}), ("code_passes", {})])
def test_a_call_with_many_samples_has_the_time_that_each_of_them_may_take(name, arguments):
    one = call_seconds(name, arguments, 5.0, 1)
    assert one > 60 and call_seconds(name, arguments, 5.0, 16) == 16 * one
    assert call_seconds("exact_match", {}, 5.0, 16) == call_seconds(name, arguments, 5.0, 0) == 5.0


@pytest.mark.parametrize("name", ["tolerance", "extract", "prompts", "completions", "task", "answer"])
def test_an_entry_of_the_metadata_changes_no_argument_of_a_built_in(name):
    (sample,) = samples("so 4")
    given = dataclasses.replace(sample, metadata={name: 9})
    (found,) = attempt("number_match", {}, [given], seconds=5.0, workers=1)
    assert found.value == 1.0


def optional(prompts, completions, *, difficulty=None, scale=1.0, metadata, **columns):
    return [1.0]


def closed(prompts, completions, completion_ids):
    return [1.0]


def given(function, **metadata):
    return keyword_arguments(
        function, Call("f", {"factor": 2}, [Sample("p", "c", [1], "4", metadata), Sample("p", "d", [2], "5")], 1.0, 1)
    )


def test_columns_are_lists_and_a_setting_of_the_function_is_no_column():
    found = given(optional, difficulty=3, scale=7, factor=8, answer="x", prompts="y", other=1)
    assert found == {
        "difficulty": [3, None], "other": [1, None], "completion_ids": [[1], [2]], "answer": ["4", "5"],
        "metadata": [{"difficulty": 3, "scale": 7, "factor": 8, "answer": "x", "prompts": "y", "other": 1}, {}],
        "factor": 2,
    }  # fmt: skip
    assert given(closed, difficulty=3) == {"completion_ids": [[1], [2]], "factor": 2}
    assert (
        given(exact_match, extract="x").keys()
        == given(number_match).keys()
        == given(closed).keys()
        | {
            "answer",
            "metadata",
        }
    )


@pytest.mark.slow
def test_problems_of_reasoning_gym_are_scored_by_their_own_verifier():
    from tuning.data.tasks import reasoning_gym

    record = next(iter(reasoning_gym("chain_sum", size=1, seed=3)))
    sample = Sample(record["prompt"], record["answer"], [1], record["answer"], record["metadata"])
    wrong = dataclasses.replace(sample, completion="wrong")
    # The package takes longer to import.
    found = attempt("reasoning_gym_score", {}, [sample, wrong], seconds=2.0, workers=1)
    assert found[0].value == 1.0 and found[1].value < 1.0
