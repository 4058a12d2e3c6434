"""A language model as the judge, at an endpoint that speaks OpenAI's chat completions (vLLM, SGLang, llama.cpp)."""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from rlhf.tuning.allowed import NotAllowed, check_key
from rlhf.tuning.retries import BUSY, pause, retried
from rlhf.tuning.rewards.failures import Outage, Refusal, kind_of
from rlhf.tuning.rewards.texts import spoken

TEMPLATE = (
    "Rate the answer to the question for correctness and helpfulness from {low:g} to {high:g}.\n\n"
    "Question:\n{prompt}\n\nAnswer:\n{completion}\n{reference}\n"
    "Reply with the number alone."
)


FIRST_PAUSE_SECONDS = 0.5


# A number, and what it is said to be of: 7/10, [[7]]/10, **7** (out of 10), 7 of 10.
_VERDICT = re.compile(r"(-?\d+(?:\.\d+)?)(?:[^\w.]*(?:/|out of|of)[^\w.]*(\d+(?:\.\d+)?))?")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would send the key to another place, and turns a POST into a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    """Opens without redirects, and without a proxy of the environment for http, which would read the key."""
    proxies = {scheme: url for scheme, url in urllib.request.getproxies().items() if scheme == "https"}
    return urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler(proxies))


class JudgeFailed(RuntimeError):
    """The judge read the answer and gave no usable verdict on it."""


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
    timeout: float = 60.0,
    **_: Any,
) -> list[float]:
    """The judge's number for each sample, mapped linearly from [low, high] to [0, 1].

    `url` is the base of the API (http://host:8000/v1). `template` may use {prompt}, {completion}, {reference} (the
    answer, where there is one), {low} and {high}; the last number of the reply is the verdict, and of 7/10 or
    7 out of 10 it is 7. The API key is read from the environment variable `key_variable`. A request takes at most
    `timeout` seconds from its beginning to the last byte of the reply, and is tried again `retries` times, after pauses
    that double.

    Raises JudgeFailed for a reply without a number in the range, with one out of another than `high` (3/5 where 10 is
    best) or with `high` after other numbers in its last line (2 on a scale of 1 to 10), and for a request that the
    server refuses as such (400), which is the sample's failure; Outage for a server that cannot be reached, stays busy
    or silent, or does not know the key; Refusal for another error status.
    """
    key = os.environ.get(key_variable)
    if key:
        try:
            check_key(key_variable, url)
        except NotAllowed as error:
            raise Outage(str(error)) from error
    verdicts = []
    for prompt, text, gold in zip(prompts, completions, answer, strict=True):
        reference = "" if gold is None else f"\nReference answer:\n{gold}\n"
        question = template.format(prompt=prompt, completion=text, reference=reference, low=low, high=high)
        reply = _ask(url, model, question, key, retries, timeout)
        verdicts.append((_number(reply, low, high) - low) / (high - low))
    return verdicts


def _number(reply: str, low: float, high: float) -> float:
    """The number that the judge gives after its thoughts. Raises JudgeFailed where there is none in the range."""
    reply = spoken(reply)
    found = list(_VERDICT.finditer(reply))
    if not found:
        raise JudgeFailed(f"the judge's reply has no number from {low:g} to {high:g}: {reply[:80]!r}")
    # A model that reasons before it answers names its number last.
    number, best = found[-1].groups()
    if not low <= float(number) <= high or (best is not None and float(best) != high):
        raise JudgeFailed(f"the judge's reply ends with no number from {low:g} to {high:g}: {reply[-80:]!r}")
    line = reply.strip().splitlines()[-1]
    others = [float(match[1]) for match in _VERDICT.finditer(line) if low <= float(match[1]) < high]
    # "2 on a scale of 1 to 10", "7 (max: 10)": the end of the scale is not the verdict.
    if float(number) == high and best is None and others:
        raise JudgeFailed(f"the judge's reply ends with {high:g}, the best, after another number: {reply[-80:]!r}")
    return float(number)


def longest_seconds(*, retries: int = 3, timeout: float = 60.0, **_: Any) -> float:
    """Longest that the verdict on one sample takes: all tries with their pauses, and a second for the rest."""
    return (retries + 1) * timeout + sum(pause(i, FIRST_PAUSE_SECONDS) for i in range(retries)) + 1.0


def _ask(url: str, model: str, text: str, key: str | None, retries: int, timeout: float) -> str:
    # Temperature 0: scores should repeat as far as the server's arithmetic does.
    body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0.0}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)

    def reply() -> Any:
        with _opener().open(request, timeout=timeout) as response:
            return json.load(response)

    try:
        answer = retried(
            lambda: _within(timeout, reply), tries=retries + 1, first_seconds=FIRST_PAUSE_SECONDS, passing=_passing
        )
    except urllib.error.HTTPError as e:
        failed = {"sample": JudgeFailed, "refusal": Refusal, "outage": Outage}[kind_of(e)]
        raise failed(f"{url} answered {e.code} {e.reason}") from e
    except TimeoutError as e:
        raise Outage(f"{url} gave no answer within {timeout:g} s") from e
    except OSError as e:
        raise Outage(f"{url} cannot be reached: {getattr(e, 'reason', e)}") from e
    except (http.client.HTTPException, ValueError) as e:
        raise Outage(f"{url} gave no JSON: {type(e).__name__}: {e}") from e
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as e:
        raise Outage(f"{url} speaks no chat completions of OpenAI: {str(answer)[:80]!r}") from e
    if not isinstance(content, str):
        raise JudgeFailed(f"the judge's reply is {content!r:.80}: expected a text")
    return content


def _within(seconds: float, action: Callable[[], Any]) -> Any:
    """The result of `action`. Raises what it raises, and TimeoutError after `seconds`.

    A socket's own limit is of each wait: a server that sends a blank now and then, as proxies do, never passes it.
    """
    results: list[Any] = []
    errors: list[Exception] = []

    def act() -> None:
        try:
            results.append(action())
        except Exception as error:
            errors.append(error)

    # No thread can be ended: one that still waits for its server goes with the process.
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def _passing(error: Exception) -> bool:
    """Whether a later attempt at the same request may succeed."""
    # An HTTPError is an OSError too. OpenAI's API answers 409 where it could not get a lock in time.
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (409, *BUSY)
    return isinstance(error, OSError | http.client.HTTPException)
