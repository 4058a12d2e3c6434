"""Recorded sessions: the calls of a client as token ids, in branches that only grow.

    POST /sessions/NAME/v1/chat/completions        messages a        -> context | sampled
                                                   messages a b c    ->                  | context | sampled
                                                   messages a d      -> another branch: a separate part

A call whose messages continue those of an earlier call and its answer gets that call's ids, followed by the new
messages (`rlhf.tuning.chat.renderer`). Answers are compared by their text and calls; the ids are the stored ids, with
thoughts that a client leaves out. A call that continues nothing begins a branch with its own rendering. So does a call
after an answer of which the client lacks a part, such as a stop string. Completions continue a call if its ids begin
the prompt. A branch is a row of a rollout table. Text that was sampled in another branch is context there, so nothing
is trained twice.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rlhf.stages.serving.api import Message
from rlhf.stages.serving.errors import RequestError
from rlhf.stages.serving.tools import same_call, without_thoughts

NAME = re.compile(r"[\w.:-]{1,128}")
CHARACTERS = 16
"""Characters that count as a token of a session's memory."""
CALL_TOKENS = 128
"""Tokens that a call counts in addition: its objects take two kilobytes."""
REMEMBERED = 65536
"""Names of evicted sessions that are remembered."""

Signature = tuple[str, str, tuple[str, ...]]
"""A message for comparison: role, text, calls."""


class UnknownSession(RequestError):
    """No session has this name."""

    status, code = 404, "session_not_found"


class EvictedSession(RequestError):
    """The session was dropped, because the server had more than it may hold."""

    status, code = 410, "session_evicted"


class LimitReached(RequestError):
    """A call beyond a limit of its session."""

    code = "turn_limit"


@dataclasses.dataclass(frozen=True)
class Terms:
    """Settings that replace a client's, so that its calls are rows of a rollout."""

    temperature: float
    turns: int
    """Calls."""
    turn_tokens: int
    """Longest answer in sampled tokens."""
    tokens: int
    """Longest branch in tokens."""
    seed: Callable[[int], int]
    """Number of a call -> seed of its random numbers."""


