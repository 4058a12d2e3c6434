"""Rewards run where they can be killed (R20), and an outage there is no verdict on a sample (R25)."""

import dataclasses
import math
import os
import signal
import subprocess
import threading
import time
import urllib.error
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlhf.tuning.parallel.pool import TRIES
from rlhf.tuning.rewards.failures import OUTAGES, Outage
from rlhf.tuning.rewards.functions import exact_match, number_match
from rlhf.tuning.rewards.processes import Call, attempt, call_seconds, evaluate, keyword_arguments
from rlhf.tuning.rewards.samples import Sample
from tests.judge_server import judge_server
from tests.tuning.rewards.left import running


class Odd(Exception):
    """Cannot be unpickled."""

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
            time.sleep(600)
        case "refused":
            raise ConnectionRefusedError("port 9")
        case "status":
            raise urllib.error.HTTPError("u", 403, "blocked", None, None)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
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


def test_what_a_sample_does_to_its_call_costs_that_sample():
    lines = {text.strip(): number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)}
    at = {text: f" ({Path(__file__).name}, line {lines[line]})" for text, line in RAISED.items()}
    reasons = {
        "raise": "KeyError: 'no such answer'" + at["raise"], "odd": "Odd: 1 2" + at["odd"],
        "leave": "SystemExit: 1" + at["leave"], "nan": "not finite: nan", "loop": "timeout after 1 s",
        "exit": "the process ended: status 3", "eat": "MemoryError: more than 2048 MB",
        "two": "TypeError: the function returned 2 values for 1 completions: expected one for each",
        "text": "TypeError: the function returned 'good' for a completion: expected a number, or None",
    }  # fmt: skip
    reasons["one"] = (
        "TypeError: the function returned 0.5 in place of a list: it gets lists of prompts and completions, and "
        "returns a number, or None, for each completion"
    )
    found = outcomes("x", *reasons, "none", "y", seconds=1.0, workers=2)
    assert {t: o.failure for t, o in found.items() if o.failure} == reasons
    assert not any(o.is_outage for o in found.values())
    assert (found["x"].value, found["none"].value, found["y"].value) == (0.5, None, 0.5)


def returns(prompts, completions, value, **_):
    return value


def of_completions(completions, **columns):
    return [float(c == p) for c, p in zip(completions, columns["prompts"], strict=True)]


def swapped(completions, prompts):
    return [float(c == p + "!") for c, p in zip(completions, prompts, strict=True)]


def alone(*, completions):
    return [float(c == "a!") for c in completions]


def other_names(texts, completions, **columns):
    return [float(c == t + "!" and "prompts" not in columns) for c, t in zip(completions, texts, strict=True)]


@pytest.mark.parametrize(
    ("name", "expected"), [("of_completions", 0), ("swapped", 1), ("alone", 1), ("other_names", 1)]
)
def test_prompts_and_completions_are_given_by_name_if_the_parameters_are_called_so(name, expected):
    (outcome,) = Call(f"{__name__}:{name}", {}, [Sample("a", "a!", [1], None)]).make()
    assert (outcome.value, outcome.failure) == (expected, None)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    """A reward in verl's form."""
    right = solution_str in ground_truth if isinstance(ground_truth, list) else solution_str == ground_truth
    total = right + (bonus or 0) + extra_info.get("index", 0) / 10
    return {"acc" if bonus is None else "score": total, "source": data_source}


def test_a_function_with_verls_parameters_is_called_for_each_completion():
    one = Sample("?", "4", [1], "4", {"data_source": "gsm8k", "extra_info": {"index": 3}})
    several = Sample("?", "four", [1], '["4", "four"]', {"answers": ["4", "four"]})
    found = Call(f"{__name__}:compute_score", {"bonus": 0.5}, [one, several, Sample("?", "5", [1], "4")]).make()
    assert [outcome.value for outcome in found] == pytest.approx([1.8, 1.5, 0.5])
    (outcome,) = Call(f"{__name__}:compute_score", {"bonus": None}, [one]).make()
    assert outcome.failure.startswith("ValueError: the function returned a mapping without the key score: ['acc', ")


