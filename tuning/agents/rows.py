"""Tables of trajectories. The rollout table is their view for rewards and trainer.

    trajectories/   a row an episode            named (place, sample), as completions are (R21)
    turns/          a row a turn of an episode
    rollouts/       a row an episode (`CompletionRow`): prompt_ids are the first context, token_ids all after it up to
                    the last sampled token, logprobs NaN on every token that was not sampled

        prompt_ids          token_ids
        | first context  |  sampled 0 | observation 0 | sampled 1 | observation 1 | sampled 2 |
        logprobs              finite      NaN             finite      NaN             finite

Times are no content: they are in the stage's log.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import pyarrow as pa

from rlhf.tuning.rows import Ids, Index, Number, Real, Reals, Row, Text

Flag = Annotated[bool, pa.bool_()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnRow(Row):
    """A turn: the text of the policy, and the answer of the environment."""

    place: Number
    sample: Index
    turn: Index
    """From 0."""
    part: Index = 0
    """Row of the trajectory (`CompletionRow.part`) that holds the turn."""
    start: Number
    """Tokens of the trajectory before the turn's own: `token_ids[start:start + len]` of its row are the sampled ids."""
    token_ids: Ids
    """Sampled ids, with the end of the turn if it was sampled."""
    logprobs: Reals
    text: Text
    """The sampled text without control tokens."""
    stop: Text
    """`eos`, or `length` if the limit of a turn cut it off."""
    state: Text | None = None
    """sha256 of the state in which the policy chose, if the environment reports it (GiGPO's anchor)."""
    action: Text | None = None
    """The action that the environment understood, as JSON or text."""
    valid: Flag = True
    """False: the policy's own fault, such as a malformed call."""
    calls: Text | None = None
    """JSON list of tool calls: name, arguments, result, whether it failed."""
    observation: Text | None = None
    """The answer, as text or JSON of messages; None after the last turn if there is none."""
    observation_ids: Ids = dataclasses.field(default_factory=list)
    """Ids that stand between this turn's and the next one's; empty after the last turn."""
    reward: Real | None = None
    """The environment's for this turn; None if it failed."""
    terminated: Flag = False
    truncated: Flag = False
    policy: Text = ""
    """Digest of the policy that sampled the turn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrajectoryRow(Row):
    """An episode."""

    place: Number
    sample: Index
    prompt_id: Text
    seed: Number
    """Seed of the task, the argument of `reset`."""
    status: Text
    """`rlhf.tuning.agents.contract.Status`."""
    reason: Text | None = None
    """In words, if it failed."""
    turns: Index
    reward: Real | None = None
    """Sum of the turns' rewards; None if the status is not a result of the policy."""
    success: Flag | None = None
    """`info["success"]` of the last step if the environment reports it, else whether the environment ended the episode
    (status done) with a positive reward of the last turn."""
    success_guessed: Flag = False
    """Whether `success` is that guess, because `info` does not hold it."""
    sampled_tokens: Number
    observed_tokens: Number
    tries: Index = 1
    """2: the first try ended by a fault of the environment."""
    conversation: Text = "[]"
    """JSON of the messages as the environment and the policy wrote them, for people and rewards."""
