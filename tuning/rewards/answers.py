"""Whether a built-in reward can read an answer, for checks before any completion is sampled."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[str | None, Mapping[str, Any]], str | None]


def number(answer: str) -> float:
    """The number that an answer is, with commas between thousands or without. Raises ValueError for another text."""
    return float(answer.replace(",", ""))


def expressions(answer: str) -> list[Any]:
    """What math-verify reads in a reference answer; empty where it is no mathematical expression."""
    from math_verify import parse

    # The package's own time limits use signals, which work in a main thread only.
    # LaTeX is found between delimiters only, which bare answers lack.
    return list(parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None))


def number_match(answer: str | None, metadata: Mapping[str, Any]) -> str | None:
    """The answer is one number, with commas between thousands or without."""
    try:
        readable = answer is None or math.isfinite(number(answer))
    except ValueError:
        readable = False
    return None if readable else f"one number, got {_shown(answer)}{_taken_out(answer)}"


def math_equal(answer: str | None, metadata: Mapping[str, Any]) -> str | None:
    """The answer is a mathematical expression, bare, between dollars or in \\boxed{}."""
    readable = answer is None or bool(expressions(answer))
    return None if readable else f"a mathematical expression, got {_shown(answer)}"


def code_passes(answer: str | None, metadata: Mapping[str, Any]) -> str | None:
    """The tests, of `metadata.tests` or the answer, are Python that compiles, or pairs of input and output."""
    tests = metadata.get("tests") or ([] if answer is None else [answer])
    if not isinstance(tests, list):
        return f"a list of tests in metadata.tests, got {_shown(tests)}"
    for test in tests:
        if isinstance(test, str):
            try:
                with warnings.catch_warnings(action="ignore"):
                    compile(test, "<test>", "exec", dont_inherit=True)
            # Text with a null character, or nested too deep, is a ValueError or worse.
            except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
                return f"tests in Python, got {_shown(test)} ({error})"
        elif not (isinstance(test, Mapping) and all(isinstance(test.get(n), str) for n in ("input", "output"))):
            return f"tests as programs or as {{input, output}}, got {_shown(test)}"
    return None


CHECKS: dict[str, Check] = {f.__name__: f for f in (number_match, math_equal, code_passes)}
"""By name of the reward. Rewards that are not here take any text, or no answer."""


def unreadable(name: str, answer: str | None, metadata: Mapping[str, Any]) -> str | None:
    """What the reward `name` expects in place of this answer; None where it can read it, or does not apply."""
    return CHECKS[name](answer, metadata) if name in CHECKS else None


def _taken_out(answer: str | None) -> str:
    """How the number is had of an answer that is a whole solution, as GSM8K publishes them; empty for others."""
    marked = re.findall(r"#+(?= *\S+ *$)", answer or "")
    if not marked:
        return ""
    mark = marked[-1]
    return f"; `fields: {{answer: {{from: answer, pattern: '{mark} (.*)'}}}}` in data takes what is behind {mark}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
