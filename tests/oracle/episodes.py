"""Tables of a round of trajectories: turns that were sampled, observations between them that nobody trains on."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlhf.tuning.agents.rows import TurnRow
from rlhf.tuning.rows import CompletionRow, ScoreRow
from tests.oracle.tables import score, tokens_of

OBSERVED = 2
"""Tokens of the observation behind the first turn; each further one is longer by one."""


@dataclasses.dataclass(frozen=True)
class Played:
    """A trajectory of a made-up round."""

    prompt: int
    """Number of its first context: trajectories of one place may begin from several."""
    place: int
    sample: int
    turns: Sequence[tuple[int, float | None, str | None]]
    """(sampled tokens, the environment's reward, state) of each."""
    total: float | None
    stop: str = "eos"
    apart: bool = False
    """Whether each turn is a row behind a context of its own."""


def episodes_of(
    played: Sequence[Played], policy: str, seed: int
) -> tuple[list[CompletionRow], list[ScoreRow], list[TurnRow]]:
    """Rollouts, scores and turns of a round."""
    rollouts: list[CompletionRow] = []
    scores: list[ScoreRow] = []
    turns: list[TurnRow] = []
    for p in played:
        rows, own = _rows(p, policy, seed)
        rollouts += rows
        turns += own
        scores.append(score(rows[-1], p.total))
    return rollouts, scores, turns


def _rows(p: Played, policy: str, seed: int) -> tuple[list[CompletionRow], list[TurnRow]]:
    name = p.place * 1000 + p.sample
    prompt = tokens_of(seed, 900000 + p.prompt, 2 + p.prompt % 4)
    first = CompletionRow(
        prompt_id=f"p{p.place}", place=p.place, sample=p.sample, prompt_ids=prompt, token_ids=[], logprobs=[],
        stop=p.stop, policy=policy,
    )  # fmt: skip
    rows, turns = [first], []
    for number, (length, reward, state) in enumerate(p.turns):
        if number:
            # Another context where the trajectory is in rows apart, so that they cannot be put together again.
            seen = tokens_of(seed, name * 100 + number + 50, OBSERVED + number)
            if p.apart:
                context = [*prompt[:1], *seen]
                rows.append(dataclasses.replace(first, part=number, prompt_ids=context, token_ids=[], logprobs=[]))
            else:
                rows[-1].token_ids.extend(seen)
                rows[-1].logprobs.extend([np.nan] * len(seen))
        ids = tokens_of(seed, name * 100 + number, length)
        mu = (-4.1 + np.random.default_rng((seed, name, number, 1)).normal(0, 0.4, length)).tolist()
        turns.append(
            TurnRow(
                place=p.place, sample=p.sample, turn=number, part=rows[-1].part, start=len(rows[-1].token_ids),
                token_ids=ids, logprobs=mu, text="x" * length, stop="eos", state=state, reward=reward,
            )
        )  # fmt: skip
        rows[-1].token_ids.extend(ids)
        rows[-1].logprobs.extend(mu)
    return rows, turns