@pytest.mark.parametrize(
    "value", ["11", b"11", {0.5: 1, 1.0: 2}, {0.5, 1.0}, ["1.0", 1.0], [b"1", 1.0], [1.0, [0.5, 0.2]], [{}, 1.0]]
)
def test_a_reward_is_a_number_and_no_text_with_digits_nor_the_keys_of_a_mapping(value):
    found = Call(f"{__name__}:returns", {"value": value}, samples("a", "b")).make()
    assert all(o.value is None and o.failure.startswith("TypeError: the function returned") for o in found)


@pytest.mark.parametrize(
    "value",
    [
        (1, 0),
        [True, False],
        np.asarray([1, 0]),
        [np.float32(1), np.int64(0)],
        [Fraction(1), Decimal(0)],
        iter([1.0, 0]),
    ],
)
def test_rewards_are_numbers_of_any_type_in_any_sequence(value):
    found = Call(f"{__name__}:returns", {"value": value}, samples("a", "b")).make()
    assert [(o.value, o.failure) for o in found] == [(1.0, None), (0.0, None)]


def test_an_outage_is_no_verdict_and_the_others_are_scored():
    found = outcomes("x", "refused", "killed", "y")
    assert {t: o.is_outage for t, o in found.items()} == {"x": False, "refused": True, "killed": True, "y": False}
    assert found["refused"].failure == "ConnectionRefusedError: port 9"
    assert f"killed {TRIES} times from outside" in found["killed"].failure
    with pytest.raises(Outage, match=f"{__name__}:breaks: no verdict on 1 of 2 completions: ConnectionRefusedError"):
        evaluate(f"{__name__}:breaks", {}, samples("x", "refused"), seconds=5.0, workers=1)
    scored = evaluate(f"{__name__}:breaks", {}, samples("x", "raise"), seconds=5.0, workers=1)
    assert [o.value for o in scored] == [0.5, None]
    (found,) = attempt("no_such_package.rewards:f", {}, samples("x"), seconds=5.0)
    assert found.is_outage and "no_such_package" in found.failure


def test_after_outages_in_a_row_no_more_calls_are_made():
    found = attempt(f"{__name__}:breaks", {}, samples(*["refused"] * OUTAGES, "x", "y"), seconds=5.0, workers=1)
    assert all(o.is_outage for o in found) and f"not tried after {OUTAGES} calls" in found[-1].failure


def sees_group(prompts, completions, *, answer, factor, **_):
    """Each completion's length against the longest of its call; fails on short calls."""
    if len(completions) == 1:
        raise ValueError("alone")
    return [factor * len(c) / max(map(len, completions)) for c in completions]


def test_a_call_may_have_several_samples_and_its_failure_costs_them_all():
    settled = []
    found = attempt(
        f"{__name__}:sees_group", {"factor": 2.0}, samples("a", "bb", "cccc", "d"), seconds=5.0, workers=1,
        calls=[[0, 2], [1], [3]], finished=lambda some, found: settled.append(some),
    )  # fmt: skip
    assert [o.value for o in found] == [0.5, None, 2.0, None]
    assert found[1].failure.startswith("ValueError: alone (test_processes.py, line ")
    assert sorted(settled) == [[0, 2], [1], [3]]


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
        function, Call("f", {"factor": 2}, [Sample("p", "c", [1], "4", metadata), Sample("p", "d", [2], "5")])
    )


def test_columns_are_lists_and_a_setting_of_the_function_is_no_column():
    found = given(optional, difficulty=3, scale=7, factor=8, answer="x", prompts="y", other=1)
    assert found == {
        "difficulty": [3, None], "other": [1, None], "completion_ids": [[1], [2]], "answer": ["4", "5"],
        "metadata": [{"difficulty": 3, "scale": 7, "factor": 8, "answer": "x", "prompts": "y", "other": 1}, {}],
        "factor": 2,
    }  # fmt: skip
    assert given(closed, difficulty=3) == {"completion_ids": [[1], [2]], "factor": 2}
    built_in = given(closed).keys() | {"answer", "metadata"}
    assert given(exact_match, extract="x").keys() == given(number_match).keys() == built_in


