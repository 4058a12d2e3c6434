"""Requests of OpenAI's completions and chat completions.

Source: the OpenAI API reference; `top_k`, `min_p`, `stop_token_ids`, `ignore_eos`,
`return_token_ids` and `chat_template_kwargs` are vLLM's.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rlhf.stages.serving.tools import Tool, ToolCall

NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "suffix": "",
    "best_of": 1,
    "response_format": {"type": "text"},
}
"""Fields of OpenAI's API that this server does not implement, and the value at which they have no effect."""
# Accepted without effect: they describe the caller, not the answer.
IGNORED = ("user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier")
ANY = "policy"
"""A model name that every server accepts."""
GREEDY = 1e-5
"""Temperatures below it are 0, as in vLLM: logits divided by them overflow float32."""
TOP_LOGPROBS = 5
"""Most probable tokens that an answer can show at each position."""
MOST_SAMPLES = 1024
"""Samples of all prompts of a request."""
MOST_VALUES = 64
"""Values for the chat template."""

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that reports only its first wrong element: errors of a million elements take gigabytes."""
Id = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Stops = Annotated[
    list[str],
    Field(max_length=16),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    AfterValidator(lambda strings: [s for s in strings if s]),
]


def _listed(prompt: Any) -> Any:
    """Return a list of prompts for one prompt, which is a text or token ids."""
    match prompt:
        case str() | [int(), *_]:
            return [prompt]
    return prompt


def _joined(content: Any) -> Any:
    """Return the text of a content that is a list of parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ValueError("this model reads text: expected parts of type 'text' with a string in `text`")
    return "".join(texts)


def _few(values: Any) -> Any:
    """Refuse a mapping that is too large before its values are checked: errors of all of them take gigabytes."""
    if isinstance(values, dict) and len(values) > MOST_VALUES:
        raise ValueError(f"{len(values)} values; at most {MOST_VALUES}")
    return values


def _tool_named(choice: Any) -> Any:
    """Return the name of the function in a `tool_choice` that is an object."""
    match choice:
        case {"type": "function", "function": {"name": name}}:
            return name
    return choice


class Asked(BaseModel):
    """The fields that both endpoints share. Numbers are limited to those that an engine can compute with."""

    model_config = ConfigDict(allow_inf_nan=False)
    kind: ClassVar[str]
    """`object` of the answer."""
    max_tokens: int | None = None

    model: str = ANY
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: int | None = None
    stop: Stops = []
    stop_token_ids: Many[Id] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] = {}
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # Clients send null for fields that they leave out.
        given = {name: value for name, value in values.items() if value is not None}
        known = {name: value for name, value in given.items() if name in cls.model_fields}
        for name in given:
            if name in known or name in IGNORED or (name in NEUTRAL and given[name] == NEUTRAL[name]):
                continue
            raise ValueError(f"{name} is not offered by this server; leave it out")
        return known

    def sampling(self) -> Any:
        """Return the engine's sampling settings."""
        from rlhf.tuning.rollout.requests import Sampling

        temperature = 0.0 if self.temperature < GREEDY else self.temperature
        # top_k -1 is off, as in vLLM; the engine has 0 for that.
        return Sampling(temperature, self.top_p, max(0, self.top_k), self.min_p)

    def root(self) -> int:
        """Return the request's seed modulo 2**32, or a random seed."""
        # As in OpenAI's API, answers without a seed differ.
        return int.from_bytes(os.urandom(4), "little") if self.seed is None else self.seed % 2**32


class CompletionRequest(Asked):
    """POST /v1/completions."""

    kind: ClassVar[str] = "text_completion"

    prompt: Annotated[Many[str | Many[Id]], Field(min_length=1, max_length=MOST_SAMPLES), BeforeValidator(_listed)]
    """Texts or token ids."""
    max_tokens: Annotated[int, Field(ge=0)] = 16
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _can_be_answered(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1 unless echo is set")
        if self.echo and self.stream:
            raise ValueError("echo is not offered with stream; leave one of them out")
        if (samples := len(self.prompt) * self.n) > MOST_SAMPLES:
            raise ValueError(f"prompt, n: {samples} samples; at most {MOST_SAMPLES} in a request")
        return self


class Message(BaseModel):
    """A message of a conversation. Fields that are not listed here reach no template."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        # OpenAI's newer name of the role.
        BeforeValidator(lambda role: "system" if role == "developer" else role),
    ]
    name: Annotated[str, Field(max_length=64)] | None = None
    content: Annotated[str | None, BeforeValidator(_joined)] = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        return self

    @property
    def size(self) -> int:
        """Characters that a template may write, and at least one."""
        calls = sum(len(call.model_dump_json()) for call in self.tool_calls or ())
        return 1 + len(self.text) + len(self.tool_call_id or "") + calls

    @property
    def text(self) -> str:
        """The content; empty if it is null."""
        return self.content or ""


class ChatRequest(Asked):
    """POST /v1/chat/completions."""

    kind: ClassVar[str] = "chat.completion"

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] = 0
    tools: Annotated[Many[Tool], Field(max_length=128)] = []
    tool_choice: Annotated[str, BeforeValidator(_tool_named)] = "auto"
    """`none`, `auto`, `required`, or the name of a tool."""
    parallel_tool_calls: bool = True
    chat_template_kwargs: Annotated[dict[str, str | float | bool], BeforeValidator(_few)] = {}
    """Values that the chat template reads, such as {"enable_thinking": false}."""

    @model_validator(mode="after")
    def _can_be_answered(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: two have the same name; expected unique names")
        if self.tool_choice not in ("none", "auto", *(["required"] if names else ()), *names):
            offered = ", ".join(names) or "none"
            raise ValueError(f"tool_choice: {self.tool_choice!r} is not among the request's tools: {offered}")
        return self

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as the client describes them."""
        return [tool.schema_of() for tool in self.tools]
