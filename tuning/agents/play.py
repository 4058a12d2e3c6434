"""Plays episodes: turns of many trajectories over one engine, each with its own environment.

    waiting --open--> reset --first context--> sampling --text--> step --suffix--> sampling ... --> ended
                        |                         |                 |
                        +---- fault: restarted, after the last try `failed` ----+

Ids are append-only: the next turn's prompt is all ids so far and the rendered observation; nothing is rendered or
tokenised twice (`suffix`). The random numbers of a turn depend on the episode's place and sample alone: the order of
arrival, slow and dead environments change no other trajectory (R15). The last bits of a log-probability may depend on
the composition of batches, which lockstep fixes.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import hashlib
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from rlhf.tuning.agents.contract import Fault, Observed, Status, calls_of
from rlhf.tuning.agents.trajectory import Ended, Episode, Rules, Turn
from rlhf.tuning.chat import Message
from rlhf.tuning.rollout.requests import Completion, Request, Sampling, Update

if TYPE_CHECKING:
    from rlhf.tuning.agents.processes import Environments
    from rlhf.tuning.chat.renderer import Renderer

Key = tuple[int, int, int]
"""Place, sample and try of an episode: a late answer to an earlier try is dropped."""


PATIENCE = 1.0
"""Longest wait for an answer of environments, in seconds."""


class TurnEngine(Protocol):
    """An engine with requests that come and go one by one."""

    @property
    def idle(self) -> bool: ...
    def submit(self, request: Request) -> int: ...
    def step(self) -> list[Update]: ...
    def cancel(self, number: int) -> None: ...
    def release(self, number: int) -> None: ...


@dataclasses.dataclass(eq=False)
class _Live:
    """A running episode."""

    episode: Episode
    tries: int
    context: list[int] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    """The context and all ids after it."""
    turns: list[Turn] = dataclasses.field(default_factory=list)
    conversation: list[Message] = dataclasses.field(default_factory=list)
    routing: bytes = b""
    """`Completion.routing` of the ids, each as it was first computed."""
    state: Any = None
    request: int | None = None
    """Number of the request that samples a turn; None while the environment is asked."""
    kept: int | None = None
    """Number of the last request, whose slot is kept."""
    cut: Status | None = None
    """The limit that ends it, set while its environment is asked for the last reward."""
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
    ):
        self._engine, self._environments, self._words, self._rules = engine, environments, words, rules
        self._stop_ids, self._sampling, self._seed = stop_ids, sampling, seed
        self._live: dict[Key, _Live] = {}
        self._by_request: dict[int, _Live] = {}
        self._ended: list[Ended] = []

    def play(self, episodes: Iterable[Episode]) -> Generator[Ended, None, None]:
        """Yield the episodes in the order of their ends; `rules.live` of them run at a time."""
        waiting = collections.deque(episodes)
        try:
            while waiting or self._live:
                while waiting and len(self._live) < self._rules.live:
                    self._open(waiting.popleft(), 1)
                for live, completion in self._completed():
                    self._sampled(live, completion)
                for key, answer in self._answers():
                    # An earlier answer in the list may have ended the episode.
                    if key in self._live:
                        self._answered(self._live[key], answer)
                ended, self._ended = self._ended, []
                yield from ended
        finally:
            for live in list(self._live.values()):
                self._leave(live)

    def _completed(self) -> list[tuple[_Live, Completion]]:
        """Return the turns sampled since the last call; in lockstep, those of all running episodes."""
        completed: list[tuple[_Live, Completion]] = []
        while not self._engine.idle:
            for update in self._engine.step():
                if update.completion is not None and update.number in self._by_request:
                    completed.append((self._by_request.pop(update.number), update.completion))
            if not self._rules.lockstep:
                return completed
        return sorted(completed, key=lambda each: each[0].key)

    def _answers(self) -> list[tuple[Key, Observed | Fault]]:
        """Return the answers of environments since the last call; in lockstep, those of all that were asked."""
        if not self._rules.lockstep:
            return self._environments.poll(PATIENCE if self._engine.idle else 0.0)
        answers: dict[Key, Observed | Fault] = {}
        asked = {key for key, live in self._live.items() if live.request is None}
        while asked - answers.keys():
            answers |= dict(self._environments.poll(PATIENCE))
        return sorted(answers.items(), key=lambda each: each[0])

    def _open(self, episode: Episode, tries: int) -> None:
        live = _Live(episode, tries)
        self._live[live.key] = live
        self._environments.open(live.key, episode.task)

    def _answered(self, live: _Live, answer: Observed | Fault) -> None:
        live.seconds += answer.seconds
        if isinstance(answer, Fault):
            self._failed(live, f"{answer.kind} of the environment: {answer.message}")
        elif not live.context:
            self._begin(live, answer)
        elif live.cut is not None:
            if answer.reward and self._rules.rewarded:
                live.turns[-1].reward = (live.turns[-1].reward or 0.0) + answer.reward
            self._end(live, live.cut)
        else:
            self._stepped(live, answer)

    def _begin(self, live: _Live, first: Observed) -> None:
        """Set the first context from the task's messages and the first observation."""
        try:
            live.conversation = self._opening(live, first)
            live.context = self._words.first(live.conversation)
        except (ValueError, TypeError) as error:
            self._failed(live, f"the observation of the reset cannot be shown: {error}")
            return
        live.ids, live.state = list(live.context), first.info.get("state")
        if len(live.ids) + 1 > self._rules.tokens:
            room = f"{len(live.ids)} tokens, and environment.max_tokens and the model allow {self._rules.tokens}"
            self._end(live, "failed", f"the first context has {room}: raise max_tokens, or shorten prompts and tools")
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
        """Submit the request for the next turn."""
        live.request = self._engine.submit(
            Request(
                list(live.ids),
                min(self._rules.turn_tokens, self._rules.tokens - len(live.ids)),
                self._sampling,
                self._stop_ids,
                turn_seed(self._seed, live.episode.place, live.episode.sample, len(live.turns)),
                name=live.episode.name,
                after=live.kept,
                keep=True,
                routing=True,
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
        live.turns.append(turn)
        live.ids += turn.token_ids
        live.routing += (completion.routing or b"")[len(live.routing) :]
        live.conversation.append({"role": "assistant", "content": turn.text})
        self._environments.step(live.key, turn.text)

    def _stepped(self, live: _Live, answer: Observed) -> None:
        """Record the environment's answer to the last turn; end the episode or sample the next turn."""
        turn, info, rules = live.turns[-1], answer.info, self._rules
        ends = answer.terminated or answer.truncated
        is_last = len(live.turns) >= rules.turns
        try:
            seen = [] if answer.observation is None else self._words.messages(answer.observation)
            seen = self._words.cut(seen, rules.observation_tokens)
            suffix = [] if ends or is_last else self._words.suffix(seen, turn.stop == "eos")
        except (ValueError, TypeError) as error:
            self._failed(live, f"the observation of turn {len(live.turns)} cannot be shown: {error}")
            return
        turn.reward, turn.observation = answer.reward if rules.rewarded else None, seen
        turn.terminated, turn.truncated = answer.terminated, answer.truncated
        turn.action, turn.valid = info.get("action"), bool(info.get("valid", True))
        turn.calls, turn.success = calls_of(info.get("calls")), info.get("success")
        live.state = info.get("state")
        live.conversation += seen
        if ends:
            self._end(live, "done" if answer.terminated else "truncated")
        elif is_last or len(live.ids) + len(suffix) + 1 > rules.tokens:
            # The environment may have a last reward.
            live.cut = "turn_limit" if is_last else "token_limit"
            self._environments.finish(live.key)
        else:
            turn.observation_ids = suffix
            live.ids += suffix
            self._sample(live)

    def _failed(self, live: _Live, reason: str) -> None:
        """Restart an episode whose environment failed, with the same seeds; end it after its last try."""
        if live.tries >= self._rules.tries:
            self._end(live, "failed", reason)
        else:
            self._leave(live)
            self._open(live.episode, live.tries + 1)

    def _end(self, live: _Live, status: Status, reason: str | None = None) -> None:
        self._leave(live)
        routing, played = base64.b64encode(live.routing).decode(), (live.conversation, live.seconds)
        self._ended.append(
            Ended(live.episode, live.context, live.turns, status, reason, live.tries, *played, routing=routing)
        )

    def _leave(self, live: _Live) -> None:
        """Free the request, the slot and the process of the episode."""
        if live.request is not None:
            self._by_request.pop(live.request, None)
            self._engine.cancel(live.request)
        if live.kept is not None:
            self._engine.release(live.kept)
        self._environments.discard(live.key)
        self._live.pop(live.key, None)


def turn_seed(seed: int, place: int, sample: int, turn: int) -> int:
    """Return the 32-bit seed of a turn's random numbers, which depends on the arguments alone."""
    name = hashlib.sha256(f"{seed}\n{place}\n{sample}\n{turn}".encode())
    return int.from_bytes(name.digest()[:4], "big")
