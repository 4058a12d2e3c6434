"""Recorded sessions: the calls of one client as token ids, in branches that only grow.

    POST /sessions/NAME/v1/chat/completions        messages a        -> context | sampled
                                                   messages a b c    ->                  | context | sampled
                                                   messages a d      -> another branch: a part of its own

A call whose messages go on from those of an earlier call, with its answer, gets that call's ids and behind them the new
messages alone (`rlhf.tuning.chat.renderer`). Answers are found by what they say; the ids are the stored ones, with the
thoughts that a client leaves out. A call that goes on from nothing begins a branch with a rendering of its own; so does
one that would go on from an answer of which its client lacks a part, such as a stop string.
A branch is a row of a rollout table: what was sampled in another branch is context there, so nothing is trained twice.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from rlhf.stages.serving.api import Message
from rlhf.stages.serving.tools import same_call, without_thoughts

NAME = re.compile(r"[\w.:-]{1,128}")
CHARACTERS = 16
"""Characters of a token, at least, in what a session holds."""
FORGOTTEN = 65536
"""Names of evicted sessions that are remembered."""

Said = tuple[str, str, tuple[str, ...]]
"""A message for comparison: role, text, calls."""


class UnknownSession(LookupError):
    """No session has this name."""


class EvictedSession(LookupError):
    """The session was dropped, because the server had more than it may hold."""


class LimitReached(ValueError):
    """A session that has had what it may have."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """What is decided for a session's client, so that its calls are rows of a rollout."""

    temperature: float
    turns: int
    """Calls."""
    turn_tokens: int
    """Sampled tokens of a call, at most."""
    tokens: int
    """Tokens of a branch, at most."""
    seed: Callable[[int], int]
    """Number of a call -> seed of its random numbers."""


