"""The answer that a completion gives, for majority votes, in a canonical form of the judge's comparison.

Of `math_equal`, whose answers have many forms (1/2, 0.5), those of a problem that its verifier takes for equal have the
form of the first. Of a judge whose comparison is not known here, a user's own or one of the whole text, the answer is
the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.tuning.rewards import mathematics
from rlhf.tuning.rewards.failures import check_failures
from rlhf.tuning.rewards.functions import last_number
from rlhf.tuning.rewards.processes import attempt
from rlhf.tuning.rewards.samples import Outcome, Sample
from rlhf.tuning.rewards.texts import begun, boxes, extracted, spoken

SECONDS = 1.0
"""Longest that the search for an answer takes: unlike the judge it runs in the worker, which nothing ends for it."""


def _text(text: str, arguments: Mapping[str, Any]) -> str | None:
    extract = arguments.get("extract")
    return (spoken(text) if extract is None else extracted(text, extract, SECONDS)).strip() or None


def _number(text: str, arguments: Mapping[str, Any]) -> str | None:
    number = last_number(text, arguments.get("extract"), SECONDS)
    # 7, 7.0 and 7.00 are one vote.
    return None if number is None else number.name


def _boxed(text: str, arguments: Mapping[str, Any]) -> str | None:
    text = spoken(text)
    found = boxes(text)
    boxed = found[-1][2] if found else "" if "\\boxed" in text else text
    return re.sub(r"\s+", "", boxed) or None


FORMS: dict[str, Callable[[str, Mapping[str, Any]], str | None]] = {
    "exact_match": _text, "number_match": _number, "math_equal": _boxed,
}  # fmt: skip
"""The answer in a text by the judge that compares it."""


def answer_of(judge: str, arguments: Mapping[str, Any], text: str) -> str | None:
    """The answer that the function `judge` with these arguments finds in a completion.

    None without an answer within SECONDS.
    """
    try:
        return FORMS.get(judge, _text)(text, arguments)
    except TimeoutError:
        return None


def answers_of(
    judge: str,
    arguments: Mapping[str, Any],
    samples: Sequence[Sample],
    problems: Sequence[int],
    *,
    seconds: float,
    workers: int | None = None,
) -> list[str | None]:
    """`answer_of` of each sample; answers of one of the `problems` [N] that the judge takes for equal are equal.

    seconds: limit of the comparisons, for each sample of a problem. Where they take longer, or fail, forms are compared
    as text. Raises Outage if the comparing process cannot run.
    """
    forms = [
        answer_of(judge, arguments, begun(s.completion, None if arguments.get("extract") else s.metadata))
        for s in samples
    ]
    if judge != "math_equal":
        return forms
    # Equal forms are read alike, so that each is compared once.
    problems_of: dict[int, dict[str, int]] = {}
    for number, (problem, form) in enumerate(zip(problems, forms, strict=True)):
        if form is not None:
            problems_of.setdefault(problem, {}).setdefault(form, number)
    chosen: list[Sample] = []
    calls: list[list[int]] = []
    for firsts in problems_of.values():
        calls.append(list(range(len(chosen), len(chosen) + len(firsts))))
        chosen += [samples[number] for number in firsts.values()]
    # A limit for each sample of the largest problem.
    longest = seconds * max(map(len, calls), default=1)
    outcomes = attempt(EQUALS, {}, chosen, seconds=longest, workers=workers, calls=calls)
    check_failures({judge: outcomes}, 1.0, what="comparison of answers by")
    alike = {
        problem: _votes(list(firsts), [outcomes[k] for k in call])
        for (problem, firsts), call in zip(problems_of.items(), calls, strict=True)
    }
    return [None if form is None else alike[problem][form] for problem, form in zip(problems, forms, strict=True)]


def _votes(forms: Sequence[str], outcomes: Sequence[Outcome]) -> dict[str, str | None]:
    """The vote of each form of a problem: the first form that is equal; its own if the comparison failed."""
    if any(outcome.failure is not None for outcome in outcomes):
        return {form: form for form in forms}
    return {
        form: None if outcome.value is None else forms[int(outcome.value)]
        for form, outcome in zip(forms, outcomes, strict=True)
    }


EQUALS = f"{__name__}:equal_expressions"
"""The function that compares, which runs in a process that can be killed (R20)."""


def equal_expressions(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    metadata: Sequence[Mapping[str, Any]] | None = None,
    **_: Any,
) -> list[float | None]:
    """For each completion of a problem the number of the first whose mathematical answer math-verify takes for equal.

    None if it reads no answer. Equality holds in either order of the two: of an equation x = 1 and a value 1 one is
    the reference.
    """
    texts = map(begun, completions, metadata or [{}] * len(completions))
    read = [mathematics.read(text) for text in texts]
    firsts: list[int] = []
    found: list[float | None] = []
    for number, answer in enumerate(read):
        if not answer:
            found.append(None)
            continue
        same = (
            first for first in firsts if mathematics.same(read[first], answer) or mathematics.same(answer, read[first])
        )
        first = next(same, number)
        if first == number:
            firsts.append(number)
        found.append(float(first))
    return found
