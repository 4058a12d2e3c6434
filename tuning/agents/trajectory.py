"""Episodes, their turns, and the rows of their tables. Imports no JAX."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from rlhf.tuning.agents.contract import LIMITS, Status, Task
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.chat import Message
from rlhf.tuning.rows import CompletionRow, PromptRow


@dataclasses.dataclass(frozen=True)
class Rules:
    """Limits of an episode."""

    turns: int
    """Turns of the policy."""
    turn_tokens: int
    """Sampled tokens of a turn; the environment gets a turn that is cut off."""
    tokens: int
    """All tokens of a trajectory, its first context included."""
    observation_tokens: int
    """Tokens of an observation's text; a longer one is cut with a visible mark."""
    live: int
    """Episodes that run at a time: at most the slots of the engine."""
    tries: int = 2
    """Starts of an episode whose environment fails."""
    lockstep: bool = False
    """Whether all running episodes take their turns together."""
    rewarded: bool = True
    """Whether the environment rewards; turns with tools alone have no reward."""


@dataclasses.dataclass
class Turn:
    """A turn of the policy and the environment's answer."""

    start: int
    """Tokens between the first context of its part and the turn."""
    token_ids: list[int]
    logprobs: list[float]
    text: str
    stop: str
    state: Any = None
    """The environment's `info["state"]` when the policy chose."""
    action: Any = None
    valid: bool = True
    calls: Any = None
    observation: list[Message] | None = None
    observation_ids: list[int] = dataclasses.field(default_factory=list)
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    part: int = 0
    """Row of the trajectory that it is in."""


@dataclasses.dataclass(frozen=True)
class Episode:
    """An episode to play."""

    place: int
    sample: int
    name: str
    """Id of the task's prompt, for errors."""
    task: Task
    messages: Sequence[Message] = ()
    """Before the first observation: the system's message, and of a task with a prompt the user's."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """An episode that was played."""

    episode: Episode
    context: list[int]
    turns: list[Turn]
    status: Status
    reason: str | None
    tries: int
    conversation: list[Message]
    seconds: float
    """In the environment, of the last try."""
    forks: list[list[int]] = dataclasses.field(default_factory=list)
    """First contexts of the further parts, of an agent with calls that do not all extend one another."""
    routing: str = ""
    """Of a mixture: `CompletionRow.routing` in base64, for the journal."""

    @property
    def reward(self) -> float | None:
        """Sum of the turns' rewards; None without any, or if the status is no result of the policy."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        if self.status == "failed" or not rewards:
            return None
        return math.fsum(rewards)

    @property
    def success(self) -> bool | None:
        """The environment's `info["success"]`, else a guess: whether the environment ended the episode with a positive
        reward of the last turn. The sum would count rewards of steps and form."""
        if self.status == "failed":
            return None
        if self.success_guessed:
            return self.status == "done" and (self.turns[-1].reward or 0.0) > 0
        return next((turn.success for turn in reversed(self.turns) if turn.success is not None), None)

    @property
    def success_guessed(self) -> bool:
        """Whether `success` is a guess: the environment has rewarded without `info["success"]`."""
        return self.reward is not None and all(turn.success is None for turn in self.turns)


def completion_rows(ended: Ended, prompt: PromptRow, policy: str, seed: int, temperature: float) -> list[CompletionRow]:
    """Return the trajectory as the trainer sees it, a row for each part: all ids after the part's context.

    Log-probabilities are NaN where nothing was sampled. A row ends with its last sampled token: nothing is trained
    after it.
    """
    # A last turn without its end token is a cut, even if the environment took it for an answer.
    unfinished = bool(ended.turns) and ended.turns[-1].stop == "length"
    stop = "length" if ended.status in LIMITS or unfinished else "eos"
    rows: list[CompletionRow] = []
    for part, context in enumerate([ended.context, *ended.forks]):
        turns = [turn for turn in ended.turns if turn.part == part]
        ids: list[int] = []
        logprobs: list[float] = []
        for number, turn in enumerate(turns, start=1):
            observed = turn.observation_ids if number < len(turns) else []
            ids += [*turn.token_ids, *observed]
            logprobs += [*turn.logprobs, *[math.nan] * len(observed)]
        rows.append(
            CompletionRow(
                place=ended.episode.place,
                sample=ended.episode.sample,
                part=part,
                prompt_id=prompt.id,
                prompt=prompt.prompt,
                answer=prompt.answer,
                metadata=prompt.metadata,
                # A failed reset leaves no context: the row names the episode, and has no reward.
                prompt_ids=context or prompt.prompt_ids,
                token_ids=ids,
                logprobs=logprobs,
                text=turns[-1].text if turns else "",
                stop="failed" if ended.status == "failed" else stop,
                policy=policy,
                seed=seed,
                temperature=temperature,
                routing=base64.b64decode(ended.routing) or None,
            )
        )
    return rows


def _last_turns(ended: Ended) -> dict[int, int]:
    """Return the number of the last turn of each part."""
    return {turn.part: number for number, turn in enumerate(ended.turns)}


def turn_rows(ended: Ended, policy: str) -> list[TurnRow]:
    """Return the rows of the turns."""
    last = _last_turns(ended)
    same = ("part", "start", "token_ids", "logprobs", "text", "stop", "valid", "reward", "terminated", "truncated")
    return [
        TurnRow(
            place=ended.episode.place,
            sample=ended.episode.sample,
            turn=number,
            **{name: getattr(turn, name) for name in same},
            state=None if turn.state is None else hashlib.sha256(_json(turn.state).encode()).hexdigest(),
            action=None if turn.action is None else _json(turn.action),
            calls=None if turn.calls is None else _json(turn.calls),
            observation=None if not turn.observation else _json(turn.observation),
            observation_ids=turn.observation_ids if number != last[turn.part] else [],
            policy=policy,
        )
        for number, turn in enumerate(ended.turns)
    ]


def trajectory_row(ended: Ended) -> TrajectoryRow:
    """Return the row of the episode."""
    last = _last_turns(ended)
    observed = [turn.observation_ids for i, turn in enumerate(ended.turns) if i != last[turn.part]]
    return TrajectoryRow(
        place=ended.episode.place,
        sample=ended.episode.sample,
        prompt_id=ended.episode.name,
        seed=ended.episode.task.seed,
        status=ended.status,
        reason=ended.reason,
        turns=len(ended.turns),
        reward=ended.reward,
        success=ended.success,
        success_guessed=ended.success_guessed,
        sampled_tokens=sum(len(turn.token_ids) for turn in ended.turns),
        observed_tokens=sum(map(len, [ended.context, *ended.forks, *observed])),
        tries=ended.tries,
        conversation=_json(ended.conversation),
    )


def to_line(ended: Ended) -> str:
    """Write an episode as a line of a journal: [place, sample, values of `from_values`]."""
    kept = {f.name: getattr(ended, f.name) for f in dataclasses.fields(ended) if f.name != "episode"}
    kept["turns"] = [vars(turn) for turn in ended.turns]
    return json.dumps([ended.episode.place, ended.episode.sample, kept])


def from_values(values: dict[str, Any], episode: Episode) -> Ended:
    """Read the values of a line of a journal."""
    return Ended(episode, **(values | {"turns": [Turn(**turn) for turn in values["turns"]]}))


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
