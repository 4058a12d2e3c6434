"""Episodes to play, the turns that they get, and their rows.

Imports no JAX: the stage reads and writes these on the host.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from rlhf.tuning.agents.contract import LIMITS, WITHOUT_REWARD, Status, Task
from rlhf.tuning.agents.rows import TrajectoryRow, TurnRow
from rlhf.tuning.chat import Message
from rlhf.tuning.rows import CompletionRow, PromptRow


@dataclasses.dataclass(frozen=True)
class Rules:
    """What bounds an episode."""

    turns: int
    """Turns of the policy."""
    turn_tokens: int
    """Sampled tokens of a turn; a turn that is cut off there is what the environment gets."""
    tokens: int
    """All tokens of a trajectory, its first context included."""
    observation_tokens: int
    """Tokens of an observation's text; a longer one is cut with a visible mark."""
    live: int
    """Episodes under way at a time: no more than the engine has slots."""
    tries: int = 2
    """How often an episode is begun whose environment fails."""
    episode_seconds: float | None = None
    """Wall clock of one try."""
    lockstep: bool = False
    """Whether all episodes under way take their turns together."""
    rewarded: bool = True
    """Whether the environment rewards; tools alone do not, and their turns have no reward in place of 0."""


@dataclasses.dataclass
class Turn:
    """What the policy said, and what came back."""

    start: int
    """Tokens behind the first context of its part before it."""
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
    """First contexts of the parts behind the first one, of an agent whose calls do not all extend one another."""

    @property
    def reward(self) -> float | None:
        """Sum of the turns' rewards; None where there is none, or the status says nothing of the policy."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        if self.status in WITHOUT_REWARD or not rewards:
            return None
        return math.fsum(rewards)

    @property
    def success(self) -> bool | None:
        """What the environment says in `info["success"]`, else a guess: whether it ended the episode itself, with a
        positive reward of the last turn. The sum would count what is paid for steps and form."""
        if self.status in WITHOUT_REWARD:
            return None
        if self.success_guessed:
            return self.status == "done" and (self.turns[-1].reward or 0.0) > 0
        return next((turn.success for turn in reversed(self.turns) if turn.success is not None), None)

    @property
    def success_guessed(self) -> bool:
        """Whether `success` is a guess: the environment has rewarded, and said nothing of success."""
        return self.reward is not None and all(turn.success is None for turn in self.turns)


def completion_rows(ended: Ended, prompt: PromptRow, policy: str, seed: int, temperature: float) -> list[CompletionRow]:
    """The trajectory as the trainer sees it, a row a part: all ids behind the part's context, holes where nothing was
    sampled.

    A row ends with its last sampled token: nothing is trained behind it.
    """
    # A last turn without its end token is a cut, whatever its reader made of it.
    unfinished = bool(ended.turns) and ended.turns[-1].stop == "length"
    cut = "length" if ended.status in LIMITS or unfinished else "eos"
    rows: list[CompletionRow] = []
    for part, context in enumerate([ended.context, *ended.forks]):
        turns = _of_part(ended, part)
        ids: list[int] = []
        logprobs: list[float] = []
        for number, turn in enumerate(turns):
            ids += turn.token_ids
            logprobs += turn.logprobs
            if number + 1 < len(turns):
                ids += turn.observation_ids
                logprobs += [math.nan] * len(turn.observation_ids)
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
                stop="failed" if ended.status in WITHOUT_REWARD else cut,
                policy=policy,
                seed=seed,
                temperature=temperature,
            )
        )
    return rows


def _of_part(ended: Ended, part: int) -> list[Turn]:
    return [turn for turn in ended.turns if turn.part == part]


def turn_rows(ended: Ended, policy: str) -> list[TurnRow]:
    """The rows of its turns."""
    last = {turn.part: number for number, turn in enumerate(ended.turns)}
    return [
        TurnRow(
            place=ended.episode.place,
            sample=ended.episode.sample,
            turn=number,
            part=turn.part,
            start=turn.start,
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            text=turn.text,
            stop=turn.stop,
            state=None if turn.state is None else hashlib.sha256(_json(turn.state).encode()).hexdigest(),
            action=None if turn.action is None else _json(turn.action),
            valid=turn.valid,
            calls=None if turn.calls is None else _json(turn.calls),
            observation=None if not turn.observation else _json(turn.observation),
            observation_ids=turn.observation_ids if number != last[turn.part] else [],
            reward=turn.reward,
            terminated=turn.terminated,
            truncated=turn.truncated,
            policy=policy,
        )
        for number, turn in enumerate(ended.turns)
    ]


def trajectory_row(ended: Ended) -> TrajectoryRow:
    """The row of the episode."""
    between = [turn for part in range(1 + len(ended.forks)) for turn in _of_part(ended, part)[:-1]]
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
        observed_tokens=len(ended.context)
        + sum(map(len, ended.forks))
        + sum(len(turn.observation_ids) for turn in between),
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
