"""Tool calls in a policy's text: the syntax of each family of models, and the fault of a malformed call.

Nothing here raises for a policy's text: a malformed call is an error text that the policy reads in its next turn.
Processes of environments import this module, so it loads neither JAX nor a tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from rlhf.tuning.chat import schemas
from rlhf.tuning.chat.call_text import CLOSE, END, FENCE, OPEN, PYTHON_TAG, READERS, START, Written, shown

FORMATS = ("auto", "hermes", "llama", "gemma")
"""How tool calls are written in text; auto: as the chat template's family does, else Hermes' `<tool_call>`."""
Schema = Mapping[str, Any]
"""A function as OpenAI's API describes it: {"type": "function", "function": {name, description, parameters}}."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any]
    """JSON values by the parameter's name, with the types that the policy wrote."""


@dataclasses.dataclass(frozen=True)
class Parsed:
    """The parts of a turn's text."""

    calls: list[Call]
    """Calls that the tools' schemas accept, in the order of the text."""
    errors: list[str]
    """The fault of each other call and the expected form, for the policy to read."""
    content: str
    """The text outside the calls, stripped."""


def call_of(call: Mapping[str, Any]) -> Call:
    """A call of OpenAI's form, `arguments` as an object or as its JSON text.

    Raises ValueError where it has no name, or arguments that are neither.
    """
    function = call.get("function", call)
    name, value = function.get("name"), function.get("arguments")
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except ValueError as error:
            raise ValueError(f"the arguments of a call of {name} are no JSON ({error})") from error
    value = {} if value is None else value
    if not isinstance(name, str) or not name or not isinstance(value, Mapping):
        raise ValueError(f"a call is {json.dumps(call)[:200]}; expected a function with a name and an object arguments")
    return Call(name, value)


def parse(text: str, tool_format: str, tools: Sequence[Schema]) -> Parsed:
    """The calls of a text in one of `FORMATS` but auto, checked against the tools.

    A call in the thoughts of a text (`<think>`, closed or not) is none.
    Raises ValueError for an unknown format and for a schema that is none, never for the text.
    """
    _check_format(tool_format, READERS)
    thoughts, answer = _split_thoughts(text)
    found, content = READERS[tool_format](answer)
    functions = {function["name"]: function for function in map(_function, tools)}
    calls: list[Call] = []
    errors: list[str] = []
    for number, one in enumerate(found, start=1):
        checked = f"Tool call {number} {one}." if isinstance(one, str) else _checked(one, functions)
        if isinstance(checked, Call):
            calls.append(checked)
        else:
            errors.append(checked)
    return Parsed(calls, errors, (thoughts + content).strip())


def render(calls: Sequence[Call], tool_format: str) -> str:
    """The text of calls, which `parse` reads back: for transcripts, and for templates that render no `tool_calls`.

    Raises ValueError for an unknown format.
    """
    _check_format(tool_format, READERS)
    if tool_format == "hermes":
        bodies = [_json({"name": call.name, "arguments": call.arguments}) for call in calls]
        return "\n".join(f"{OPEN}\n{body}\n{CLOSE}" for body in bodies)
    if tool_format == "llama":
        return "; ".join(_json({"name": call.name, "parameters": call.arguments}) for call in calls)
    return "\n".join(map(_gemma, calls))


def instructions(tools: Sequence[Schema], tool_format: str) -> str:
    """System text that tells a policy its tools and how to call them, for templates that render no tools.

    Raises ValueError for an unknown format and for a schema that is none.
    """
    example = render([Call("NAME", {"ARGUMENT": "VALUE"})], tool_format)
    lines = [_json({"type": "function", "function": dict(_function(tool))}) for tool in tools]
    described = "\n".join(lines)
    return (
        f"These are your tools, one JSON schema a line:\n<tools>\n{described}\n</tools>\n"
        f"To call a tool, write exactly this, with its name and its arguments, and end your turn:\n{example}\n"
        "You may make several calls in one turn. Their results follow in the next turn."
    )


def resolve(tool_format: str, chat_template: str | None) -> str:
    """The format that auto stands for under a chat template; another format stands for itself.

    Raises ValueError for an unknown format.
    """
    _check_format(tool_format, FORMATS)
    if tool_format != "auto":
        return tool_format
    return next((form for mark, form in _MARKS.items() if mark in (chat_template or "")), "hermes")


# What a template says of calls weighs more than its headers.
_MARKS = {
    OPEN: "hermes",
    PYTHON_TAG: "llama",
    START: "gemma",
    "<|start_header_id|>": "llama",
    "<start_of_turn>": "gemma",
}


def _check_format(tool_format: str, known: Collection[str]) -> None:
    if tool_format not in known:
        raise ValueError(f"tool format is {tool_format!r}; expected one of {', '.join(known)}")


# A text that begins with a call, and in which a call has not ended.
_UNFINISHED = re.compile(
    rf'\s*(?={OPEN}|{re.escape(PYTHON_TAG)}|{{"|{FENCE}|{START})'
    rf'.*(?:{{"(?!.*}}\s*(?:{CLOSE}|;|$))|{FENCE}(?!.*\n```)|{START}(?!.*{END}))',
    re.DOTALL,
)