@pytest.mark.slow
def test_problems_of_reasoning_gym_are_scored_by_their_own_verifier():
    from rlhf.tuning.data.tasks import reasoning_gym

    record = next(iter(reasoning_gym("chain_sum", size=1, seed=3)))
    sample = Sample(record["prompt"], record["answer"], [1], record["answer"], record["metadata"])
    wrong = dataclasses.replace(sample, completion="wrong")
    # The package takes longer to import.
    found = attempt("reasoning_gym_score", {}, [sample, wrong], seconds=2.0, workers=1)
    assert found[0].value == 1.0 and found[1].value < 1.0


MOST = 8


def judged(url, count, **options):
    arguments = {"url": url, "model": "m", "retries": 0, "template": "{completion}"}
    return attempt("judge", arguments, [Sample("?", f"{i % 10}") for i in range(count)], seconds=5.0, **options)


def test_max_concurrency_requests_of_a_judge_are_under_way_and_each_sample_has_its_verdict():
    # Nobody is answered before MOST have asked: with fewer at a time the first ones would wait for ever.
    together, lock, here, most = threading.Barrier(MOST), threading.Lock(), [0], [0]

    def reply(body):
        with lock:
            here[0] += 1
            most[0] = max(most[0], here[0])
        together.wait(60)
        with lock:
            here[0] -= 1
        return body["messages"][0]["content"]

    settled = []
    with judge_server(reply) as (url, asked):
        found = judged(url, 3 * MOST, max_concurrency=MOST, finished=lambda some, outcomes: settled.extend(some))
    assert [outcome.value for outcome in found] == [i % 10 / 10 for i in range(3 * MOST)]
    assert len(asked) == 3 * MOST == len(set(settled)) and most[0] == MOST


def test_a_judge_that_is_down_is_not_asked_for_all():
    with judge_server(lambda body: 503) as (url, asked):
        found = judged(url, 40, max_concurrency=2)
    assert all(outcome.is_outage for outcome in found) and len(asked) <= OUTAGES + 2
    assert f"not tried after {OUTAGES} calls" in found[-1].failure


@pytest.mark.parametrize(
    ("reply", "failure"), [("no idea", "has no number"), *((code, f"answered {code}") for code in (403, 404, 451, 500))]
)
def test_a_verdict_that_lacks_is_the_samples_failure_if_the_service_judges_others(reply, failure):
    down = []
    with judge_server(lambda body: reply if down or body["messages"][0]["content"] == "1" else "5") as (url, asked):
        found = judged(url, 3)
        assert [(o.value, o.kind) for o in found] == [(0.5, "sample"), (None, "sample"), (0.5, "sample")]
        assert failure in found[1].failure
        if reply == "no idea":
            return
        # The next try asks for the blocked one alone; a call with a verdict shows that the service is up.
        arguments = {"url": url, "model": "m", "retries": 0, "template": "{completion}"}
        for control, kind in (((Sample("?", "0"),), "sample"), ((), "outage")):
            assert attempt("judge", arguments, [Sample("?", "1")], seconds=5.0, control=control)[0].kind == kind
        down.append(True)
        assert {outcome.kind for outcome in judged(url, 3)} == {"outage"}
    (mine,) = attempt(f"{__name__}:breaks", {}, samples("status"), control=samples("x"), seconds=5.0, workers=1)
    assert (mine.kind, mine.failure[:20]) == ("sample", "HTTPError: HTTP Erro")


def starts_a_session(prompts, completions, **_):
    subprocess.Popen(["sleep", completions[0]], start_new_session=True)
    time.sleep(600)


def test_what_a_reward_starts_in_its_own_session_ends_with_its_time():
    token = f"600.{os.getpid()}"
    (found,) = attempt(f"{__name__}:starts_a_session", {}, samples(token), seconds=0.5, workers=1)
    assert found.failure == "timeout after 0.5 s"
    assert psutil.wait_procs(running(token), timeout=10)[1] == []
