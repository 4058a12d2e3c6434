"""The part `rl.partial` of a recipe: completions that go on in later rounds, and what they cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from stages.contract.definition import StageConfig

if TYPE_CHECKING:
    from flows.recipe.model import RL

KEPT = ("max_tokens", "temperature")
"""Settings of sampling that a completion has from its first token to its last."""


class Partial(StageConfig):
    """How much of a completion a round samples, and how old its first tokens may become."""

    round_tokens: Annotated[int, Field(ge=1)]
    """Most new tokens of a completion in one round; what has not ended then goes on in the next round."""
    max_lag: Annotated[int, Field(ge=1)] | None = None
    """Updates by which the oldest token of a completion may be behind the policy that is trained on it, staleness
    included: one that would pass it runs to its end. null: as many as `round_tokens` makes of rl.rollout.max_tokens."""


def largest_lag(rl: RL) -> int:
    """The bound of `rl.partial`: its own, or the lag of a completion that goes on in every round until max_tokens."""
    assert rl.partial is not None
    if rl.partial.max_lag is not None:
        return rl.partial.max_lag
    return rl.staleness - (-rl.rollout.max_tokens // rl.partial.round_tokens) - 1


def carried_rounds(rl: RL) -> int:
    """In how many rounds behind the one that begins a completion this may go on."""
    return largest_lag(rl) - rl.staleness


def check_partial(rl: RL) -> None:
    """Raises ValueError where completions cannot be carried, or never are."""
    partial = rl.partial
    if partial is None:
        return
    if partial.round_tokens >= rl.rollout.max_tokens:
        raise ValueError(
            f"partial.round_tokens {partial.round_tokens} is not below rollout.max_tokens {rl.rollout.max_tokens}: "
            "every completion ends in its round; lower the former, or leave partial out"
        )
    if partial.max_lag is not None and partial.max_lag <= rl.staleness:
        raise ValueError(
            f"partial.max_lag {partial.max_lag} is not above staleness {rl.staleness}, which counts too: nothing could "
            f"be carried; use {rl.staleness + 1} or more, or lower the latter"
        )
    if not rl.rollout.engine.in_worker:
        kind = rl.rollout.engine.kind
        raise ValueError(
            f"partial needs the engine in the worker: {kind} servers cannot go on with the random numbers of a "
            f"completion; leave out rollout.engine{'.url' if kind == 'native' else ''}, or partial"
        )
    if rl.refills:
        raise ValueError(
            "refills replace groups of their round that score alike, and with partial groups are scored rounds after "
            "they begin: leave refills or partial out"
        )
    if rl.update.needs_greedy:
        raise ValueError(
            f"update.algorithm {rl.update.algorithm} compares with greedy completions, which a round samples to their "
            "end: with partial use another algorithm, such as grpo or rloo"
        )


def check_episodes(rl: RL | None) -> None:
    """Raises ValueError for carried completions of a recipe whose completions are episodes."""
    if rl is not None and rl.partial is not None:
        raise ValueError(
            "rl.partial carries completions of one turn, and with the section environment they are episodes, whose "
            "environments end with the round: leave one of the two out"
        )


def check_going_on(rl: RL, before: RL) -> None:
    """Raises ValueError where rounds behind a fork would go on with completions by other settings than they began.

    before: the settings of the last round that is shared.
    """
    if before.partial is None:
        return
    for name in KEPT:
        now, then = getattr(rl.rollout, name), getattr(before.rollout, name)
        if now != then:
            raise ValueError(
                f"rl.rollout.{name} is {now}, and {then} in the shared rounds, which have left completions under way "
                f"(rl.partial): keep {then}, or fork at round=0"
            )
    if rl.refills or rl.update.needs_greedy or not rl.rollout.engine.in_worker:
        raise ValueError(
            "rl.partial: the shared rounds have left completions under way, which no round with rl.refills, greedy "
            "baselines or an engine of servers goes on with: leave these out, or fork at round=0"
        )
