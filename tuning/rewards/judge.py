"""A language model as the judge, behind an endpoint that speaks OpenAI's chat completions (vLLM, SGLang, llama.cpp)."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from tuning.retries import BUSY, retried

TEMPLATE = (
    "Rate the answer to the question for correctness and helpfulness from {low:g} to {high:g}.\n\n"
    "Question:\n{prompt}\n\nAnswer:\n{completion}\n{reference}\n"
    "Reply with the number alone."
)


class JudgeFailed(RuntimeError):
    """The endpoint gave no usable verdict."""


def judge(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    url: str,
    model: str,
    answer: Sequence[str | None],
    template: str = TEMPLATE,
    low: float = 0.0,
    high: float = 10.0,
    key_variable: str = "OPENAI_API_KEY",
    retries: int = 3,
    **_: Any,
) -> list[float]:
    """The judge's number for each sample, mapped linearly from [low, high] to [0, 1].

    `url` is the base of the API (http://host:8000/v1). `template` may use {prompt}, {completion}, {reference} (the
    answer, where there is one), {low} and {high}; the last number of the reply is the verdict. The API key is
    read from the environment variable `key_variable`. Raises JudgeFailed for a reply without a number in the range, or
    for an endpoint that fails or stays busy; the sample is then a failure with that reason.
    """
    verdicts = []
    for prompt, text, gold in zip(prompts, completions, answer, strict=True):
        reference = "" if gold is None else f"\nReference answer:\n{gold}\n"
        question = template.format(prompt=prompt, completion=text, reference=reference, low=low, high=high)
        reply = _ask(url, model, question, os.environ.get(key_variable), retries)
        # A model that reasons before it answers names its number last.
        numbers = re.findall(r"-?\d+(?:\.\d+)?", reply)
        if not numbers or not low <= float(numbers[-1]) <= high:
            raise JudgeFailed(f"the judge's reply has no number from {low:g} to {high:g}: {reply[:80]!r}")
        verdicts.append((float(numbers[-1]) - low) / (high - low))
    return verdicts


def _ask(url: str, model: str, text: str, key: str | None, retries: int) -> str:
    # Temperature 0: scores should repeat as far as the server's arithmetic does.
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0.0}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)

    def reply() -> str:
        with urllib.request.urlopen(request) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])

    try:
        return retried(reply, tries=retries + 1, first_seconds=0.5, passing=_passing)
    except urllib.error.HTTPError as e:
        raise JudgeFailed(f"{url} answered {e.code} {e.reason}") from e
    except urllib.error.URLError as e:
        raise JudgeFailed(f"{url} cannot be reached: {e.reason}") from e


def _passing(error: Exception) -> bool:
    """Whether a later attempt at the same request may succeed."""
    # An HTTPError is a URLError too. OpenAI's API answers 409 where it could not get a lock in time.
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (409, *BUSY)
    return isinstance(error, urllib.error.URLError)
