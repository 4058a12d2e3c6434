"""Tools in the API: the fields of requests, and calls in a policy's text.

The format of calls follows the chat template's family (`rlhf.tuning.chat.calls`). If `tool_choice` asks for a call, the
server writes the beginning of the call into the context and the policy continues it: the policy chooses arguments but
cannot refuse to call.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    Json,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

from rlhf.tuning.chat import calls, schemas


class Function(BaseModel):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @field_validator("parameters")
    @classmethod
    def _is_a_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        schemas.check(value)
        return value


class Tool(BaseModel):
    type: Literal["function"]
    function: Function
    _given: dict[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep_given(cls, value: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = handler(value)
        tool._given = value
        return tool

    def schema_of(self) -> dict[str, Any]:
        """Return the tool as the client wrote it, with fields that only the chat template reads, as training data."""
        function = {name: value for name, value in self._given["function"].items() if value is not None}
        return {**self._given, "function": function}


class CalledFunction(BaseModel):
    name: str
    arguments: Annotated[Json[dict[str, Any]] | dict[str, Any], BeforeValidator(lambda value: value or {})] = {}
    """JSON text, as in OpenAI's API, or an object."""


class ToolCall(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


@dataclasses.dataclass(frozen=True)
class Offer:
    """The tools of a request, and the calls that its answer may have."""

    tools: Sequence[calls.Schema]
    form: str
    """A format of `rlhf.tuning.chat.calls.FORMATS` other than auto."""
    choice: str = "auto"
    """`none`, `auto`, `required`, or a tool's name."""
    parallel: bool = True
    """Whether an answer may have several calls; else only the first counts."""

    @property
    def used(self) -> bool:
        """Whether the answer may have calls."""
        return bool(self.tools) and self.choice != "none"

    @property
    def call_start(self) -> str:
        """The beginning of the call that the request asks for, which the answer continues."""
        name = None if self.choice in ("none", "auto", "required") else self.choice
        if self.choice in ("none", "auto"):
            return ""
        if self.form == "gemma":
            return "```tool_code\n" + (f"{name}(" if name else "")
        key = "arguments" if self.form == "hermes" else "parameters"
        # No space at the end: tokenizers join it with the next word.
        body = f'{{"name": "{name}", "{key}":' if name else '{"name": "'
        return f"<tool_call>\n{body}" if self.form == "hermes" else body

    def read(self, text: str) -> calls.Parsed:
        """Return the calls of a whole answer. If one of them is malformed, the whole text is content."""
        if not self.used:
            return calls.Parsed([], [], text)
        try:
            parsed = calls.parse(text, self.form, self.tools)
        except ValueError:
            # A schema has a broken reference.
            return calls.Parsed([], [], text.strip())
        if parsed.errors or not parsed.calls:
            return calls.Parsed([], parsed.errors, text.strip())
        return parsed


def tool_calls_of(found: Sequence[calls.Call], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Return `tool_calls` of an answer.

    tokens: context and answer. Ids of calls are derived from them, so that a run of a recipe is reproducible.
    """
    name = hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()
    return [
        {
            # Mistral's templates accept only nine letters and digits.
            "id": f"{name[:7]}{number:02d}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for number, call in enumerate(found)
    ]


def without_thoughts(text: str) -> str:
    """Return the text after its thoughts, stripped, as clients send an answer back."""
    head, mark, rest = text.partition("</think>")
    return (rest if mark else head).strip()


def same_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call for comparison."""
    return json.dumps([name, arguments], sort_keys=True)
