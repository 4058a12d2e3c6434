"""The answer that a completion gives, for majority votes: what the judge compares, in a form in which equals are equal.

Of a judge whose comparison is not known here, a user's own or one of the whole text, the answer is the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tuning.rewards.functions import extracted, last_number

BOXED = r"\\boxed\{((?:[^{}]++|(\{(?:[^{}]++|(?2))*+\}))*+)\}"
"""The content of a LaTeX box, with the braces in it."""
SECONDS = 1.0
"""Longest that the search for an answer takes: unlike the judge it runs in the worker, which nothing ends for it."""


def _text(text: str, arguments: Mapping[str, Any]) -> str | None:
    return extracted(text, arguments.get("extract"), SECONDS).strip() or None


def _number(text: str, arguments: Mapping[str, Any]) -> str | None:
    number = last_number(extracted(text, arguments.get("extract"), SECONDS))
    # 7, 7.0 and 7.00 are one vote.
    return None if number is None else repr(number)


def _boxed(text: str, arguments: Mapping[str, Any]) -> str | None:
    # Forms of one value (1/2 and 0.5) stay apart: to tell that they are equal takes the judge's own parser.
    boxed = extracted(text, BOXED, SECONDS) if "\\boxed" in text else text
    return re.sub(r"\s+", "", boxed) or None


FORMS: dict[str, Callable[[str, Mapping[str, Any]], str | None]] = {
    "exact_match": _text, "number_match": _number, "math_equal": _boxed,
}  # fmt: skip
"""The answer in a text by the judge that compares it."""


def answer_of(judge: str, arguments: Mapping[str, Any], text: str) -> str | None:
    """The answer that the function `judge` with these arguments finds in a completion.

    None where there is none, or none within SECONDS.
    """
    try:
        return FORMS.get(judge, _text)(text, arguments)
    except TimeoutError:
        return None
