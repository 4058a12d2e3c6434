"""An independent judge of sentiment: VADER's rule-based lexicon, which no reward model here has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def vader(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Positivity in [0, 1]: VADER's compound score (Hutto and Gilbert, 2014) moved from [-1, 1]; 0 for no text."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as e:
        raise ImportError("this judge needs a small package: pip install vaderSentiment") from e
    analyzer = SentimentIntensityAnalyzer()
    return [(analyzer.polarity_scores(c)["compound"] + 1) / 2 if c.strip() else 0.0 for c in completions]