def _split_thoughts(text: str) -> tuple[str, str]:
    """(thoughts, answer). Where the template opened the thoughts in its header, the text has only their end."""
    close = text.find("</think>")
    # An argument of a call may hold the tag.
    if close >= 0 and not _UNFINISHED.match(text, 0, close):
        close += len("</think>")
        return text[:close], text[close:]
    return (text, "") if text.lstrip().startswith("<think>") else ("", text)


def _function(tool: Schema) -> Mapping[str, Any]:
    """The function of a schema. Raises ValueError for one of another form."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"tool schema is {shown(str(tool), 200)}; "
            'expected {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
        )
    return function


def _checked(written: Written, functions: Mapping[str, Mapping[str, Any]]) -> Call | str:
    """Return the call, or its fault for the policy to read."""
    function = functions.get(written.name)
    if function is None:
        return f"There is no tool {shown(written.name)}. The tools are: {', '.join(functions) or 'none'}."
    parameters: Mapping[str, Any] = function.get("parameters") or {}
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    if len(written.positional) > len(properties):
        count = len(written.positional)
        return f"{written.name} got {count} arguments without a name, and has {len(properties)} parameters."
    named = dict(zip(properties, written.positional, strict=False))
    if twice := [name for name in named if name in written.arguments]:
        return f"{written.name} got the argument {', '.join(twice)} twice."
    arguments = named | written.arguments
    for name, raw in written.bare.items():
        if _of(properties.get(name)).get("type") == "string":
            arguments[name] = raw
    if fault := _fault(arguments, parameters, properties, written.name):
        return f"{written.name}: {fault}."
    return Call(written.name, json.loads(json.dumps(arguments)))


def _fault(
    arguments: Mapping[str, Any], parameters: Mapping[str, Any], properties: Mapping[str, Any], tool: str
) -> str | None:
    """The fault of the arguments, in words."""
    if missing := [name for name in parameters.get("required", ()) if name not in arguments]:
        return f"missing argument {', '.join(missing)}; parameters are {_signature(parameters, properties)}"
    # JSON Schema lets a schema that says nothing of other names take them; a function does not.
    closed = not parameters.get("additionalProperties") and not parameters.get("patternProperties")
    if closed and (unknown := [name for name in arguments if name not in properties]):
        return f"unknown argument {shown(', '.join(unknown))}; parameters are {_signature(parameters, properties)}"
    try:
        schemas.nodes_of(arguments)
    except ValueError:
        return f"an argument is nested too deeply; at most {schemas.DEEPEST} levels are read"
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        return "an argument is no JSON value; write numbers, strings, true, false, null, lists and objects"
    return _mismatch(arguments, parameters, tool)


def _mismatch(arguments: Mapping[str, Any], parameters: Mapping[str, Any], tool: str) -> str | None:
    """The first argument that its schema does not accept, in the order of the schema's paths."""
    from jsonschema.exceptions import SchemaError, UnknownType
    from referencing.exceptions import Unresolvable

    try:
        error = schemas.first_mismatch(dict(arguments), parameters)
    except (SchemaError, UnknownType, Unresolvable, ValueError) as error:
        raise ValueError(f"tool {tool}: its parameters are not a JSON schema ({str(error).splitlines()[0]})") from error
    except RecursionError:
        return "an argument is nested too deeply"
    except schemas.TooManySteps:
        return "the comparison of the arguments with the schema takes too long"
    if error is None:
        return None
    message = error.message
    where = error.json_path.removeprefix("$").removeprefix(".")
    said = message if len(message) <= 200 else message[:100] + " ... " + message[-100:]
    return f"argument {where}: {said}" if where else said


def _signature(parameters: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
    required = parameters.get("required", ())
    named = [f"{name} ({_of(schema).get('type', 'any')})" for name, schema in properties.items()]
    marked = [text if name in required else f"{text}, optional" for name, text in zip(properties, named, strict=True)]
    return "; ".join(marked) or "none"


def _of(schema: Any) -> Mapping[str, Any]:
    """A property's schema, which may also be a boolean."""
    return schema if isinstance(schema, Mapping) else {}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _gemma(call: Call) -> str:
    """A call as fenced Python; in FunctionGemma's form where its name is none of Python's."""
    if iskeyword(call.name) or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", call.name, re.ASCII):
        return f"{START}call:{call.name}{_json(call.arguments)}{END}"
    plain = {name for name in call.arguments if name.isidentifier() and name.isascii() and not iskeyword(name)}
    named = [f"{name}={value!r}" for name, value in call.arguments.items() if name in plain]
    others = {name: value for name, value in call.arguments.items() if name not in plain}
    written = ", ".join(named + ([f"**{others!r}"] if others else []))
    # A backtick of a string would close the fence.
    escaped = written.replace("`", "\\x60")
    return f"{FENCE}\n{call.name}({escaped})\n```"
