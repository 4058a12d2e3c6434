"""Mathematical expressions by math-verify, within limits of time and size."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

from rlhf.tuning.rewards.texts import boxes, final, spoken

SECONDS = 3.0
"""Processor time that each of reading and comparing may take. A completion that needs more is wrong."""
MOST_DIGITS = 5_000.0
"""Numbers with more digits are not computed; they are equal only if they are written alike."""
MOST_NESTED = 32
"""Brackets within brackets on one line. Deeper text is no expression: the parser takes exponential time."""

_COMMANDS = {
    "≤": "leq",
    "≥": "geq",
    "≠": "neq",
    "∞": "infty",
    "π": "pi",
    "×": "times",
    "·": "cdot",
    "∪": "cup",
    "∈": "in",
}
_PLAIN = {"−": "-", "–": "-", "°": r"^\circ"}
_RAISED = {ord(raised): digit for raised, digit in zip("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789", strict=True)}
_CHARACTERS = str.maketrans(_PLAIN | {c: rf"\{name} " for c, name in _COMMANDS.items()})
_FORMS = (
    (r"([\u3000-\u9fff\uff00-\uffef]+)", r" \1 "),
    (r"(?<![\\A-Za-z])(pi|exp)(?![A-Za-z])", r"\\\1 "),
    (r"√\s*(\w+|\([^()]*\))", r"\\sqrt{\1}"),
    (r"(?<=[A-Za-z\d)])\*\*(?=[A-Za-z\d(-])", "^"),
)
"""Forms of plain text and of programming languages, and the forms that math-verify reads."""
_RETRACTION = re.compile(r"[.:;!?](?=\s)|\b(?:no|not|wait|wrong)\b", re.IGNORECASE)
"""Between two boxes: the second replaces the first, and does not add to it."""
_WORD = r"(?<![\\A-Za-z])(?!pi\b)[A-Za-z]{2,}(?![a-z]*\()"
_BARE = re.compile(rf"(?=.*[A-Za-zα-ω√⁰¹²³⁴-⁹\\([{{])(?:(?!\d\s+\w|\\[(\[]|{_WORD})[^$\n\u3000-\uffef])+")
"""One line with a letter or bracket, and without delimiters, units or words: an expression."""
# The package warns of each limit that it is not given.
logging.getLogger("math_verify").setLevel(logging.ERROR)


@functools.lru_cache(64)
def expressions(answer: str) -> list[Any]:
    """The values that math-verify reads in a reference answer; empty if it is not a mathematical expression.

    LaTeX is read between delimiters only, which bare answers lack.
    """
    return _parse(answer if re.search(r"(?<!\\)\$", answer) or "\\boxed" in answer else f"${answer}$")


def equal(answer: str, text: str) -> bool:
    """Whether the mathematical answer of a completion equals that of the reference."""
    return same(expressions(answer), read(text))


def longest_seconds(**_: Any) -> float:
    """Longest that a comparison takes by the clock, on a machine with much other work."""
    return 20 * SECONDS


@functools.lru_cache(64)
def read(text: str) -> list[Any]:
    """The mathematical answer of a completion after its thoughts: the last box, or the last expression."""
    with _limited():
        return _read(spoken(text))
    return []


def _read(text: str) -> list[Any]:
    text = re.sub(r"\\(boxed|fbox)\s*\{\s*\}", "", text)
    boxed = boxes(text)
    for number, ((_, end, _), (start, _, _)) in reversed(list(enumerate(itertools.pairwise(boxed), start=1))):
        if _RETRACTION.search(text, end, start):
            # Only the boxes after the retraction count.
            for begin, end, content in reversed(boxed[:number]):
                text = text[:begin] + content + text[end:]
            return _parse(text)
    # Without a box: an answer tag, a `####` line, or all of it.
    text = text if boxed else final(text).strip().rstrip(".")
    return (expressions(text) if not boxed and _BARE.fullmatch(text) else []) or _parse(text)


def same(gold: list[Any], found: list[Any]) -> bool:
    """Whether two results of `expressions` or `read` have a common value; False where that takes too long to know."""
    with _limited():
        return _same(gold, found)
    return False


def _same(gold: list[Any], found: list[Any]) -> bool:
    from math_verify import verify

    if any(mine == theirs for mine in gold for theirs in found):
        return True
    gold, found = ([e for e in some if isinstance(e, str) or _size(e)[0] < MOST_DIGITS] for some in (gold, found))
    mine, theirs = (_rational(some[0]) if some else None for some in (gold, found))
    if mine is not None and theirs is not None:
        # The package compares to 15 digits: 1/2^99 would be 1/2^98.
        return bool(mine == theirs)
    return bool(verify(gold, found, timeout_seconds=None, allow_set_relation_comp=True))


def _rational(expression: Any) -> Any:
    """The rational number that an expression is; None for any other, and for percentages, which are 50 and 0.5."""
    import sympy

    if not isinstance(expression, sympy.Expr) or expression.has(sympy.Float, sympy.UnevaluatedExpr, sympy.Symbol):
        return None
    value = expression.doit()
    return value if isinstance(value, sympy.Rational) else None


def _parse(text: str) -> list[Any]:
    import sympy
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if _nesting(text) > MOST_NESTED:
        return []
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    text = text.translate(_CHARACTERS).replace("\\mathrm{e}", "e")
    text = re.sub("⁻?[⁰¹²³⁴-⁹]+", lambda raised: f"^{{{raised[0].translate(_RAISED)}}}", text)
    for form, latex in _FORMS:
        text = re.sub(form, latex, text)
    # The package's own limits are whole seconds of wall-clock time for each of many steps.
    found = parse(text, configs, parsing_timeout=None)
    dotted = re.search(r"\\[lcv]?dots", text)
    # Of a list that goes on the package reads a part, and 12:00 is a division by zero: their text is compared.
    return [one for one in found if isinstance(one, str) or not (dotted or one.has(sympy.zoo, sympy.nan))]


def _nesting(text: str) -> int:
    """Most brackets that are open at once on a line."""
    depth = most = 0
    for character in re.findall(r"[\[({})\]\n]", text):
        depth = 0 if character == "\n" else max(0, depth + (1 if character in "[({" else -1))
        most = max(most, depth)
    return most


def _size(expression: Any) -> tuple[float, float]:
    """Bounds for computing an expression: digits of its numbers, and the decimal logarithm of its absolute value."""
    import sympy

    sizes = [_size(argument) for argument in getattr(expression, "args", ())]
    digits = sum(size[0] for size in sizes)
    # Of sums and products; functions without a name below are smaller.
    logarithm = sum(max(size[1], 0.0) for size in sizes) + math.log10(len(sizes) or 1)
    match expression:
        case sympy.Rational():
            above, below = math.log10(abs(expression.p) or 1), math.log10(expression.q)
            return max(above, below), above - below
        case sympy.Pow():
            times = _power_of_ten(sizes[1][1])
            return digits + sizes[0][0] * times, max(sizes[0][1], 0.0) * times
        case sympy.factorial() | sympy.binomial() | sympy.Sum() | sympy.Product():
            times = _power_of_ten(max(size[1] for size in sizes))
            return digits + (logarithm + 1.0) * times, (logarithm + 1.0) * times
    return digits, logarithm


def _power_of_ten(logarithm: float) -> float:
    return float(10 ** min(logarithm, 300.0))


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Ends the body after SECONDS of processor time; only in a main thread, as signals are."""
    from math_verify.errors import TimeoutException

    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise TimeoutException

    before = signal.signal(signal.SIGVTALRM, end)
    # Again and again: the package takes an interruption for the failure of one of its steps.
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, SECONDS / 50)
    try:
        with contextlib.suppress(TimeoutException):
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
