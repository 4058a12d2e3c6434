"""One call of a reward function, and the process that makes it: what is imported there is not timed, nothing escapes.

The process gets a `Call` over its pipe, imports the function, answers STARTED, calls it and answers with its outcomes.
Answers are plain texts and numbers: an exception of a user need not survive being pickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import inspect
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tuning.rewards.failures import REASON_CHARACTERS, kind_of
from tuning.rewards.functions import BUILT_IN, LOADS, find
from tuning.rewards.samples import Outcome, Sample, outcome_of

STARTED = "started"
"""The answer that precedes the outcomes: the function is there, and its time begins."""
PARENT_SECONDS = 0.5
GRACE_SECONDS = 30.0
"""Seconds after its limit at which a process ends itself, in case that nothing else has ended it."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A reward function and the samples that one call of it gets."""

    function: str
    arguments: Mapping[str, Any]
    samples: Sequence[Sample]
    seconds: float
    megabytes: int


def serve(pipe: Connection, parent: int, folder: str) -> None:
    """Answers calls until the pipe closes; temporary files of the calls are below `folder`, which is removed then.

    What the calls start is in the process group of this process, and is ended with it.
    """
    os.setsid()
    watch = threading.Thread(target=_end_with, args=(parent, folder), daemon=True)
    watch.start()
    # Both: subprocesses read the environment, this process has read it.
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    with contextlib.suppress(EOFError, OSError):
        while True:
            call: Call = pipe.recv()
            pipe.send(_answer(call, pipe))
    shutil.rmtree(folder, ignore_errors=True)
    # A pipe may close a little before its other end's process is gone, with which the whole group ends.
    watch.join(3 * PARENT_SECONDS)


def _end_with(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    # A parent that was killed cannot. Renamed first: what still runs finds no place to write to.
    gone = f"{folder}.gone"
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _answer(call: Call, pipe: Connection) -> list[Outcome]:
    """The outcome of each sample of a call."""
    try:
        function = find(call.function)
        for name in LOADS.get(call.function, ()):
            importlib.import_module(name)
    # Also SystemExit, which a module may raise as it is imported.
    except BaseException as error:
        return [Outcome(None, _text(error), "outage")] * len(call.samples)
    pipe.send(STARTED)
    try:
        with _last_resort(call.seconds + GRACE_SECONDS), _memory_limit(call.megabytes):
            return _made(function, call)
    except MemoryError:
        return [Outcome(None, f"MemoryError: more than {call.megabytes} MB")] * len(call.samples)
    # A user's function may raise anything, SystemExit and KeyboardInterrupt among them.
    except BaseException as error:
        kind = kind_of(error)
        place = _place(error, function) if kind == "sample" else ""
        return [Outcome(None, _text(error) + place, kind)] * len(call.samples)


def answered(call: Call) -> list[Outcome]:
    """The outcome of each sample of a call that this process makes, without limits: of a built-in that has its own."""
    try:
        return _made(find(call.function), call)
    except Exception as error:
        return [Outcome(None, _text(error), kind_of(error))] * len(call.samples)


def _made(function: Any, call: Call) -> list[Outcome]:
    texts = [s.prompt for s in call.samples], [s.completion for s in call.samples]
    return _outcomes(function(*texts, **keyword_arguments(function, call)), len(call.samples))


def _outcomes(values: Any, count: int) -> list[Outcome]:
    """What a function returned as outcomes. Raises TypeError for anything but `count` numbers and None."""
    if not isinstance(values, Iterable):
        one = f"{values!r:.60} in place of a list: it gets lists of prompts and completions"
        raise TypeError(f"the function returned {one}, and returns a number, or None, for each completion")
    found = list(values)
    if len(found) != count:
        raise TypeError(f"the function returned {len(found)} values for {count} completions: expected one for each")
    return [outcome_of(None if value is None else _number(value)) for value in found]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        shown = repr(value)[:60]
        raise TypeError(f"the function returned {shown} for a completion: expected a number, or None") from None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:REASON_CHARACTERS]


def _place(error: BaseException, function: Any) -> str:
    """` (mine.py, line 7)`: the last place of an error in the file of a user's function; empty elsewhere."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or function in BUILT_IN.values():
        return ""
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == code.co_filename]
    return f" ({os.path.basename(code.co_filename)}, line {lines[-1]})" if lines else ""


def keyword_arguments(function: Any, call: Call) -> dict[str, Any]:
    """Columns and arguments of a call by name, as far as the function takes them.

    The recipe's arguments come first, then the columns `completion_ids`, `answer` and `metadata`. Entries of the
    metadata are columns too, as in TRL, but for built-in functions and where a parameter of that name has a default
    other than None: it is a setting of the function, which data must not change. `metadata` always has them all.
    """
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:
        # A callable without a signature, such as one in C.
        parameters = {}
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


@contextlib.contextmanager
def _last_resort(seconds: float) -> Iterator[None]:
    """Ends this process after `seconds`, though it runs no Python any more and its parent is gone."""
    with open(os.devnull, "w") as nowhere:
        # A thread in C: it needs no interpreter lock, which a regular expression may hold for ever.
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _memory_limit(megabytes: int) -> Iterator[None]:
    """Limits the process's data to its present size plus `megabytes`: a larger allocation raises MemoryError.

    Linux only.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    with open("/proc/self/status") as f:
        # /proc counts in units of 1024 bytes.
        held_bytes = next(int(line.split()[1]) for line in f if line.startswith("VmData")) * 1024
    # Data, not address space: libraries reserve far more addresses than they use. The soft limit alone, so that it can
    # be lifted again.
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held_bytes + megabytes * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
