"""Parts of an episode: a text environment, its turns, and its ends.

    task, seed --reset--> observation --policy--> text --step--> observation, reward --policy--> text ...

Everything is a text environment with gymnasium's tuple. Tools, TRL's environment classes and games of other packages
are adapted to it (`rlhf.tuning.agents.adapters`), inside the process of the episode (`rlhf.tuning.agents.processes`).
Nothing here loads JAX or a tokenizer: processes of environments import this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from rlhf.tuning.chat import Message

Observation = str | Sequence[Message]
"""A text is one message of the user; messages stand as they are."""

Status = Literal["done", "truncated", "turn_limit", "token_limit", "failed"]
"""How an episode ended:

    done         the environment said `terminated`, or an agent with tools answered without a call
    truncated    the environment said `truncated`, for its own limit
    turn_limit   the policy had all its turns
    token_limit  the next turn would have left the trajectory's tokens, or the positions of the model
    failed       reset or step raised, ran out of time or lost its process in each try: no result of the policy, reward
                 null (R9)
"""
LIMITS: frozenset[str] = frozenset({"truncated", "turn_limit", "token_limit"})
"""Ends that are cuts: the episode might have gone on, so its value may be bootstrapped (Pardo et al., 2018)."""


class TextEnvironment(Protocol):
    """gymnasium's tuple with text; both methods may be coroutines.

    The trajectory keeps these entries of `info`: `state` (of the environment, for GiGPO's anchors: any JSON value or
    text), `action` (as understood from the text), `valid` (False: a fault of the policy, such as an invalid move),
    `calls` (tool calls with their results), `success` (true or false, of the last step).
    """

    def reset(self, *, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Begins an episode, which depends on the seed and the constructor's arguments alone."""

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """(observation, reward, terminated, truncated, info) after the policy's text of one turn."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """The environment of an episode and its limits; JSON by `vars`, for the processes that make it."""

    name: str | None = None
    """Built in (`guess`, ...), `gem:ID`, `gymnasium:ID`, `textarena:ID`, or `module:Class`; None: tools alone."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    tools: Sequence[str] = ()
    """`calculator`, `python`, `module:function`, or `mcp:COMMAND OR URL`."""
    tool_arguments: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Keyword arguments of tools that the policy does not choose (the limits of `python`), by the tool's name."""
    tool_format: str = "hermes"
    """One of `rlhf.tuning.chat.calls.FORMATS` but `auto`, which the stage resolves by the template."""
    tool_seconds: float = 10.0
    """Wall-clock limit of one tool call: the policy reads an error, which is not a failure of the environment."""
    reset_seconds: float = 60.0
    """Wall-clock limit of the first observation: constructor and reset."""
    step_seconds: float = 30.0
    """Wall-clock limit of a step, tool calls included."""
    megabytes: int = 1024
    """Memory limit of an episode's process, in addition to the memory that it shares with its parent."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The start of an episode. Episodes of one task are the group that GRPO compares."""

    seed: int
    """For `reset(seed=...)`: ours, so that an episode alone equals the same one among others (R15)."""
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The columns of the task's prompt, for `reset(**row)` of TRL's environment classes: `prompt`, `answer` and the
    entries of the metadata."""


@dataclasses.dataclass(frozen=True)
class Observed:
    """The answer to a reset or a step. After a reset, reward is None and both flags are False."""

    observation: Observation | None
    """None after a reset that adds nothing to the task's prompt, and after the last turn of a tool episode."""
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """JSON. `reward` parts of TRL's `get_reward` are in `reward` of the last step."""
    seconds: float = 0.0
    """Wall-clock time in the environment."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A failure of the environment, never of the policy."""

    kind: Literal["error", "timeout", "crash"]
    message: str
    """With the request (`reset`, `step 3`) and the last line of the traceback, or the limit."""
    seconds: float = 0.0


def success_of(value: Any) -> bool | None:
    """`info["success"]` as a flag, of which 0 and 1 are other spellings. Raises ValueError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise ValueError(f'info["success"] is {repr(value)[:100]}: expected true or false, or none if it is not known')


def calls_of(value: Any) -> list[Mapping[str, Any]] | None:
    """`info["calls"]` as tool calls, each with a `name`; None for anything else that an environment calls so."""
    if isinstance(value, list | tuple) and all(isinstance(call, Mapping) and "name" in call for call in value):
        return list(value)
    return None
