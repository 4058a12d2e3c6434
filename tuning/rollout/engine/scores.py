"""Log-probabilities of a prompt's own tokens, for callers that score given text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf.tuning.rollout.engine.cache import Stack
from rlhf.tuning.rollout.engine.slots import Run, Slot, pack
from rlhf.tuning.rollout.requests import Request


@dataclasses.dataclass(frozen=True)
class Scores:
    """One entry for each token of a prompt but its first, which nothing stands before."""

    logps: list[float]
    """Its log-probability after the tokens before it, at temperature 1."""
    top: list[list[tuple[int, float]]]
    """The most probable ids in its place with their log-probabilities."""


def prompt_scores(prompt: Sequence[int], cache: list[Stack], size: int, program: Callable[..., Any]) -> Scores:
    """The scores of a prompt, in chunks of `size` tokens; `cache` has one slot with room for it.

    `program` is `programs.score` of a cache, a chunk, and the token after each of the chunk's.
    """
    slot = Slot(Run(0, 0, Request(prompt, 1)))
    scores = Scores([], [])
    while slot.prefilling:
        at = len(slot.held)
        chunk, [(_, count)], _ = pack([slot], size)
        following = np.zeros(size, np.int32)
        following[:count] = prompt[at + 1 : at + 1 + count]
        cache, logps, ids, best = program(cache, chunk, following)
        scores.logps.extend(np.asarray(logps)[:count].tolist())
        pairs = zip(np.asarray(ids)[:count].tolist(), np.asarray(best)[:count].tolist(), strict=True)
        scores.top.extend(list(zip(*pair, strict=True)) for pair in pairs)
        slot.held.extend(prompt[at : at + count])
    return scores
