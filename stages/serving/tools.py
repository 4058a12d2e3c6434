"""Tools in the API: what a request may say of them, and calls of a policy's text in its form.

How calls are written follows the chat template's family (`rlhf.tuning.chat.calls`). A call that a request asks for
(`tool_choice`) is begun for the policy: its first tokens are written into the context, and the policy goes on from
there, so it can choose arguments but not refuse to call.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

from rlhf.tuning.chat import calls, schemas


class Function(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @field_validator("parameters")
    @classmethod
    def _is_a_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        schemas.check(value)
        return value


class Tool(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: Literal["function"]
    function: Function
    _given: dict[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keeps_what_is_given(cls, value: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        made = handler(value)
        made._given = value
        return made

    def schema_of(self) -> dict[str, Any]:
        """As it was given, with fields that only the chat template reads: training data has it so."""
        function = {name: value for name, value in self._given["function"].items() if value is not None}
        return {**self._given, "function": function}


class Named(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: str


class NamedChoice(BaseModel):
    model_config = ConfigDict(extra="ignore")
    type: Literal["function"]
    function: Named


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: str
    arguments: Annotated[Json[dict[str, Any]] | dict[str, Any], BeforeValidator(lambda value: value or {})] = {}
    """JSON text, as OpenAI's API has it, or an object; here it is an object."""


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore")
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


@dataclasses.dataclass(frozen=True)
class Offer:
    """The tools of a request, and how its answer may use them."""

    tools: Sequence[calls.Schema]
    form: str
    """One of `rlhf.tuning.chat.calls.FORMATS` but auto."""
    choice: str = "auto"
    """`none`, `auto`, `required`, or a tool's name."""
    parallel: bool = True
    """Whether an answer may have several calls; else the first counts."""

    @property
    def used(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.tools) and self.choice != "none"

    @property
    def begun(self) -> str:
        """The beginning of the call that is asked for, which the answer goes on from."""
        name = None if self.choice in ("none", "auto", "required") else self.choice
        if self.choice in ("none", "auto"):
            return ""
        if self.form == "gemma":
            return "```tool_code\n" + (f"{name}(" if name else "")
        key = "arguments" if self.form == "hermes" else "parameters"
        # No space at the end: tokenizers join it with what follows.
        body = f'{{"name": "{name}", "{key}":' if name else '{"name": "'
        return f"<tool_call>\n{body}" if self.form == "hermes" else body

    def read(self, text: str) -> calls.Parsed:
        """The calls of a whole answer. Where one of them is malformed all of it is content."""
        if not self.used:
            return calls.Parsed([], [], text)
        try:
            parsed = calls.parse(text, self.form, self.tools)
        except ValueError:
            # A schema with a reference that leads nowhere: nothing can be compared with it.
            return calls.Parsed([], [], text.strip())
        if parsed.errors or not parsed.calls:
            return calls.Parsed([], parsed.errors, text.strip())
        return parsed

    def shown(self, text: str) -> str:
        """As much of an answer under way as is content whatever follows: nothing from where a call may begin."""
        if not self.used:
            return text
        text = text.lstrip()
        behind = text.rpartition("</think>")[2]
        if self.form == "llama" and behind.lstrip().startswith("{"):
            return text[: len(text) - len(behind)].rstrip()
        marks = _MARKS[self.form]
        ends = [i for mark in marks if (i := text.find(mark)) >= 0]
        if ends:
            return text[: min(ends)].rstrip()
        held = max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
        return text[: len(text) - held].rstrip()


_MARKS = {
    "hermes": ("<tool_call>",),
    "llama": ("<|python_tag|>",),
    "gemma": ("```tool_code", "<start_function_call>", "call:"),
}


def answered(found: Sequence[calls.Call], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """`tool_calls` of an answer.

    tokens: of context and answer. Ids of calls follow from them, so that a run of a recipe repeats itself.
    """
    name = hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()
    return [
        {
            # Nine letters and digits: templates of Mistral take no other.
            "id": f"{name[:7]}{number:02d}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for number, call in enumerate(found)
    ]


_THOUGHTS = re.compile(r"^.*?</think>", re.DOTALL)


def without_thoughts(text: str) -> str:
    """The text behind its thoughts, stripped: what clients send back of an answer."""
    return _THOUGHTS.sub("", text).strip()


def same_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call for comparison."""
    return json.dumps([name, arguments], sort_keys=True)
