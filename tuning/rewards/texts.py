"""The part of a completion that a verifier reads: the answer after the thoughts, and a marked final answer in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

BOXED = r"\\(?:boxed|fbox)\s*\{(?!\s*\})((?:[^{}]++|(\{(?:[^{}]++|(?2))*+\}))*+)\}"
"""The content of a LaTeX box that is not empty, with the braces in it."""
_THOUGHT = r"(?:think|thinking|thought|reasoning)"
_THOUGHT_END = regex.compile(rf"</{_THOUGHT}>|\[/THINK\]|◁/think▷")
_THOUGHT_START = regex.compile(rf"<{_THOUGHT}>|\[THINK\]|◁think▷")
# A box, an answer tag, and the line that ends a solution of GSM8K, whichever a text has, in this order.
_MARKED = (BOXED, r"<answer>(.*?)(?:</answer>|$)", r"^#{3,4} *([^\n]*\d[^\n]*)$")


def spoken(text: str) -> str:
    """The text after its thoughts; the template may have opened them. Thoughts without an end have no text after."""
    ends = list(_THOUGHT_END.finditer(text))
    rest = text[ends[-1].end() :] if ends else text
    start = _THOUGHT_START.search(rest)
    return rest[: start.start()] if start else rest


def begun(text: str, metadata: Mapping[str, Any] | None) -> str:
    """A completion with the thought that the chat template has opened for it (`metadata.opened_tag`)."""
    tag = (metadata or {}).get("opened_tag")
    return f"<{tag}>{text}" if tag else text


def final(text: str) -> str:
    """The last box of the text, or the last answer tag, or the last `####` line; the text without any of them."""
    for pattern in _MARKED:
        if matches := list(regex.finditer(pattern, text, regex.DOTALL | regex.MULTILINE)):
            return matches[-1][1]
    return text


def extracted(text: str, pattern: str | None, seconds: float | None = None) -> str:
    """The last match of `pattern` in the text: its first group, or all of it; "" without either.

    Raises TimeoutError where the search takes longer than `seconds`.
    """
    if pattern is None:
        return text
    matches = list(regex.finditer(pattern, text, regex.DOTALL, timeout=seconds))
    if not matches:
        return ""
    group = 1 if matches[-1].re.groups else 0
    # A group outside the branch that matched is None.
    return matches[-1][group] or ""
