"""One call of a reward function, in a child of a pool (`rlhf.tuning.parallel`) or in this process.

Answers are plain texts and numbers: an exception of a user does not leave the child.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import traceback
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from rlhf.tuning.rewards.failures import REASON_CHARACTERS, kind_of
from rlhf.tuning.rewards.functions import BUILT_IN, LOADS, find
from rlhf.tuning.rewards.samples import Outcome, Sample, outcome_of


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
