"""OpenAI's completions and chat completions over an engine: fields of requests and answers.

Source: the OpenAI API reference; `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos` and
`return_token_ids` are named as vLLM names them.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "echo": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "functions": (None, []),
}
"""Fields of the API that this server does not implement, and the values at which they have no effect."""
# Accepted without effect: they describe the caller, not the answer.
IGNORED = ("user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Asked(BaseModel):
    """The fields that both endpoints share."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1)] | None = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] | None = 1.0
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_offered(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # Before the check for unknown fields: these are known, and refused only where they would have an
        # effect.
        for name, allowed in NEUTRAL.items():
            if name in values and values[name] not in allowed:
                raise ValueError(f"{name} is not offered by this server; leave it out")
        return {k: v for k, v in values.items() if k not in NEUTRAL and k not in IGNORED}

    @property
    def strings(self) -> list[str]:
        """The stop strings."""
        listed = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        return [s for s in listed if s]

    def sampling(self) -> Any:
        """The engine's sampling settings; null is the default."""
        from tuning.rollout.requests import Sampling

        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        return Sampling(
            given(self.temperature, 1.0),
            given(self.top_p, 1.0),
            # -1 is off, as in vLLM; the engine has 0 for that.
            max(0, given(self.top_k, 0)),
            given(self.min_p, 0.0),
            given(self.repetition_penalty, 1.0),
        )

    def root(self) -> int:
        """The request's seed modulo 2**32, or a random one."""
        # As in OpenAI's API, answers without a seed differ.
        return int.from_bytes(os.urandom(4), "little") if self.seed is None else self.seed % 2**32


class CompletionRequest(Asked):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One text, or token ids, a prompt."""
        p: Any = self.prompt
        if not len(p):
            raise ValueError("the prompt is empty; a model needs at least one token, such as its BOS")
        return [p] if isinstance(p, str) or (p and isinstance(p[0], int)) else p


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """The message for a chat template: text parts joined."""
        content = self.content
        if isinstance(content, list):
            wrong = [p.get("type") for p in content if p.get("type") != "text"]
            if wrong:
                raise ValueError(f"messages: a part of type {wrong[0]!r} is not offered; this model reads text")
            content = "".join(p.get("text", "") for p in content)
        return {"role": self.role, "content": content or ""} | (self.model_extra or {})


class ChatRequest(Asked):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


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
        return str(self._tokenizer.decode([token]))

    def add(self, tokens: list[int], ended: bool) -> str:
        """The text that these tokens complete and that was not returned before."""
        self.tokens += tokens
        text = self.decode(self.tokens)
        at = min((i for i in (text.find(s) for s in self._strings) if i >= 0), default=None)
        if at is not None:
            text = text[:at]
        elif not ended:
            # The end may be the beginning of a stop string: held back until more tokens decide.
            text = text[: len(text) - self._hold] if self._hold else text
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
        return {"token": piece, "logprob": logp, "bytes": list(piece.encode())}

    rows = []
    for i, (token, logp) in enumerate(zip(tokens, logps, strict=True)):
        best = [entry(t, v) for t, v in (top[i][:count] if top else [])]
        rows.append(entry(token, logp) | {"top_logprobs": best})
    return {"content": rows, "refusal": None}


def completion_logprobs(
    text: Text, tokens: list[int], logps: list[float], top: list[Any], count: int, offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; offsets are in characters of the text."""
    pieces = [text.piece(t) for t in tokens]
    offsets = [offset + sum(map(len, pieces[:i])) for i in range(len(pieces))]
    best = [_by_text(text, row[:count]) for row in top] if count else None
    return {"tokens": pieces, "token_logprobs": logps, "top_logprobs": best, "text_offset": offsets}


def _by_text(text: Text, row: list[tuple[int, float]]) -> dict[str, float]:
    """Log-probabilities by token text, or by id where two tokens have one text (parts of a character do)."""
    by_text: dict[str, float] = {}
    for token, logp in row:
        piece = text.piece(token)
        by_text[f"token_id:{token}" if piece in by_text else piece] = logp
    return by_text
