"""The part of a completion that a verifier reads: the answer after the thoughts, and a marked final answer in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

_BOX = regex.compile(r"\\(?:boxed|fbox)\s*\{(?!\s*\})")
_THOUGHT = r"(?:think|thinking|thought|reasoning)"
_THOUGHT_END = regex.compile(rf"</{_THOUGHT}>|\[/THINK\]|◁/think▷")
_THOUGHT_START = regex.compile(rf"<{_THOUGHT}>|\[THINK\]|◁think▷")
# An answer tag, and the line that ends a solution of GSM8K.
_MARKED = (r"<answer>(.*?)(?:</answer>|$)", r"^#{3,4} *+([^\n]*\d[^\n]*)$")


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


def boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of each LaTeX box that is closed and not empty; the content has the boxes in it."""
    # A recursive pattern would read a text of unclosed boxes once for each of them.
    opened: list[int] = []
    closed: dict[int, int] = {}
    for brace in regex.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closed[opened.pop()] = brace.start()
    found: list[tuple[int, int, str]] = []
    for box in _BOX.finditer(text):
        end = closed.get(box.end() - 1)
        if end is not None and (not found or box.start() >= found[-1][1]):
            found.append((box.start(), end + 1, text[box.end() : end]))
    return found


def final(text: str) -> str:
    """The last box of the text, or the last answer tag, or the last `####` line; the text without any of them."""
    if found := boxes(text):
        return found[-1][2]
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
