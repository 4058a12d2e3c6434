"""Answers of the API: text as its tokens arrive, log-probabilities, and the fields of either endpoint."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from rlhf.stages.serving.tools import Offer, answered


@functools.cache
def _bytes() -> dict[str, int]:
    """The byte of each letter of GPT-2's vocabulary of bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


@functools.lru_cache(maxsize=1 << 18)
def _piece(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))


class Text:
    """The text of one sample as its tokens arrive, without incomplete characters and the start of a stop string."""

    def __init__(self, tokenizer: Any, special: set[int], strings: list[str]):
        self._tokenizer, self._special, self._strings = tokenizer, special, strings
        self._hold = max((len(s) for s in strings), default=1) - 1
        self.tokens: list[int] = []
        self.sent = ""

    def decode(self, tokens: list[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode([t for t in tokens if t not in self._special]))

    def piece(self, token: int) -> str:
        """The text of one token, special or not."""
        return _piece(self._tokenizer, token)

    def bytes_of(self, token: int) -> list[int]:
        """The bytes of one token: clients put characters together of those of several tokens."""
        piece = self.piece(token)
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            # A byte of a vocabulary of SentencePiece.
            return [int(name[3:5], 16)]
        if "\u2581" in name:
            # Its space, which a decoder may leave out at the beginning of a text.
            return list(name.replace("\u2581", " ").encode())
        if "\ufffd" not in piece:
            return list(piece.encode())
        # In a vocabulary of bytes each byte is a letter; a token that has others is no part of a character.
        found = [_bytes().get(letter) for letter in name]
        return [b for b in found if b is not None] if None not in found else list(piece.encode())

    def add(self, tokens: list[int], ended: bool) -> str:
        """The text that these tokens complete and that was not returned before."""
        self.tokens += tokens
        text = self.decode(self.tokens)
        at = min((i for i in (text.find(s) for s in self._strings) if i >= 0), default=None)
        if at is not None:
            text = text[:at]
        elif not ended:
            # The end may be the beginning of a stop string: held back until more tokens decide.
            text = text[: max(0, len(text) - self._hold)]
            # A character of several tokens decodes to U+FFFD until its last byte is there.
            text = text.rstrip("\ufffd")
        new = text[len(self.sent) :]
        # Decoding more tokens can shorten the text at hand; what was sent stays sent.
        self.sent = text if len(text) > len(self.sent) else self.sent
        return new


FINISH: dict[str, Literal["stop", "length"]] = {
    "eos": "stop",
    "string": "stop",
    "cancelled": "stop",
    "length": "length",
}


def chat_logprobs(text: Text, tokens: list[int], logps: list[float], top: list[Any], count: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def entry(token: int, logp: float) -> dict[str, Any]:
        piece = text.piece(token)
        return {"token": piece, "logprob": logp, "bytes": text.bytes_of(token)}

    rows = []
    for i, (token, logp) in enumerate(zip(tokens, logps, strict=True)):
        best = [entry(t, v) for t, v in (top[i][:count] if top else [])]
        rows.append(entry(token, logp) | {"top_logprobs": best})
    return {"content": rows, "refusal": None}


def completion_logprobs(
    text: Text, tokens: list[int], logps: Sequence[float | None], top: list[Any], count: int, offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; offsets are in characters of the text. A token of which nothing is known,
    as the first of a prompt, has None."""
    pieces = [text.piece(t) for t in tokens]
    offsets = list(itertools.accumulate(map(len, pieces[:-1]), initial=offset))[: len(pieces)]
    best = [None if row is None else _by_text(text, row[:count]) for row in top] if count else None
    return {"tokens": pieces, "token_logprobs": logps, "top_logprobs": best, "text_offset": offsets}


def _by_text(text: Text, row: list[tuple[int, float]]) -> dict[str, float]:
    """Log-probabilities by token text, or by id where two tokens have one text (parts of a character do)."""
    by_text: dict[str, float] = {}
    for token, logp in row:
        piece = text.piece(token)
        by_text[f"token_id:{token}" if piece in by_text else piece] = logp
    return by_text


class Choice(Protocol):
    """One choice of an answer under way."""

    valid: bool
    complete: bool

    def delta(self, new: str, update: Any) -> dict[str, Any]: ...
    def whole(self, done: Any) -> dict[str, Any]: ...
    def finish(self, done: Any) -> str: ...


class Completed:
    """A choice of /v1/completions."""

    valid = complete = True

    def __init__(self, text: Text, top: int | None):
        self._text, self._top = text, top
        self._at = 0
        """Characters of the tokens of earlier updates, as `whole` counts them: their text may be held back."""

    def _logprobs(self, one: Any, at: int) -> Any:
        if self._top is None:
            return None
        return completion_logprobs(self._text, one.tokens, one.logps, one.top, self._top, at)

    def delta(self, new: str, update: Any) -> dict[str, Any]:
        """What an update adds, as part of a stream."""
        logprobs = self._logprobs(update, self._at)
        if logprobs is not None:
            self._at += sum(map(len, logprobs["tokens"]))
        return {"text": new, "logprobs": logprobs}

    def whole(self, done: Any) -> dict[str, Any]:
        """The choice when it has ended."""
        return {"text": self._text.sent, "logprobs": self._logprobs(done, 0)}

    def finish(self, done: Any) -> str:
        """`finish_reason`."""
        return FINISH[done.stop]


class Spoken:
    """A choice of /v1/chat/completions."""

    def __init__(self, text: Text, offer: Offer, prompt: Sequence[int], top: int | None):
        self._text, self._offer, self._prompt, self._top = text, offer, prompt, top
        self._shown = ""
        self._reply: dict[str, Any] | None = None
        self.valid = self.complete = True
        """False: a call in it is malformed; calls of it are left out of the reply."""

    def _logprobs(self, one: Any) -> Any:
        return None if self._top is None else chat_logprobs(self._text, one.tokens, one.logps, one.top, self._top)

    def reply(self, done: Any) -> dict[str, Any]:
        """The message of the assistant."""
        if self._reply is None:
            parsed = self._offer.read(self._offer.begun + self._text.sent)
            made = parsed.calls if self._offer.parallel else parsed.calls[:1]
            self.valid, self.complete = not parsed.errors, len(made) == len(parsed.calls)
            self._reply = {"role": "assistant", "content": parsed.content, "refusal": None}
            if made:
                # Null beside calls alone, as in OpenAI's API.
                calls = answered(made, [*self._prompt, *done.tokens])
                self._reply |= {"content": parsed.content or None, "tool_calls": calls}
        return self._reply

    def delta(self, new: str, update: Any) -> dict[str, Any]:
        """What an update adds, as part of a stream; calls come with the last one."""
        delta: dict[str, Any] = {"role": "assistant"}
        if not self._offer.used:
            delta["content"] = new
        else:
            shown = self._offer.shown(self._offer.begun + self._text.sent)
            if update.completion is not None:
                reply = self.reply(update.completion)
                shown = reply["content"] or ""
                if calls := reply.get("tool_calls"):
                    delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
            # What was shown is the beginning of what is, whatever followed.
            delta["content"], self._shown = shown[len(self._shown) :], max(shown, self._shown, key=len)
        return {"delta": delta, "logprobs": self._logprobs(update)}

    def whole(self, done: Any) -> dict[str, Any]:
        """The choice when it has ended."""
        return {"message": self.reply(done), "logprobs": self._logprobs(done)}

    def finish(self, done: Any) -> str:
        """`finish_reason`."""
        return "tool_calls" if "tool_calls" in self.reply(done) else FINISH[done.stop]
