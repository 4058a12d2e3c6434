"""The size of an engine, and how it alternates between prefill, decoding and the host."""

from __future__ import annotations

import dataclasses

FREE_SHARE = 0.75
"""Share of the free memory that a stage gives to keys and values; programs need the rest, for logits first."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The size of an engine, and how it steps. None of it changes a sample."""

    slots: int = 256
    """Completions decoded side by side, at most."""
    context: int = 0
    """Tokens of the longest prompt with its completion; 0: from the requests of a `run`, else the model's positions."""
    cache_bytes: int = 2**62
    """Memory for keys and values; it may allow fewer than `slots`. Where layers are in one stack (`decoders`), the keys
    or the values are in memory twice while slots change in number or length."""
    cache_share: float = 0.0
    """In place of `cache_bytes`, a share of the memory that weights leave free, on devices that report it."""
    steps: int = 16
    """Tokens a row that are decoded before the host looks at the result. The device waits meanwhile: the host's time
    for a step is `python -m tests.bench host1024` (or 256, 64)."""
    chunks: tuple[int, ...] = (64, 192, 320)
    """Sizes of prefill chunks, in tokens."""
    prefill_chunks: int = 0
    """Chunks between two runs of decoding, so that new prompts do not delay tokens of others; 0: no limit."""
    page_tokens: int = 64
    """Tokens of a page of `cache: paged`."""
    few: bool = False
    """Whether at most `shapes.DECODE_PROGRAMS` programs decode, while context and memory do not change: in slots three
    numbers of rows, each at two capacities; in pages three numbers of rows, and two of mixed steps, which have the
    largest chunk."""

    def rows(self, most: int) -> list[int]:
        """Numbers of rows of an engine with `few`, ascending: an eighth of the next, up to `most`."""
        return sorted({-(-most // 64), -(-most // 8), most})
