"""A reward function that does everything a reward function may do, as the text of the completion says."""

from typing import Any


def spoken(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """The number that the completion is; `none` does not apply, other words fail."""
    return [None if text == "none" else float(text) for text in completions]
