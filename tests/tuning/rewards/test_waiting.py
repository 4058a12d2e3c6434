"""A judge is asked many times at once: as many as is said and no more, and an outage ends it as everywhere."""

import itertools
import threading

from tests.judge_server import judge_server
from tuning.rewards.failures import OUTAGES
from tuning.rewards.processes import LEFT, attempt
from tuning.rewards.samples import Sample

MOST = 8


def judged(url, count, **options):
    arguments = {"url": url, "model": "m", "retries": 0, "template": "{completion}"}
    return attempt("judge", arguments, [Sample("?", f"{i % 10}") for i in range(count)], seconds=5.0, **options)


def test_as_many_requests_are_under_way_as_is_said_and_each_sample_has_its_verdict():
    # Nobody is answered before so many have asked: with fewer at a time the first ones would wait for ever.
    together, lock, here, most = threading.Barrier(MOST), threading.Lock(), [0], [0]

    def reply(body):
        with lock:
            here[0] += 1
            most[0] = max(most[0], here[0])
        together.wait(60)
        with lock:
            here[0] -= 1
        return body["messages"][0]["content"]

    told = []
    with judge_server(reply) as (url, asked):
        found = judged(url, 3 * MOST, max_concurrency=MOST, finished=lambda some, outcomes: told.extend(some))
    assert [outcome.value for outcome in found] == [i % 10 / 10 for i in range(3 * MOST)]
    assert len(asked) == 3 * MOST == len(set(told)) and most[0] == MOST


def test_a_judge_that_is_down_is_not_asked_for_all():
    with judge_server(lambda body: 503) as (url, asked):
        found = judged(url, 40, max_concurrency=2)
    assert all(outcome.is_outage for outcome in found) and len(asked) <= OUTAGES + 2
    assert f"not tried after {OUTAGES} calls" in found[-1].failure


def test_a_caller_that_leaves_has_no_more_asked_and_gets_what_is_under_way():
    asks = itertools.count()
    with judge_server(lambda body: "5") as (url, asked):
        found = judged(url, 6, max_concurrency=2, leave=lambda: next(asks) >= 3)
    assert [outcome.value for outcome in found[:3]] == [0.5] * 3 and len(asked) == 3
    assert all(outcome is LEFT and outcome.is_outage for outcome in found[3:])


def test_a_reply_without_a_number_is_the_samples_own_failure():
    with judge_server(lambda body: "no idea" if body["messages"][0]["content"] == "1" else "5") as (url, _):
        found = judged(url, 3, max_concurrency=3)
    assert [outcome.value for outcome in found] == [0.5, None, 0.5]
    assert not found[1].is_outage and "has no number" in found[1].failure
