"""OpenAI's completions and chat completions over an engine: fields of requests.

Source: the OpenAI API reference; `top_k`, `min_p`, `stop_token_ids`, `ignore_eos`,
`return_token_ids` and `chat_template_kwargs` are named as vLLM names them.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from rlhf.stages.serving.bodies import MOST_FIELDS
from rlhf.stages.serving.tools import Tool, ToolCall, ToolChoice
from rlhf.tuning.chat.schemas import nodes_of

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
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
GREEDY = 1e-5
"""Temperatures below it are 0, as in vLLM: logits divided by them would leave 32-bit floats."""
MOST_SAMPLES = 1024
"""Of all prompts of a request."""
MOST_TOOLS = 128
MOST_TOOL_NODES = 4096
"""Of the schemas of all tools of a request."""

Id = Annotated[int, Field(ge=0, lt=2**31)]
Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong element is its only error: a million others would take gigabytes."""
Prompts = Annotated[list[T], Field(fail_fast=True, max_length=MOST_SAMPLES)]
Stops = Annotated[
    list[str], Field(max_length=16), BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


def _kind_of(prompt: Any) -> str:
    """The form of a prompt by its first element: only that one is tried."""
    kinds = {str: "texts", int: "ids", list: "lists"}
    return kinds.get(type(prompt[0]), "texts") if isinstance(prompt, list) and prompt else "text"


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Asked(BaseModel):
    """The fields that both endpoints share. Numbers are bounded to what an engine computes with."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    seed: int | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[Many[Id], Field(max_length=1024)] | None = None
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
        neutral = {name: allowed for name, allowed in NEUTRAL.items() if name not in cls.model_fields}
        for name, allowed in neutral.items():
            if name in values and values[name] not in allowed:
                raise ValueError(f"{name} is not offered by this server; leave it out")
        # Clients send null for what they leave out.
        left_out = {*neutral, *IGNORED, *(name for name, value in values.items() if value is None)}
        return {k: v for k, v in values.items() if k in cls.model_fields or k not in left_out}

    @property
    def strings(self) -> list[str]:
        """The stop strings."""
        return [s for s in self.stop or [] if s]

    def sampling(self) -> Any:
        """The engine's sampling settings; null is the default."""
        from rlhf.tuning.rollout.requests import Sampling

        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        temperature = given(self.temperature, 1.0)
        return Sampling(
            0.0 if temperature < GREEDY else temperature,
            given(self.top_p, 1.0),
            # -1 is off, as in vLLM; the engine has 0 for that.
            max(0, given(self.top_k, 0)),
            given(self.min_p, 0.0),
        )

    def root(self) -> int:
        """The request's seed modulo 2**32, or a random one."""
        # As in OpenAI's API, answers without a seed differ.
        return int.from_bytes(os.urandom(4), "little") if self.seed is None else self.seed % 2**32


class CompletionRequest(Asked):
    """POST /v1/completions."""

    prompt: Annotated[
        Annotated[str | Annotated[list[str], Field(max_length=0)], Tag("text")]
        | Annotated[Many[Token], Tag("ids")]
        | Annotated[Prompts[str], Tag("texts")]
        | Annotated[Prompts[Many[Token]], Tag("lists")],
        Discriminator(_kind_of),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = False

    @model_validator(mode="after")
    def _asks_for_something(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which asks for nothing without echo: say 1 or more")
        if self.echo and self.stream:
            raise ValueError("echo is not offered with stream; leave one of them out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One text, or token ids, a prompt."""
        p: Any = self.prompt
        if not len(p):
            raise ValueError("the prompt is empty; a model needs at least one token, such as its BOS")
        prompts: list[str | list[int]] = [p] if isinstance(p, str) or (p and isinstance(p[0], int)) else p
        samples = len(prompts) * (self.n or 1)
        if samples > MOST_SAMPLES:
            raise ValueError(f"prompt, n: {samples} samples; at most {MOST_SAMPLES} in a request")
        return prompts


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        # OpenAI's role of the system.
        BeforeValidator(lambda role: "system" if role == "developer" else role),
    ]
    name: Annotated[str, Field(max_length=64)] | None = None
    content: str | Many[dict[str, Any]] | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        if len(self.model_extra or {}) > MOST_FIELDS:
            raise ValueError(
                f"a message has {len(self.model_extra or {})} further fields; at most {MOST_FIELDS} are supported"
            )
        return self

    @property
    def size(self) -> int:
        """Characters of all that a template may write."""
        calls = sum(len(call.model_dump_json()) for call in self.tool_calls or ())
        return len(self.text) + len(self.tool_call_id or "") + calls

    @property
    def text(self) -> str:
        """The content, text parts joined."""
        if isinstance(self.content, list):
            wrong = [p.get("type") for p in self.content if p.get("type") != "text"]
            if wrong:
                raise ValueError(f"messages: a part of type {wrong[0]!r} is not offered; this model reads text")
            texts = [p["text"] for p in self.content if isinstance(p.get("text"), str)]
            if len(texts) < len(self.content):
                raise ValueError("messages: a part of type 'text' needs a string in `text`")
            return "".join(texts)
        return self.content or ""


class ChatRequest(Asked):
    """POST /v1/chat/completions."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Annotated[Many[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: Annotated[dict[str, str | float | bool], Field(max_length=MOST_FIELDS)] | None = None
    """Values that the chat template reads, such as {"enable_thinking": false}."""

    @field_validator("tools", mode="before")
    @classmethod
    def _tools_are_small(cls, value: Any) -> Any:
        nodes = sum(len(nodes_of(one)) for one in value) if isinstance(value, list) else 0
        if nodes > MOST_TOOL_NODES:
            raise ValueError(
                f"the schemas have {nodes} objects, lists and elements; at most {MOST_TOOL_NODES} are supported"
            )
        return value

    @model_validator(mode="after")
    def _alternatives_go_with_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _tools_are_there(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise ValueError("tools: two have one name; names are unique")
        wanted = self.choice
        if wanted not in ("none", "auto") and not names:
            raise ValueError("tool_choice asks for a call, but there are no tools: leave it out, or offer some")
        if wanted not in ("none", "auto", "required", *names):
            raise ValueError(f"tool_choice: there is no tool {wanted!r} among {', '.join(names)}")
        return self

    @property
    def choice(self) -> str:
        """`none`, `auto`, `required`, or the name of the function that is to be called."""
        if self.tool_choice is None:
            return "auto"
        return self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.function.name

    @property
    def options(self) -> dict[str, Any]:
        """The values that the chat template reads."""
        return self.chat_template_kwargs or {}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as the API describes them."""
        return [tool.schema_of() for tool in self.tools or []]

    @property
    def has_tools(self) -> bool:
        """Whether tools are in the request or in its messages."""
        return bool(self.tools) or any(m.role == "tool" or m.tool_calls for m in self.messages)
