"""Plays episodes: turns of many trajectories over one engine, each with an environment of its own.

    waiting --open--> reset --first context--> sampling --text--> step --suffix--> sampling ... --> ended
                        |                         |                 |
                        +---- fault: begun again once, then `failed` ----+

Ids are append-only: the next turn's prompt is all ids so far with the rendered observation behind them; nothing is
rendered or tokenised twice (`suffix`). The random numbers of a turn depend on the episode's names alone, never on what
else is played: order of arrival, slow and dead environments change no other trajectory (R15). The last bits of a
log-probability may depend on who is computed beside whom; in lockstep that is the same each time.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlhf.tuning.agents.contract import Fault, Observed, Status, Task, calls_of
from rlhf.tuning.agents.trajectory import Ended, Episode, Rules, Turn
from rlhf.tuning.chat import Message
from rlhf.tuning.rollout.requests import Completion, Request, Sampling, Update

if TYPE_CHECKING:
    from rlhf.tuning.chat.renderer import Renderer

Key = tuple[int, int, int]
"""Place, sample and try of an episode: what an environment of an earlier try says late reaches nobody."""


class TurnEngine(Protocol):
    """What plays needs of an engine: requests that come and go one by one."""

    @property
    def idle(self) -> bool: ...
    def submit(self, request: Request) -> int: ...
    def step(self) -> list[Update]: ...
    def cancel(self, number: int) -> None: ...
    def release(self, number: int) -> None: ...


class Environments(Protocol):
    """Environments by key (`rlhf.tuning.agents.processes`)."""

    def open(self, key: Hashable, task: Task) -> None: ...
    def step(self, key: Hashable, text: str) -> None: ...
    def finish(self, key: Hashable) -> None: ...
    def poll(self, seconds: float) -> list[tuple[Any, Observed | Fault]]: ...
    def discard(self, key: Hashable) -> None: ...


@dataclasses.dataclass(eq=False)
class _Live:
    """An episode under way."""

    episode: Episode
    tries: int
    began: float
    context: list[int] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    """The context and all behind it."""
    turns: list[Turn] = dataclasses.field(default_factory=list)
    conversation: list[Message] = dataclasses.field(default_factory=list)
    state: Any = None
    request: int | None = None
    """Number of the request that samples a turn now."""
    kept: int | None = None
    """Number of the last request, whose slot is kept."""
    replayed: int = 0
    cut: Status | None = None
    """The limit that ends it, while its environment is asked for the last reward."""
    seconds: float = 0.0
    """In the environment."""

    @property
    def key(self) -> Key:
        return (self.episode.place, self.episode.sample, self.tries)


class Player:
    """Plays episodes with one policy."""

    def __init__(
        self,
        engine: TurnEngine,
        environments: Environments,
        words: Renderer,
        rules: Rules,
        stop_ids: tuple[int, ...],
        sampling: Sampling,
        seed: int,
        *,
        said: Callable[[Episode, int, Turn, Sequence[int]], None] = lambda episode, number, turn, context: None,
    ):
        """said: called with each turn, its number, and the first context, when the turn is sampled and again when it is
        answered, for records that a replay begins from."""
        self._engine, self._environments, self._words, self._rules = engine, environments, words, rules
        self._stop_ids, self._sampling, self._seed, self._said = stop_ids, sampling, seed, said
        self._live: dict[Key, _Live] = {}
        self._by_request: dict[int, _Live] = {}
        self._ended: list[Ended] = []

    def play(self, episodes: Iterable[Episode]) -> Iterator[Ended]:
        """The episodes as they end, in the order of their ends; `rules.live` of them are under way at a time."""
        waiting = collections.deque((episode, 1) for episode in episodes)
        try:
            while waiting or self._live:
                while waiting and len(self._live) < self._rules.live:
                    self._open(*waiting.popleft())
                for live, completion in self._said_now():
                    self._sampled(live, completion)
                for key, answer in self._answers():
                    # Not one that has left, which an answer before it in the list may have done.
                    if key in self._live:
                        self._answered(self._live[key], answer)
                self._expire()
                ended, self._ended = self._ended, []
                yield from ended
        finally:
            for live in list(self._live.values()):
                self._leave(live)

    def _said_now(self) -> list[tuple[_Live, Completion]]:
        """Turns that have been sampled since the last look; in lockstep all that are under way."""
        said: list[tuple[_Live, Completion]] = []
        while not self._engine.idle:
            for update in self._engine.step():
                if update.completion is not None and update.number in self._by_request:
                    said.append((self._by_request.pop(update.number), update.completion))
            if not self._rules.lockstep:
                return said
        return sorted(said, key=lambda one: one[0].key)

    def _answers(self) -> list[tuple[Key, Observed | Fault]]:
        """What environments have answered since the last look; in lockstep all that were asked."""
        if not self._rules.lockstep:
            return self._environments.poll(0.0 if not self._engine.idle else self._patience())
        answers: dict[Key, Observed | Fault] = {}
        asked = {key for key, live in self._live.items() if live.request is None}
        while asked - answers.keys() and not self._out_of_time():
            answers |= dict(self._environments.poll(self._patience()))
        return sorted(answers.items(), key=lambda one: one[0])

    def _out_of_time(self) -> list[_Live]:
        """Episodes whose wall clock is out."""
        limit, now = self._rules.episode_seconds, time.monotonic()
        return [] if limit is None else [live for live in self._live.values() if now - live.began > limit]

    def _open(self, episode: Episode, tries: int) -> None:
        live = _Live(episode, tries, time.monotonic())
        self._live[live.key] = live
        self._environments.open(live.key, episode.task)

    def _patience(self) -> float:
        """Seconds that the loop may wait for environments: until the first episode is out of time."""
        if self._rules.episode_seconds is None or not self._live:
            return 1.0
        first = min(live.began for live in self._live.values())
        return min(1.0, max(0.0, first + self._rules.episode_seconds - time.monotonic()))

    def _answered(self, live: _Live, answer: Observed | Fault) -> None:
        live.seconds += answer.seconds
        if isinstance(answer, Fault):
            self._again(live, "failed", f"{answer.kind} of the environment: {answer.message}")
        elif not live.context:
            self._begin(live, answer)
        elif live.cut is not None:
            if answer.reward and self._rules.rewarded:
                live.turns[-1].reward = (live.turns[-1].reward or 0.0) + answer.reward
            self._end(live, live.cut)
        else:
            self._stepped(live, answer)

    def _begin(self, live: _Live, first: Observed) -> None:
        """The first context, from the task's messages and the first observation."""
        try:
            live.conversation = self._opening(live, first)
            live.context = self._words.first(live.conversation)
        except (ValueError, TypeError) as error:
            self._again(live, "failed", f"the observation of the reset cannot be shown: {error}")
            return
        if live.episode.recorded and list(live.episode.began) != live.context:
            self._again(live, "diverged", "the reset of the replay met another observation")
            return
        live.ids, live.state = list(live.context), first.info.get("state")
        if len(live.ids) + 1 > self._rules.tokens:
            self._end(live, "failed", f"the first context has {len(live.ids)} of {self._rules.tokens} tokens")
        else:
            self._sample(live)

    def _opening(self, live: _Live, first: Observed) -> list[Message]:
        messages = list(live.episode.messages)
        seen = [] if first.observation is None else self._words.messages(first.observation)
        if first.info.get("joins_prompt") and messages and isinstance(first.observation, str):
            last = messages.pop()
            seen = [dict(last) | {"content": f"{last['content']}{first.observation}"}]
        elif seen:
            # A game's first observation is the task; the prompt of its row is a name for people.
            messages = [m for m in messages if m["role"] == "system"]
        return [*messages, *seen]

    def _sample(self, live: _Live) -> None:
        """Asks for the next turn, or takes it from the record of an earlier try."""
        number = len(live.turns)
        if live.replayed == number < len(live.episode.recorded):
            live.replayed += 1
            turn = live.episode.recorded[number]
            self._turn(live, dataclasses.replace(turn, state=live.state, observation=None, observation_ids=[]))
            return
        live.request = self._engine.submit(
            Request(
                list(live.ids),
                min(self._rules.turn_tokens, self._rules.tokens - len(live.ids)),
                self._sampling,
                self._stop_ids,
                turn_seed(self._seed, live.episode.place, live.episode.sample, number),
                name=live.episode.name,
                after=live.kept,
                keep=True,
            )
        )
        self._by_request[live.request], live.kept = live, live.request

    def _sampled(self, live: _Live, completion: Completion) -> None:
        live.request = None
        turn = Turn(
            start=len(live.ids) - len(live.context),
            token_ids=completion.tokens,
            logprobs=completion.logps,
            text=self._words.text(completion.tokens),
            stop=completion.stop,
            state=live.state,
        )
        self._said(live.episode, len(live.turns), turn, live.context)
        self._turn(live, turn)

    def _turn(self, live: _Live, turn: Turn) -> None:
        live.turns.append(turn)
        live.ids += turn.token_ids
        live.conversation.append({"role": "assistant", "content": turn.text})
        self._environments.step(live.key, turn.text)

    def _stepped(self, live: _Live, answer: Observed) -> None:
        """What the environment made of the last turn: the end, or the next turn."""
        turn, info = live.turns[-1], answer.info
        number = len(live.turns)
        try:
            seen = [] if answer.observation is None else self._words.messages(answer.observation)
            seen = self._words.cut(seen, self._rules.observation_tokens)
            ends = answer.terminated or answer.truncated or number >= self._rules.turns
            suffix = [] if ends else self._words.suffix(seen, turn.stop == "eos")
        except (ValueError, TypeError) as error:
            self._again(live, "failed", f"the observation of turn {number} cannot be shown: {error}")
            return
        before = live.episode.recorded[number - 1].observation if number <= live.replayed else None
        if before is not None and before != seen:
            self._again(live, "diverged", f"turn {number} of the replay met another observation")
            return
        turn.reward, turn.observation = answer.reward if self._rules.rewarded else None, seen
        turn.terminated, turn.truncated = answer.terminated, answer.truncated
        turn.action, turn.valid = info.get("action"), bool(info.get("valid", True))
        turn.calls, turn.success = calls_of(info.get("calls")), info.get("success")
        live.state = info.get("state")
        live.conversation += seen
        self._said(live.episode, number - 1, turn, live.context)
        if answer.terminated or answer.truncated:
            self._end(live, "done" if answer.terminated else "truncated")
            return
        if len(live.turns) >= self._rules.turns:
            self._cut(live, "turn_limit")
            return
        if len(live.ids) + len(suffix) + 1 > self._rules.tokens:
            self._cut(live, "token_limit")
            return
        turn.observation_ids = suffix
        live.ids += suffix
        self._sample(live)

    def _cut(self, live: _Live, status: Status) -> None:
        """Ends an episode that might have gone on, once its environment has said what it is worth so far."""
        live.cut = status
        self._environments.finish(live.key)

    def _expire(self) -> None:
        """Ends the episodes whose wall clock is out."""
        for live in self._out_of_time():
            self._end(live, "time_limit", f"the episode took longer than {self._rules.episode_seconds:g} s")

    def _again(self, live: _Live, status: Status, reason: str) -> None:
        """Begins an episode again whose environment failed; ends it where it had its tries."""
        if live.tries >= self._rules.tries:
            self._end(live, status, reason)
            return
        self._leave(live)
        # With the same seeds, and so, as far as the environment allows, the same episode; never from the record that
        # may have led to the fault.
        self._open(dataclasses.replace(live.episode, recorded=(), began=()), live.tries + 1)

    def _end(self, live: _Live, status: Status, reason: str | None = None) -> None:
        self._leave(live)
        self._ended.append(
            Ended(live.episode, live.context, live.turns, status, reason, live.tries, live.conversation, live.seconds)
        )

    def _leave(self, live: _Live) -> None:
        """Frees what the episode holds: its request, its slot and its process."""
        if live.request is not None:
            self._by_request.pop(live.request, None)
            self._engine.cancel(live.request)
        if live.kept is not None:
            self._engine.release(live.kept)
        self._environments.discard(live.key)
        self._live.pop(live.key, None)


def turn_seed(seed: int, place: int, sample: int, turn: int) -> int:
    """The seed of a turn's random numbers, of 32 bits: it depends on its arguments alone."""
    name = hashlib.sha256(f"{seed}\n{place}\n{sample}\n{turn}".encode())
    return int.from_bytes(name.digest()[:4], "big")