@dataclasses.dataclass(eq=False)
class Call:
    """One sample of one request."""

    number: int
    """In the order of arrival, from 0."""
    before: Call | None
    """The call that it goes on from."""
    kind: str
    """Calls go on from those of the same kind alone: endpoint and tools."""
    context_ids: list[int]
    """Ids behind those of the call before it, up to its own sampled ones."""
    messages: list[dict[str, Any]]
    """What the client added; of a completion the text of its prompt."""
    said: tuple[Said, ...]
    """The messages for comparison."""
    policy: str | None
    created: float
    reply: dict[str, Any] | None = None
    """The answer as the client got it; None while it is under way."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    """The sampled text without control tokens."""
    stop: str = ""
    valid: bool = True
    """False: a call of a tool in it is malformed."""
    ended: bool = False
    """Whether the sampled ids end in the end of a turn."""
    whole: bool = True
    """Whether its client has all that its ids say. A call goes on from no other, whose ids are not what it sends."""
    seconds: float = 0.0

    def path(self) -> list[Call]:
        """The calls from the first of its branch to itself."""
        path: list[Call] = []
        call: Call | None = self
        while call is not None:
            path.append(call)
            call = call.before
        return path[::-1]

    def prompt_ids(self) -> list[int]:
        """All ids before its sampled ones."""
        *before, _ = path = self.path()
        return [i for call in before for i in (*call.context_ids, *call.token_ids)] + path[-1].context_ids

    def ids(self) -> list[int]:
        """All ids through its sampled ones."""
        return self.prompt_ids() + self.token_ids

    def whole_text(self) -> str:
        """Of a completion: the prompts and answers through its own."""
        return "".join(call.messages[0]["content"] + call.text for call in self.path())

    @property
    def size(self) -> int:
        """Tokens of its own; of text that a template leaves out, characters stand for some."""
        texts = [self.kind, self.text, *(str(value) for one in self.messages for value in one.values())]
        return max(len(self.context_ids) + len(self.token_ids), sum(map(len, texts)) // CHARACTERS)


@dataclasses.dataclass
class Part:
    """A branch: consecutive calls behind a context of their own."""

    prompt_ids: list[int]
    calls: list[Call]

    def row(self) -> tuple[list[int], list[float | None]]:
        """(ids behind the context, log-probabilities with None where nobody sampled)."""
        ids: list[int] = []
        logprobs: list[float | None] = []
        for number, call in enumerate(self.calls):
            between = call.context_ids if number else []
            ids += [*between, *call.token_ids]
            logprobs += [None for _ in between]
            logprobs += call.logprobs
        return ids, logprobs


@dataclasses.dataclass(eq=False)
class Session:
    """The calls under one name."""

    name: str
    terms: Terms | None = None
    owner: str = ""
    """Whose key began it; others do not find it."""
    reward_key: str | None = None
    """What a reward has to be sent with; None: the key of the model alone."""
    created: float = dataclasses.field(default_factory=time.time)
    opened: int = 0
    """Calls that have begun."""
    calls: list[Call] = dataclasses.field(default_factory=list)
    """Those that have ended, in the order of their arrival."""
    reward: float | None = None
    success: bool | None = None
    limit: Literal["turn_limit", "token_limit"] | None = None
    """`turn_limit` or `token_limit` where a call was refused for it."""
    tokens: int = 0
    """Tokens that it holds."""
    closed: bool = False
    """Whether calls that end from now on are left out."""
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    """Held while a call is read, and while one is added: calls of one session may come at once."""

    def found(self, kind: str, said: Sequence[Said]) -> tuple[Call | None, int]:
        """The latest of the calls that the messages go on from for longest, and how many messages that are."""
        best: tuple[Call | None, int] = None, 0
        lengths: dict[Call, int] = {}
        for call in self.calls:
            start = 0 if call.before is None else lengths.get(call.before, -1)
            end = start + len(call.said)
            if start < 0 or call.kind != kind or not call.whole or tuple(said[start:end]) != call.said:
                continue
            lengths[call] = end
            # Its last entry is the answer: a conversation goes on behind it.
            best = (call, end) if end >= best[1] else best
        return best

    def found_ids(self, kind: str, prompt: Sequence[int]) -> Call | None:
        """The call of whose ids, the sampled ones included, a prompt begins with most."""
        alike = [(len(ids), call.number, call) for call in self.calls if call.kind == kind and (ids := call.ids())]
        fitting = [one for one in alike if list(prompt[: one[0]]) == one[2].ids()]
        return max(fitting, key=lambda one: one[:2])[2] if fitting else None

    def found_text(self, kind: str, prompt: str) -> Call | None:
        """The call of whose prompt and answer a text begins with most."""
        fitting = [c for c in self.calls if c.kind == kind and c.whole and prompt.startswith(c.whole_text())]
        return max(fitting, key=lambda call: (len(call.whole_text()), call.number), default=None)

    def open(self, kind: str, before: Call | None, context_ids: list[int], **fields: Any) -> Call:
        """A call that begins. Raises LimitReached where the session has had its turns."""
        if self.terms is not None and self.opened >= self.terms.turns:
            self.limit = self.limit or "turn_limit"
            raise LimitReached(f"session {self.name} has had its {self.terms.turns} turns (environment.turns)")
        number, self.opened = self.opened, self.opened + 1
        return Call(number, before, kind, context_ids, created=time.time(), **fields)

    def keep(self, call: Call, reply: Mapping[str, Any], answer: Said) -> None:
        """Adds a call that has ended."""
        call.reply, call.said, call.seconds = dict(reply), (*call.said, answer), time.time() - call.created
        if not self.closed:
            self.tokens += call.size
            bisect.insort(self.calls, call, key=lambda one: one.number)

    def parts(self) -> list[Part]:
        """The branches, in the order of their first calls. Of calls that go on from one the first stays in its part."""
        parts: list[Part] = []
        of: dict[Call, Part] = {}
        for call in list(self.calls):
            part = of.get(call.before) if call.before is not None else None
            if part is None or part.calls[-1] is not call.before:
                part = Part(call.prompt_ids(), [])
                parts.append(part)
            part.calls.append(call)
            of[call] = part
        return parts

    def record(self) -> dict[str, Any]:
        """The session as JSON."""
        with self.lock:
            return self._record()

    def text(self) -> str:
        """The session as JSON text, a turn or row at a time: one long call of C would stop every other thread."""
        fields = []
        for name, value in self.record().items():
            items = value if isinstance(value, list) else None
            text = json.dumps(value) if items is None else f"[{', '.join(map(json.dumps, items))}]"
            fields.append(f"{json.dumps(name)}: {text}")
        return f"{{{', '.join(fields)}}}"

    def _record(self) -> dict[str, Any]:
        parts = self.parts()
        rows = []
        for part in parts:
            ids, logprobs = part.row()
            turns = [call.number for call in part.calls]
            rows.append({"prompt_ids": part.prompt_ids, "token_ids": ids, "logprobs": logprobs, "turns": turns})
        of = {call: number for number, part in enumerate(parts) for call in part.calls}
        told = (
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
        told_turns = [
            {name: getattr(call, name) for name in told}
            | {"part": of[call], "policy": call.policy, "created": call.created, "seconds": round(call.seconds, 6)}
            for call in self.calls
        ]
        return {
            "session": self.name,
            "created": self.created,
            "reward": self.reward,
            "success": self.success,
            "turns": told_turns,
            "parts": rows,
        }


class Sessions:
    """Sessions by name; the ones that were used last, as many as fit. For several threads: episodes of programs begin
    and end in threads of theirs, while the server looks sessions up."""

    def __init__(self, most: int, tokens: int, *, closed: bool = False):
        """tokens: of all sessions together. closed: whether only sessions that were added have calls."""
        self.most, self.tokens, self._closed = most, tokens, closed
        self._sessions: collections.OrderedDict[tuple[str, str], Session] = collections.OrderedDict()
        """By owner and name."""
        self._evicted: collections.OrderedDict[tuple[str, str], None] = collections.OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        """A session whose terms are decided here."""
        with self._lock:
            self._sessions[session.owner, session.name] = session

    def of_call(self, name: str, owner: str = "") -> Session:
        """The session of a call, which begins with its first one.

        Raises ValueError for a name that is none, EvictedSession and, where only known ones have calls, UnknownSession.
        """
        with self._lock:
            if (owner, name) in self._sessions or self._closed:
                session = self.get(name, owner)
                if session.tokens > self.tokens:
                    raise LimitReached(
                        f"session {name} alone has all {self.tokens} tokens that sessions may have: DELETE it"
                    )
                return session
            if not NAME.fullmatch(name):
                raise ValueError("a session's name is 1 to 128 letters, digits and . _ : -")
            self._not_evicted(name, owner)
            session = Session(name, owner=owner)
            self.add(session)
            self.evict(keep=session)
            return session

    def get(self, name: str, owner: str = "") -> Session:
        """The session of a name. Raises UnknownSession and EvictedSession."""
        with self._lock:
            self._not_evicted(name, owner)
            if (owner, name) not in self._sessions:
                raise UnknownSession(f"there is no session {name!r}; it begins with its first call")
            self._sessions.move_to_end((owner, name))
            return self._sessions[owner, name]

    def remove(self, name: str, owner: str = "") -> Session:
        """Forgets a session, also that it was dropped; its name may be used again. Raises as `get` does."""
        with self._lock:
            try:
                session = self.get(name, owner)
            finally:
                self._evicted.pop((owner, name), None)
            del self._sessions[owner, name]
            return session

    def evict(self, keep: Session) -> None:
        """Drops the sessions that were not used for longest until the others fit; never the one that is in use."""
        with self._lock:
            held = sum(session.tokens for session in self._sessions.values())
            for name, session in list(self._sessions.items()):
                if len(self._sessions) <= self.most and held <= self.tokens:
                    break
                if session is not keep:
                    held -= self._sessions.pop(name).tokens
                    self._evicted[name] = None
            while len(self._evicted) > FORGOTTEN:
                self._evicted.popitem(last=False)

    def _not_evicted(self, name: str, owner: str) -> None:
        if (owner, name) in self._evicted:
            raise EvictedSession(
                f"session {name!r} was dropped: the server holds {self.most} sessions of {self.tokens} tokens; "
                "read and DELETE sessions when they end, or serve with more (sessions, session_tokens)"
            )


def said_by(messages: Iterable[Message]) -> list[Said]:
    """Messages of a client for comparison: without ids of calls, thoughts, and what else clients add or leave out."""
    return [_said(message) for message in messages]


def _said(message: Message) -> Said:
    if message.role != "assistant":
        return message.role, message.text, ()
    called = [call.function for call in message.tool_calls or []]
    return message.role, without_thoughts(message.text), tuple(same_call(call.name, call.arguments) for call in called)
