"""Reward functions by name. A user's own is `module:function` with the same signature.

Signature, as TRL users know it: `f(prompts, completions, **columns) -> list[float | None]`; columns are
`completion_ids`, `answer`, `metadata` (parsed) and the keyword arguments of the recipe. None means that the function
does not apply to a sample.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

RewardFn = Callable[..., Sequence[float | None]]


def exact_match(prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[str | None], **_: Any) -> list:
    """1 where the completion, without surrounding space, is the answer to the letter; else 0."""
    return [None if a is None else float(c.strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]


def number_match(prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[str | None], **_: Any) -> list:
    """1 where the last number in the completion equals the answer; else 0."""

    def one(text: str, answer: str) -> float:
        found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
        return float(bool(found) and float(found[-1]) == float(answer.replace(",", "")))

    return [None if a is None else one(c, a) for c, a in zip(completions, answer, strict=True)]


def matches(prompts: Sequence[str], completions: Sequence[str], *, pattern: str, **_: Any) -> list[float]:
    """1 where the whole completion matches the regular expression `pattern`; else 0."""
    return [float(re.fullmatch(pattern, c, re.DOTALL) is not None) for c in completions]


def contains(prompts: Sequence[str], completions: Sequence[str], *, text: str, **_: Any) -> list[float]:
    """1 where the completion contains `text`; else 0."""
    return [float(text in c) for c in completions]


def token_share(
    prompts: Sequence[str], completions: Sequence[str], *, completion_ids: Sequence[Sequence[int]], token: int, **_: Any
) -> list[float]:
    """Share of the completion's tokens that are `token`."""
    return [sum(t == token for t in ids) / max(1, len(ids)) for ids in completion_ids]


def length_at_most(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    completion_ids: Sequence[Sequence[int]],
    tokens: int,
    **_: Any,
) -> list[float]:
    """0 up to `tokens` tokens, then falling by 1 for each further `tokens`."""
    return [-max(0.0, len(ids) / tokens - 1.0) for ids in completion_ids]


def reasoning_gym_score(
    prompts: Sequence[str], completions: Sequence[str], *, metadata: Sequence[dict[str, Any]], **_: Any
) -> list[float]:
    """The score of the task's own verifier; `metadata` holds `task` and `entry` as data preparation wrote them."""
    import reasoning_gym

    scores = []
    for completion, meta in zip(completions, metadata, strict=True):
        verifier = reasoning_gym.get_score_answer_fn(meta["task"])
        scores.append(float(verifier(completion.strip(), meta["entry"])))
    return scores


BUILT_IN: dict[str, RewardFn] = {
    f.__name__: f
    for f in (exact_match, number_match, matches, contains, token_share, length_at_most, reasoning_gym_score)
}


def find(name: str) -> RewardFn:
    """The built-in called `name`, or the function of `module:function`. Raises ValueError naming what is there."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"no reward function {name!r}; there are {', '.join(BUILT_IN)}, or module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"reward function {name!r}: {e}") from e
    return found
