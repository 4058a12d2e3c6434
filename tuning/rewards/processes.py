"""Reward functions in processes that can be killed, with limits of time and memory for each call (R20).

A call gets one sample, a group or all of them, as its caller says. A failure costs its call alone.

A call runs in a child of a pool (`rlhf.tuning.parallel`) or in this process. Answers are plain texts and numbers: an
exception of a user does not leave the child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from rlhf.tuning.parallel.pool import Failure, Job, Pool, Refused, run_in_threads
from rlhf.tuning.rewards.failures import REASON_CHARACTERS, Streak, check_failures, kind_of
from rlhf.tuning.rewards.functions import BUILT_IN, LOADS, find, least_seconds
from rlhf.tuning.rewards.samples import Kind, Outcome, Sample, outcome_of


class Caller:
    """A reward function in a child: its payloads are calls, its values the fields of their outcomes."""

    def __init__(self, function: str) -> None:
        self._function = function

    @staticmethod
    def load(function: str) -> None:
        """Import the function, and the modules that a built-in imports when it is called."""
        find(function)
        for name in LOADS.get(function, ()):
            importlib.import_module(name)

    def __call__(self, payload: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        samples = [Sample(**fields) for fields in payload["samples"]]
        return [dataclasses.astuple(outcome) for outcome in Call(self._function, payload["arguments"], samples).make()]

    def close(self) -> None:
        """Do nothing: a function holds nothing that would have to be closed."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A reward function and the samples that one call of it gets."""

    function: str
    arguments: Mapping[str, Any]
    samples: Sequence[Sample]

    def make(self) -> list[Outcome]:
        """Call the function in this process, without limits but memory's: MemoryError is raised."""
        function: Any = None
        try:
            function = find(self.function)
            if "solution_str" in _parameters(function):
                return _outcomes([_score_of(function, self.arguments, s) for s in self.samples], len(self.samples))
            texts, named = _texts(function, self)
            return _outcomes(function(*texts, **named, **keyword_arguments(function, self)), len(self.samples))
        except MemoryError:
            raise
        # A user's function may raise anything, SystemExit and KeyboardInterrupt among them.
        except BaseException as error:
            kind = kind_of(error)
            text = f"{type(error).__name__}: {error}".replace("\n", " ")[:REASON_CHARACTERS]
            place = _place(error, function) if kind == "sample" else ""
            return [Outcome(None, text + place, kind)] * len(self.samples)


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function by name; none of a callable without a signature, such as one in C."""
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:
        return {}


def _score_of(function: Any, arguments: Mapping[str, Any], sample: Sample) -> Any:
    """Call a function with verl's parameters on one sample; of a mapping that it returns, the entry `score`."""
    known = {
        "data_source": sample.metadata.get("data_source"),
        "solution_str": sample.completion,
        "ground_truth": sample.metadata.get("answers", sample.answer),
        "extra_info": sample.metadata.get("extra_info") or {},
        **arguments,
    }
    parameters = _parameters(function)
    takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    value = function(
        **{name: given for name, given in known.items() if takes_more or name in parameters or name in arguments}
    )
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        raise ValueError(
            f"the function returned a mapping without the key score: {sorted(map(str, value))[:9]}; add it"
        )
    return value["score"]


def _outcomes(values: Any, count: int) -> list[Outcome]:
    """Convert the return value of a function to outcomes. Raises TypeError for anything but `count` numbers and
    None."""
    # The characters of a text, the keys of a mapping and the members of a set would be taken for rewards.
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        one = f"{values!r:.60} in place of a list: it gets lists of prompts and completions"
        raise TypeError(f"the function returned {one}, and returns a number, or None, for each completion")
    found = list(values)
    if len(found) != count:
        raise TypeError(f"the function returned {len(found)} values for {count} completions: expected one for each")
    return [outcome_of(None if value is None else _number(value)) for value in found]


def _number(value: Any) -> float:
    try:
        # A text is no number, whatever its digits.
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        shown = repr(value)[:60]
        raise TypeError(f"the function returned {shown} for a completion: expected a number, or None") from None


def _place(error: BaseException, function: Any) -> str:
    """` (mine.py, line 7)`: the last place of an error in the file of a user's function; empty elsewhere."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or function in BUILT_IN.values():
        return ""
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == code.co_filename]
    return f" ({os.path.basename(code.co_filename)}, line {lines[-1]})" if lines else ""


def _texts(function: Any, call: Call) -> tuple[list[list[str]], dict[str, list[str]]]:
    """Prompts and completions by position, or by name, as TRL gives them, if parameters are called so."""
    texts = {"prompts": [s.prompt for s in call.samples], "completions": [s.completion for s in call.samples]}
    kinds = {name: p.kind for name, p in _parameters(function).items()}
    by_position = kinds.get("completions", inspect.Parameter.POSITIONAL_ONLY) is inspect.Parameter.POSITIONAL_ONLY
    if by_position or next(iter(kinds)) not in texts:
        return list(texts.values()), {}
    takes_more = inspect.Parameter.VAR_KEYWORD in kinds.values()
    return [], {name: column for name, column in texts.items() if takes_more or name in kinds}


def keyword_arguments(function: Any, call: Call) -> dict[str, Any]:
    """Columns and arguments of a call by name, as far as the function takes them.

    The recipe's arguments come first, then the columns `completion_ids`, `answer` and `metadata`. Entries of the
    metadata are columns too, as in TRL, but for built-in functions and where a parameter of that name has a default
    other than None: it is a setting of the function, which data must not change. `metadata` always has them all.
    """
    parameters = _parameters(function)
    settings = {n for n, p in parameters.items() if p.default not in (inspect.Parameter.empty, None)}
    columns: dict[str, list[Any]] = {}
    if function not in BUILT_IN.values():
        # An entry that only some samples have is None for the others.
        names = dict.fromkeys(name for sample in call.samples for name in sample.metadata)
        columns = {name: [s.metadata.get(name) for s in call.samples] for name in names if name not in settings}
    columns |= {
        "completion_ids": [list(s.completion_ids) for s in call.samples],
        "answer": [s.answer for s in call.samples],
        "metadata": [s.metadata for s in call.samples],
    }
    for name in ("prompts", "completions", *call.arguments):
        columns.pop(name, None)
    if parameters and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        columns = {name: column for name, column in columns.items() if name in parameters}
    return {**columns, **call.arguments}


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
