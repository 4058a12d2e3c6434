"""Answers of the API: text as its tokens arrive, log-probabilities, and the fields of both endpoints."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from rlhf.stages.serving.tools import Offer, tool_calls_of

FINISH = {"eos": "stop", "string": "stop", "cancelled": "stop", "length": "length"}
"""`finish_reason` by the engine's reason."""


@functools.lru_cache(maxsize=1 << 18)
def _piece(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))


class Text:
    """The text of a sample as its tokens arrive, without incomplete characters and the start of a stop string."""

    def __init__(self, tokenizer: Any, special: set[int], strings: Sequence[str]):
        self._tokenizer, self._special, self._strings = tokenizer, special, strings
        self._hold = max((len(s) for s in strings), default=1) - 1
        self._tokens: list[int] = []
        self._context = self._decoded = 0
        """Tokens before `_decoded` are in `_text`; those from `_context` on are decoded with each update."""
        self._text = ""
        self.sent = ""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text without special tokens."""
        return str(self._tokenizer.decode([t for t in tokens if t not in self._special]))

    def piece(self, token: int) -> str:
        """Return the text of one token, special or not."""
        return _piece(self._tokenizer, token)

    def add(self, tokens: Sequence[int], ended: bool) -> str:
        """Return the text that these tokens complete and that was not returned before."""
        self._tokens += tokens
        # Decoded with the tokens of the update before: the first token of a text may lose its space.
        before = self.decode(self._tokens[self._context : self._decoded])
        text = self.decode(self._tokens[self._context :])
        # A character of several tokens decodes to U+FFFD until its last byte is there.
        if ended or not text.endswith("\ufffd"):
            self._text += text[len(before) :]
            self._context, self._decoded = self._decoded, len(self._tokens)
        # No part of a stop string has been sent.
        at = min((i for s in self._strings if (i := self._text.find(s, len(self.sent))) >= 0), default=None)
        if at is None:
            # The end may be the start of a stop string, which the next tokens decide.
            at = len(self._text) if ended else len(self._text) - self._hold
        new = self._text[len(self.sent) : max(at, len(self.sent))]
        self.sent += new
        return new


def chat_logprobs(text: Text, tokens: list[int], logps: list[float], top: list[Any], count: int) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion."""

    def entry(token: int, logp: float) -> dict[str, Any]:
        piece = text.piece(token)
        # A part of a character has no text.
        return {"token": piece, "logprob": logp, "bytes": None if "\ufffd" in piece else list(piece.encode())}

    rows = [
        entry(token, logp) | {"top_logprobs": [entry(*pair) for pair in best[:count]]}
        for token, logp, best in zip(tokens, logps, top or [[]] * len(tokens), strict=True)
    ]
    return {"content": rows, "refusal": None}


def completion_logprobs(
    text: Text, tokens: list[int], logps: Sequence[float | None], top: list[Any], count: int, offset: int
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion. Offsets are in characters of the text.

    The first token of a prompt has no log-probability: None in `logps` and `top`.
    """
    pieces = [text.piece(t) for t in tokens]
    offsets = list(itertools.accumulate(map(len, pieces[:-1]), initial=offset))[: len(pieces)]
    best = [None if row is None else _by_text(text, row[:count]) for row in top] if count else None
    return {"tokens": pieces, "token_logprobs": logps, "top_logprobs": best, "text_offset": offsets}


def _by_text(text: Text, row: list[tuple[int, float]]) -> dict[str, float]:
    """Return log-probabilities by token text, or by id if two tokens have the same text (parts of a character do)."""
    by_text: dict[str, float] = {}
    for token, logp in row:
        piece = text.piece(token)
        by_text[f"token_id:{token}" if piece in by_text else piece] = logp
    return by_text


class Completed:
    """A choice of /v1/completions."""

    valid = complete = True

    def __init__(self, text: Text, top: int | None):
        self._text, self._top = text, top
        self._offset = 0
        """Characters of the tokens of earlier updates; their text may still be held back."""

    def logprobs(self, tokens: list[int], logps: Sequence[float | None], top: list[Any], offset: int = 0) -> Any:
        """Return the log-probabilities of these tokens; None if the request asks for none."""
        return None if self._top is None else completion_logprobs(self._text, tokens, logps, top, self._top, offset)

    def delta(self, new: str, update: Any) -> dict[str, Any]:
        """Return the part of a stream that an update adds."""
        logprobs = self.logprobs(update.tokens, update.logps, update.top, self._offset)
        self._offset += len("".join(logprobs["tokens"])) if logprobs else 0
        return {"text": new, "logprobs": logprobs}

    def whole(self, done: Any) -> dict[str, Any]:
        """Return the choice of an ended sample."""
        return {"text": self._text.sent, "logprobs": self.logprobs(done.tokens, done.logps, done.top)}

    def finish(self, done: Any) -> str:
        """Return `finish_reason`."""
        return FINISH[done.stop]


class Spoken:
    """A choice of /v1/chat/completions."""

    def __init__(self, text: Text, offer: Offer, prompt: Sequence[int], top: int | None):
        self._text, self._offer, self._prompt, self._top = text, offer, prompt, top
        self._reply: dict[str, Any] | None = None
        self.valid = self.complete = True
        """False if a call in the text is malformed; false if the reply leaves out calls of the text."""

    def _logprobs(self, one: Any) -> Any:
        return None if self._top is None else chat_logprobs(self._text, one.tokens, one.logps, one.top, self._top)

    def reply(self, done: Any) -> dict[str, Any]:
        """Return the message of the assistant."""
        if self._reply is None:
            parsed = self._offer.read(self._offer.call_start + self._text.sent)
            calls = parsed.calls if self._offer.parallel else parsed.calls[:1]
            self.valid, self.complete = not parsed.errors, len(calls) == len(parsed.calls)
            self._reply = {"role": "assistant", "content": parsed.content, "refusal": None}
            if calls:
                # Empty content is null next to calls, as in OpenAI's API.
                written = tool_calls_of(calls, [*self._prompt, *done.tokens])
                self._reply |= {"content": parsed.content or None, "tool_calls": written}
        return self._reply

    def delta(self, new: str, update: Any) -> dict[str, Any]:
        """Return the part of a stream that an update adds. With tools, content and calls come with the last update."""
        delta: dict[str, Any] = {"role": "assistant", "content": "" if self._offer.used else new}
        if self._offer.used and update.completion is not None:
            reply = self.reply(update.completion)
            calls = [{"index": i} | call for i, call in enumerate(reply.get("tool_calls", ()))]
            delta |= {"content": reply["content"] or ""} | ({"tool_calls": calls} if calls else {})
        return {"delta": delta, "logprobs": self._logprobs(update)}

    def whole(self, done: Any) -> dict[str, Any]:
        """Return the choice of an ended sample."""
        return {"message": self.reply(done), "logprobs": self._logprobs(done)}

    def finish(self, done: Any) -> str:
        """Return `finish_reason`."""
        return "tool_calls" if "tool_calls" in self.reply(done) else FINISH[done.stop]


Choice = Completed | Spoken
