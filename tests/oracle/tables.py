"""Tables of a round as a test wants them: ragged groups of random tokens with any totals."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlhf.tuning.rows import CompletionRow, ScoreRow
from tests.oracle.product import EOS, VOCABULARY


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A completion of a made-up round."""

    prompt: int
    """Number of its prompt: two places may have the same."""
    place: int
    sample: int
    length: int
    """Tokens; 0 is an empty completion."""
    total: float | None
    truncated: bool = False
    unseen: bool = False
    """Whether one token's log mu is not finite."""


def tokens_of(seed: int, number: int, length: int) -> list[int]:
    """Random tokens, the same for the same numbers."""
    return np.random.default_rng((seed, number)).integers(3, VOCABULARY, length).tolist()


def completion(drawn: Drawn, policy: str, seed: int) -> CompletionRow:
    """The row of the rollout table. log mu are made up: off from any policy, so that corrections have work to do."""
    name = drawn.place * 1000 + drawn.sample
    ids = tokens_of(seed, name, drawn.length)
    if ids and not drawn.truncated:
        ids[-1] = EOS
    mu = (-4.1 + np.random.default_rng((seed, name, 1)).normal(0, 0.4, len(ids))).tolist()
    if drawn.unseen and mu:
        mu[len(mu) // 2] = -np.inf
    return CompletionRow(
        prompt_id=f"p{drawn.prompt}",
        place=drawn.place,
        sample=drawn.sample,
        prompt_ids=tokens_of(seed, 900000 + drawn.prompt, 2 + drawn.prompt % 4),
        token_ids=ids,
        logprobs=mu,
        text="x" * len(ids),
        stop="length" if drawn.truncated else "eos",
        policy=policy,
    )


def score(row: CompletionRow, total: float | None) -> ScoreRow:
    """The row of the score table."""
    failure = "made up" if total is None else None
    return ScoreRow(
        prompt_id=row.prompt_id, place=row.place, sample=row.sample, rewards={"r": total}, total=total, failure=failure
    )


def round_of(drawn: Sequence[Drawn], policy: str, seed: int) -> tuple[list[CompletionRow], list[ScoreRow]]:
    """Rollouts and scores of a round."""
    rows = [completion(d, policy, seed) for d in drawn]
    return rows, [score(row, d.total) for row, d in zip(rows, drawn, strict=True)]