@dataclasses.dataclass(eq=False)
class Call:
    """One sample of one request."""

    number: int
    """In the order of arrival, from 0."""
    before: Call | None
    """The call that it continues."""
    kind: str
    """Endpoint and tools: a call continues only calls of the same kind."""
    context_ids: list[int]
    """Ids between those of the call before it and its own sampled ids."""
    messages: list[dict[str, Any]]
    """The messages that the client added; the new text of a completion's prompt."""
    signatures: tuple[Signature, ...]
    """The messages for comparison."""
    policy: str | None
    reply: dict[str, Any] | None = None
    """The answer that the client got; None while it is under way."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    """The sampled text without control tokens."""
    stop: str = ""
    valid: bool = True
    """False if a call of a tool in it is malformed."""
    ended: bool = False
    """Whether the sampled ids end with the end of a turn."""
    whole: bool = True
    """Whether its client has all text of its ids; else no call continues it."""

    def path(self) -> list[Call]:
        """Return the calls of its branch, itself included."""
        path = [self]
        while path[-1].before is not None:
            path.append(path[-1].before)
        return path[::-1]

    def prompt_ids(self) -> list[int]:
        """Return all ids before its sampled ids."""
        before = self.path()[:-1]
        return [i for call in before for i in (*call.context_ids, *call.token_ids)] + self.context_ids

    def ids(self) -> list[int]:
        """Return all ids of its branch, its sampled ids included."""
        return self.prompt_ids() + self.token_ids

    @property
    def size(self) -> int:
        """Tokens that it counts; of text that a template leaves out, characters stand for some."""
        texts = [self.kind, self.text, *(str(value) for one in self.messages for value in one.values())]
        ids = len(self.context_ids) + len(self.token_ids)
        return CALL_TOKENS + max(ids, sum(map(len, texts)) // CHARACTERS)


@dataclasses.dataclass
class Part:
    """A branch: consecutive calls after a first context."""

    calls: list[Call]

    @property
    def prompt_ids(self) -> list[int]:
        """The first context."""
        return self.calls[0].prompt_ids()

    def row(self) -> dict[str, Any]:
        """Return the ids after the context, with log-probabilities that are None for ids that were not sampled."""
        ids: list[int] = []
        logprobs: list[float | None] = []
        for number, call in enumerate(self.calls):
            between = call.context_ids if number else []
            ids += [*between, *call.token_ids]
            logprobs += [*([None] * len(between)), *call.logprobs]
        turns = [call.number for call in self.calls]
        return {"prompt_ids": self.prompt_ids, "token_ids": ids, "logprobs": logprobs, "turns": turns}


@dataclasses.dataclass(eq=False)
class Session:
    """The calls under one name."""

    name: str
    terms: Terms | None = None
    owner: int = 0
    """Position of the key that began it; requests with other keys do not find it."""
    reward_key: str | None = None
    """The key that a reward needs in addition to the model's key, if any."""
    opened: int = 0
    """Calls that have begun."""
    calls: list[Call] = dataclasses.field(default_factory=list)
    """Calls that have ended, in the order of their arrival."""
    reward: float | None = None
    success: bool | None = None
    limit: Literal["turn_limit", "token_limit"] | None = None
    """The limit for which a call was refused."""
    tokens: int = 0
    """Tokens that its calls count."""
    closed: bool = False
    """Whether calls that end from now on are dropped."""
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    """Held while a call is rendered or added: calls of a session may be concurrent."""

    def find(self, kind: str, signatures: Sequence[Signature]) -> tuple[Call | None, int]:
        """Return the latest call with the most messages that these continue, and the number of its messages."""
        best: tuple[Call | None, int] = None, 0
        lengths: dict[Call, int] = {}
        for call in self.calls:
            start = 0 if call.before is None else lengths.get(call.before, -1)
            end = start + len(call.signatures)
            if start < 0 or call.kind != kind or not call.whole or tuple(signatures[start:end]) != call.signatures:
                continue
            lengths[call] = end
            best = (call, end) if end >= best[1] else best
        return best

    def find_ids(self, kind: str, prompt: list[int]) -> Call | None:
        """Return the latest call with the most ids that begin a prompt."""
        lengths: dict[Call | None, int] = {None: 0}
        for call in self.calls:
            start, own = lengths.get(call.before, -1), [*call.context_ids, *call.token_ids]
            if start >= 0 and call.kind == kind and prompt[start : start + len(own)] == own:
                lengths[call] = start + len(own)
        return max(lengths, key=lambda call: (lengths[call], -1 if call is None else call.number))

    def open(self, kind: str, before: Call | None, context_ids: list[int], **fields: Any) -> Call:
        """Return a new call. Raises LimitReached after the last turn of the session."""
        if self.terms is not None and self.opened >= self.terms.turns:
            self.limit = self.limit or "turn_limit"
            raise LimitReached(f"session {self.name} has had its {self.terms.turns} turns (environment.turns)")
        self.opened += 1
        return Call(self.opened - 1, before, kind, context_ids, **fields)

    def keep(self, call: Call, reply: Mapping[str, Any], answer: Signature) -> None:
        """Add a call that has ended."""
        call.reply, call.signatures = dict(reply), (*call.signatures, answer)
        if not self.closed:
            self.tokens += call.size
            bisect.insort(self.calls, call, key=lambda one: one.number)

    def parts(self) -> list[Part]:
        """Return the branches in the order of their first calls.

        Of several calls that continue another, the first stays in its part.
        """
        parts: list[Part] = []
        of: dict[Call | None, Part] = {}
        for call in self.calls:
            part = of.get(call.before)
            if part is None or part.calls[-1] is not call.before:
                part = Part([])
                parts.append(part)
            part.calls.append(call)
            of[call] = part
        return parts

    def text(self) -> Iterator[str]:
        """Yield the session as JSON text, a turn or row at a time: a call of the encoder stops every other thread."""
        names = (
            "number",
            "context_ids",
            "token_ids",
            "logprobs",
            "stop",
            "valid",
            "text",
            "messages",
            "reply",
            "policy",
        )
        with self.lock:
            calls, parts = list(self.calls), self.parts()
        of = {call: number for number, part in enumerate(parts) for call in part.calls}
        turns = ({name: getattr(call, name) for name in names} | {"part": of[call]} for call in calls)
        yield json.dumps({"session": self.name, "reward": self.reward, "success": self.success})[:-1]
        for name, values in ("turns", turns), ("parts", (part.row() for part in parts)):
            yield f', "{name}": ['
            for number, value in enumerate(values):
                yield f"{', ' if number else ''}{json.dumps(value)}"
            yield "]"
        yield "}"


