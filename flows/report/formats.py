"""Names, numbers, times and model output for the report."""

from __future__ import annotations

import datetime
import functools
import re

LABELS = {
    "base": "base", "champion": "champion", "start": "start",
    "sft": "SFT", "distill": "distilled", "preference": "preference", "rl": "RL",
}  # fmt: skip
"""Titles of the policies of a run, in the order of training."""
ROUNDING = 1e-12
"""Smaller numbers are errors of a sum."""
LONGEST = 1200
"""Most characters shown of a text."""
# Control characters but tab and newline, and characters that change the direction of text: a model's output must not
# rearrange the page.
UNSEEN = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"


def show(value: float | None, digits: int = 3) -> str:
    """Return a number with `digits` significant digits; thousands stay whole, rounding errors of 0 are 0."""
    if value is None:
        return "–"
    value = 0.0 if abs(value) < ROUNDING else value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def duration(seconds: float | None) -> str:
    """4.2 s, 3 min 20 s, 1 h 05 min."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@functools.lru_cache(maxsize=4096)
def seconds_at(text: str) -> float:
    """Convert a time of a record (ISO 8601) to seconds since 1970."""
    return datetime.datetime.fromisoformat(text).timestamp()


def when(text: str) -> str:
    """Format a time of a record in UTC."""
    return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def visible(text: str | None, longest: int = LONGEST) -> str:
    """Escape control and direction characters of a model's text, and shorten it to `longest` characters."""
    text = text or ""
    rest = f" … ({len(text) - longest:,} more characters)" if len(text) > longest else ""
    return re.sub(UNSEEN, lambda m: m[0].encode("unicode_escape").decode(), text[:longest]) + rest
