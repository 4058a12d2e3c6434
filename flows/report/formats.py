"""Names, numbers, times and model output as the report shows them."""

from __future__ import annotations

import datetime
import functools
import re

LABELS = {
    "base": "base", "champion": "champion", "start": "start",
    "sft": "SFT", "distill": "distilled", "preference": "preference", "rl": "RL",
}  # fmt: skip
"""Names of the policies that a run evaluates, in the order in which it trains them."""
ROUNDING = 1e-12
"""Below it a number is the error of a sum."""
LONGEST = 1200
"""Characters shown of a text."""
# Control characters but tab and newline, and characters that change the direction of text: a model's output must not
# be able to rearrange the page around it.
UNSEEN = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"


def show(value: float | None, digits: int = 3) -> str:
    """A number with that many significant digits; thousands are kept whole, and what rounding leaves of 0 is 0."""
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
    """A moment of a record (ISO 8601) as seconds since 1970."""
    return datetime.datetime.fromisoformat(text).timestamp()


def when(text: str) -> str:
    """A moment of a record in UTC."""
    return datetime.datetime.fromisoformat(text).astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def visible(text: str | None, longest: int = LONGEST) -> str:
    """A model's text with control and direction characters as escapes, shortened to `longest` characters."""
    text = text or ""
    rest = f" … ({len(text) - longest:,} more characters)" if len(text) > longest else ""
    return re.sub(UNSEEN, lambda m: m[0].encode("unicode_escape").decode(), text[:longest]) + rest