class Sessions:
    """The most recently used sessions by owner and name. Thread-safe: programs begin and end while the server runs."""

    def __init__(self, max_sessions: int, tokens: int, *, closed: bool = False):
        """max_sessions, tokens: limits of all sessions together. closed: whether calls begin no session."""
        self.max_sessions, self.tokens, self.closed = max_sessions, tokens, closed
        self._sessions: collections.OrderedDict[tuple[int, str], Session] = collections.OrderedDict()
        self._evicted: collections.OrderedDict[tuple[int, str], None] = collections.OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        """Add a session."""
        with self._lock:
            self._sessions[session.owner, session.name] = session

    def of_call(self, name: str, owner: int = 0) -> Session:
        """Return the session of a call; the first call begins it.

        Raises ValueError for an invalid name, EvictedSession, LimitReached for a session that alone has all tokens, and
        UnknownSession if calls begin no session.
        """
        with self._lock:
            if (owner, name) not in self._sessions and (owner, name) not in self._evicted and not self.closed:
                if not NAME.fullmatch(name):
                    raise ValueError("a session's name is 1 to 128 letters, digits and . _ : -")
                self.add(session := Session(name, owner=owner))
                self.evict(keep=session)
            session = self.get(name, owner)
            if session.tokens > self.tokens:
                raise LimitReached(f"session {name} alone has all {self.tokens} tokens of sessions: DELETE it")
            return session

    def get(self, name: str, owner: int = 0) -> Session:
        """Return the session of a name. Raises UnknownSession and EvictedSession."""
        with self._lock:
            if (owner, name) in self._evicted:
                raise EvictedSession(
                    f"session {name!r} was dropped: the server holds {self.max_sessions} sessions of {self.tokens} "
                    "tokens; DELETE sessions that have ended, or serve with larger --sessions and --session-tokens"
                )
            if (owner, name) not in self._sessions:
                raise UnknownSession(f"there is no session {name!r}; it begins with its first call")
            self._sessions.move_to_end((owner, name))
            return self._sessions[owner, name]

    def remove(self, name: str, owner: int = 0) -> None:
        """Forget a session and its eviction; its name may be used again. Raises as `get` does."""
        with self._lock:
            try:
                self.get(name, owner)
            finally:
                self._evicted.pop((owner, name), None)
            del self._sessions[owner, name]

    def evict(self, keep: Session) -> None:
        """Drop the least recently used sessions until the others fit, but never `keep`."""
        with self._lock:
            tokens = sum(session.tokens for session in self._sessions.values())
            for name, session in list(self._sessions.items()):
                if len(self._sessions) <= self.max_sessions and tokens <= self.tokens:
                    break
                if session is not keep:
                    tokens -= self._sessions.pop(name).tokens
                    self._evicted[name] = None
            while len(self._evicted) > REMEMBERED:
                self._evicted.popitem(last=False)


def signatures_of(messages: Iterable[Message]) -> list[Signature]:
    """Return messages for comparison, without ids of calls, thoughts and further fields of clients."""
    return [
        (
            message.role,
            without_thoughts(message.text) if message.role == "assistant" else message.text,
            tuple(same_call(call.function.name, call.function.arguments) for call in message.tool_calls or ()),
        )
        for message in messages
    ]
