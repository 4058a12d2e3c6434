"""Reward functions in processes that can be killed, with limits of time and memory for each call (R20).

A call gets one sample, a group or all of them, as its caller says. A failure costs its call alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from rlhf.tuning.parallel.pool import Failure, Job, Pool, Refused, run_in_threads
from rlhf.tuning.rewards.calls import Call, Caller
from rlhf.tuning.rewards.failures import Streak, check_failures
from rlhf.tuning.rewards.functions import least_seconds
from rlhf.tuning.rewards.samples import Kind, Outcome, Sample

WAITS = ("judge",)
"""Built-in rewards that only wait for a server and end by themselves: threads of this process call them.

They run no code of a user or of a completion, and a process for each request would hold memory for nothing.
"""

Finished = Callable[[Sequence[int], Sequence[Outcome]], None]


def attempt(
    name: str,
    arguments: Mapping[str, Any],
    samples: Sequence[Sample],
    *,
    seconds: float,
    megabytes: int = 2048,
    workers: int | None = None,
    max_concurrency: int = 32,
    calls: Sequence[Sequence[int]] | None = None,
    control: Sequence[Sample] = (),
    finished: Finished = lambda numbers, outcomes: None,
) -> list[Outcome]:
    """Return the reward of each sample by the function `name` (`rlhf.tuning.rewards.functions`), in order.

    Args:
        arguments: keyword arguments of the function.
        seconds, megabytes: limits of one call: wall-clock time after the function is imported, and memory on top of
            what its process already holds. Functions with limits of their own get the time that these need for all
            samples of the call (`rlhf.tuning.rewards.functions.least_seconds`).
        workers: processes on this machine; None: one a core. Nodes of a cluster have one a CPU
        (`rlhf.tuning.parallel`). max_concurrency: calls at a time of a built-in that waits for a server.
        calls: numbers of the samples that each call gets; None: one call a sample.
        control: samples of a call that had a verdict earlier, if there is one.
        finished: called with the numbers of a call's samples and their outcomes as soon as they are known.
    Returns:
        Outcomes. A call that exceeds a limit, raises, ends its process or gives no finite number costs its own samples.
        An outage (`Outcome.is_outage`) is no verdict: the caller must not keep it, and ends with `check_failures`.
        After OUTAGES of them in a row the remaining samples are outages too, without a call. A refusal is the sample's
        failure if a call with a verdict, of these or `control`, has one again after all others; else it is an outage.
    """
    numbers = calls if calls is not None else [[number] for number in range(len(samples))]
    streak, outcomes = Streak(), dict[int, Outcome]()

    def settle(some: Sequence[int], found: Sequence[Outcome]) -> None:
        outcomes.update(zip(some, found, strict=True))
        finished(some, found)

    def left() -> Iterator[tuple[Sequence[int], Call]]:
        for some in numbers:
            if (untried := streak.untried) is not None:
                settle(some, [untried] * len(some))
            else:
                yield some, Call(name, arguments, [samples[i] for i in some])

    def job_of(some: Sequence[int], call: Call) -> Job:
        payload = {"arguments": dict(arguments), "samples": [vars(sample) for sample in call.samples]}
        return Job(payload, call_seconds(name, arguments, seconds, len(some)), megabytes, label=some)

    def results(todo: Iterator[tuple[Sequence[int], Call]]) -> Generator[tuple[Sequence[int], list[Outcome]]]:
        if name not in WAITS:
            return _in_processes(name, workers, (job_of(*one) for one in todo))
        asked = run_in_threads(lambda one: one[1].make(), todo, max_concurrency)
        return ((some, found) for (some, _), found in asked)

    def is_up() -> bool:
        known = next((some for some in numbers if some and all(outcomes[i].has_verdict for i in some)), ())
        again = [samples[i] for i in known] or control
        asked = results(iter([(range(len(again)), Call(name, arguments, again))])) if again else ()
        return any(outcome.has_verdict for _, found in asked for outcome in found)

    try:
        # If `finished` raises, nobody waits for the calls under way any more.
        with contextlib.closing(results(left())) as found_by_call:
            for some, found in found_by_call:
                streak.add(found)
                settle(some, found)
        refused = [number for number, outcome in outcomes.items() if outcome.kind == "refusal"]
        kind: Kind = "sample" if refused and is_up() else "outage"
        outcomes.update({number: dataclasses.replace(outcomes[number], kind=kind) for number in refused})
    except Refused as error:
        outage = Outcome(None, str(error), "outage")
        for some in numbers:
            if some and some[0] not in outcomes:
                settle(some, [outage] * len(some))
    return [outcomes[number] for number in range(len(samples))]


def call_seconds(name: str, arguments: Mapping[str, Any], seconds: float, samples: int) -> float:
    """Return the wall-clock limit of a call: `seconds`, or the sum of the function's own limits of each sample."""
    return max(seconds, samples * least_seconds(name, arguments))


def evaluate(
    name: str, arguments: Mapping[str, Any], samples: Sequence[Sample], *, seconds: float, **options: Any
) -> list[Outcome]:
    """Call `attempt`, with its options, for a caller that keeps the outcomes. Raises Outage if there is no verdict.

    The failures that it returns are the samples' own. Outcomes with neither value nor failure are of samples to which
    the function does not apply: they are not wrong, and leave means and rates (`rlhf.tuning.rewards.failures.tallied`).
    """
    outcomes = attempt(name, arguments, samples, seconds=seconds, **options)
    check_failures({name: outcomes}, 1.0)
    return outcomes


def _in_processes(
    name: str, workers: int | None, jobs: Iterator[Job]
) -> Generator[tuple[Sequence[int], list[Outcome]], None, None]:
    try:
        for job, result in _pool(name, workers).run(jobs):
            if result.failure is None:
                yield job.label, [Outcome(*values) for values in result.value]
            else:
                yield job.label, [_outcome(result.failure, job)] * len(job.label)
    except Refused:
        # The next attempt imports the function again.
        _pool.cache_clear()
        raise


def _outcome(failure: Failure, job: Job) -> Outcome:
    match failure.kind:
        case "timeout":
            return Outcome(None, f"timeout after {job.seconds:g} s")
        case "killed":
            return Outcome(None, f"{failure.message}: lower workers, or the reward's megabytes", "outage")
        case "refused":
            return Outcome(None, failure.message, "outage")
    return Outcome(None, failure.message)


@functools.cache
def _pool(name: str, workers: int | None) -> Pool:
    """Return the processes of a function, which are used again as long as this process lives."""
    return Pool(f"{Caller.__module__}:{Caller.__name__}", {"function": name}, workers)
