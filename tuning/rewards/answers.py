"""Whether a built-in reward can read an answer, for checks before any completion is sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.tuning.rewards import mathematics, numbers
from rlhf.tuning.rewards.programs import runnable

Check = Callable[[str | None, Mapping[str, Any]], str | None]


def accepted(answer: str | None, metadata: Mapping[str, Any] | None) -> list[str]:
    """The accepted answers: `metadata.answers` where the data has several, else the answer; empty without one."""
    several = (metadata or {}).get("answers")
    if isinstance(several, list):
        return [one if isinstance(one, str) else json.dumps(one) for one in several]
    return [] if answer is None else [answer]


def number(answer: str) -> numbers.Written:
    """The number that an answer is. Raises ValueError for another text."""
    found = numbers.only(answer)
    if found is None:
        raise ValueError(f"one number, got {_shown(answer)}{_taken_out(answer)}")
    return found


def _unless(readable: Callable[[str], Any], expected: str) -> Check:
    """The check that one of the accepted answers is readable."""

    def check(answer: str | None, metadata: Mapping[str, Any]) -> str | None:
        several = metadata.get("answers", [])
        if not isinstance(several, list) or not all(isinstance(one, str | int | float) for one in several):
            return f"a text or number as answer, or a list of them, got {_shown(several)}"
        texts = accepted(answer, metadata)
        if not texts and answer is None or any(map(readable, texts)):
            return None
        return f"{expected}, got {_shown(answer if len(texts) < 2 else texts)}{_taken_out(answer)}"

    return check


def code_passes(answer: str | None, metadata: Mapping[str, Any]) -> str | None:
    """The tests (`tests_of`) are Python that compiles and can fail, or pairs of input and output."""
    tests = tests_of(answer, metadata)
    if not isinstance(tests, list):
        return f"a list of tests in metadata.tests, got {_shown(tests)}"
    for test in tests:
        if isinstance(test, str):
            try:
                runnable(test, metadata.get("entry_point"))
            except (SyntaxError, ValueError) as error:
                return f"tests in Python that can fail, such as assert f(2) == 4, got {_shown(test)} ({error})"
        elif not (isinstance(test, Mapping) and all(isinstance(test.get(n), str) for n in ("input", "output"))):
            return f"tests as programs or as {{input, output}}, got {_shown(test)}"
    return None


def tests_of(answer: str | None, metadata: Mapping[str, Any]) -> Any:
    """The tests of a completion's code: `metadata.tests`, else all of `metadata.answers`, else the answer."""
    return metadata.get("tests") or metadata.get("answers") or ([] if answer is None else [answer])


CHECKS: dict[str, Check] = {
    "exact_match": _unless(str.strip, "a text that is not empty"),
    "number_match": _unless(numbers.only, "one number"),
    "math_equal": _unless(mathematics.expressions, "a mathematical expression"),
    "code_passes": code_passes,
}
"""By name of the reward. Rewards that are not here take any text, or no answer."""


def unreadable(name: str, answer: str | None, metadata: Mapping[str, Any]) -> str | None:
    """The form of answer that the reward `name` expects; None if it can read this one, or does not apply."""
    return CHECKS[name](answer, metadata) if name in CHECKS else None


def _taken_out(answer: str | None) -> str:
    """How the number is had of an answer that is a whole solution, as GSM8K publishes them; empty for others."""
    marked = re.findall(r"#+(?= *\S+ *$)", answer or "")
    if not marked:
        return ""
    mark = marked[-1]
    return f"; `fields: {{answer: {{from: answer, pattern: '{mark} (.*)'}}}}` in data takes the text after {mark}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
