"""Readers of tool calls in a text, before they are compared with the tools' schemas.

    hermes   <tool_call>                                            Qwen 2.5 and 3, Hermes, SmolLM3
             {"name": "add", "arguments": {"a": 1}}
             </tool_call>
    llama    {"name": "add", "parameters": {"a": 1}}; {...}         Llama 3.1 and later, also after <|python_tag|>
    gemma    <start_function_call>call:add{a:1}<end_function_call>  FunctionGemma; text is <escape>text<escape>
             ```tool_code                                           Gemma 3
             add(a=1)
             ```

Completions are decoded without control tokens. `<|python_tag|>` and FunctionGemma's tags are control tokens of their
families, so calls are found without them too.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from rlhf.tuning.python_syntax import parse

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
START, END, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
FENCE = "```tool_code"

_QUOTED = r'"(?:[^"\\]|\\.)*"'


@dataclasses.dataclass(frozen=True)
class Written:
    """A call as it was written."""

    name: str
    arguments: dict[str, Any]
    positional: tuple[Any, ...] = ()
    """Values without a name, of a Python call."""
    bare: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Text of values that had no quotes where the form allows that: a number, unless the tool asks for text."""


Found = list[Written | str]
"""Calls, and the fault of each unreadable one, in the order of the text."""
Reader = Callable[[str], tuple[Found, str]]
"""text -> calls and faults, and the remaining content."""


def _scanned(
    text: str, opening: re.Pattern[str], read: Callable[[str, re.Match[str]], tuple[Found, int]]
) -> tuple[Found, str]:
    """The calls that `read` finds at each opening, and the text between; it returns where the text goes on."""
    found: Found = []
    content: list[str] = []
    position = 0
    while start := opening.search(text, position):
        content.append(text[position : start.start()])
        some, position = read(text, start)
        found += some
    return found, "".join([*content, text[position:]])


def hermes(text: str) -> tuple[Found, str]:
    """JSON objects in `<tool_call>` tags."""
    return _scanned(text, re.compile(OPEN), _tagged)


def _tagged(text: str, start: re.Match[str]) -> tuple[Found, int]:
    """The call after its tag."""
    form = '{"name": ..., "arguments": {...}}'
    try:
        value, end = _json(text, start.end())
    except ValueError as error:
        fault, end = f"is not valid JSON ({error}); expected {form}", start.end()
    else:
        if closed := re.compile(rf"\s*{CLOSE}").match(text, end):
            return [_call(value, ("arguments",), form)], closed.end()
        fault = f"has text after its JSON object; expected {CLOSE} there"
    close, following = text.find(CLOSE, end), text.find(OPEN, end)
    if close < 0 or 0 <= following < close:
        return [f"has no closing {CLOSE}"], following if following >= 0 else len(text)
    return [fault], close + len(CLOSE)


def llama(text: str) -> tuple[Found, str]:
    """JSON objects after `<|python_tag|>`, or at the beginning of the text; more than one with `;` between them."""
    before, tag, calls = text.partition(PYTHON_TAG)
    if not tag:
        before, calls = "", text
        # An answer may be JSON as well; it is a call where it has a name.
        if not re.match(r"\s*\{\s*\"(type|name|parameters|arguments)\"", calls):
            return [], text
    form = '{"name": ..., "parameters": {...}}'
    found: Found = []
    position = 0
    while True:
        try:
            value, position = _json(calls, position)
        except ValueError as error:
            return [*found, f"is not valid JSON ({error}); expected {form}"], before
        found.append(_call(value, ("parameters", "arguments"), form))
        behind = re.compile(r"\s*;?\s*(?=\{)").match(calls, position)
        if not behind:
            return found, before + calls[position:].removeprefix(";")
        position = behind.end()


def gemma(text: str) -> tuple[Found, str]:
    """FunctionGemma's `call:name{...}`, with or without its tags, and Gemma 3's fenced Python."""

    def read(text: str, start: re.Match[str]) -> tuple[Found, int]:
        return _fenced(text, start) if start.group() == FENCE else _braced(text, start)

    found, content = _scanned(text, _GEMMA, read)
    return found, content.replace("<start_function_response>", "")


def _fenced(text: str, start: re.Match[str]) -> tuple[Found, int]:
    """The Python calls of a fence: a call a line, as it stands or in `print`."""
    close = text.find("```", start.end())
    if close < 0:
        return ["has no closing ``` after its ```tool_code"], len(text)
    end = close + len("```")
    form = "expected calls such as name(argument=1), a line each"
    try:
        # An unknown escape in a string of the policy's is no matter of ours.
        with warnings.catch_warnings(action="ignore"):
            lines = parse(text[start.end() : close].strip()).body
        return [_python(line) for line in lines] or [f"is empty; {form}"], end
    except SyntaxError as error:
        return [f"is not valid Python ({error.msg}); {form}"], end
    except (ValueError, RecursionError, MemoryError) as error:
        return [f"is not valid Python ({error}); {form}"], end


def _python(line: ast.stmt) -> Written | str:
    call = line.value if isinstance(line, ast.Expr) else None
    inner = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "print" and isinstance(inner, ast.Call):
        call = inner
    if not isinstance(call, ast.Call):
        return "is no function call; expected a line such as name(argument=1)"
    name = ast.unparse(call.func)
    arguments: dict[str, Any] = {}
    try:
        positional = tuple(ast.literal_eval(value) for value in call.args)
        for keyword in call.keywords:
            value = ast.literal_eval(keyword.value)
            named = value if keyword.arg is None else {keyword.arg: value}
            if not isinstance(named, dict) or not all(isinstance(one, str) for one in named):
                raise TypeError("** stands before a dictionary with names")
            arguments |= named
    except (ValueError, TypeError):
        return f"of {shown(name)} has an argument that is no literal; write numbers, strings, lists and dictionaries"
    return Written(name, arguments, positional)


_GEMMA = re.compile(rf"{FENCE}|{START}|(?<![\w:])(?=call:[\w.-]+\{{)")
_HEAD = re.compile(r"\s*call:\s*([\w.-]+)\s*(?=\{)")
_SCAN = re.compile(rf"{ESCAPE}.*?{ESCAPE}|{_QUOTED}|[{{}}]", re.DOTALL)
_PIECE = re.compile(
    rf"""
    {ESCAPE}(?P<text>.*?){ESCAPE} | {_QUOTED}
    | (?<=[{{,])\s*(?P<key>[^\s<:,{{}}\[\]"][^\s:,{{}}\[\]"]*)\s*(?=:)
    | (?<=[:,\[])(?!\s*{ESCAPE})\s*(?P<bare>[^\s"{{}}\[\],](?:[^{{}}\[\],]*[^\s{{}}\[\],])?)
    """,
    re.DOTALL | re.VERBOSE,
)


def _braced(text: str, start: re.Match[str]) -> tuple[Found, int]:
    """FunctionGemma's call after `start`, which is its opening tag where it has one: JSON with other quotes."""
    form = f"expected call:name{{argument:1,text:{ESCAPE}a{ESCAPE}}}"
    close = text.find(END, start.end())
    unread = close + len(END) if close >= 0 else len(text)
    head = _HEAD.match(text, start.end())
    end = _end(text, head.end()) if head else None
    if not head or not end:
        return [f"cannot be read; {form}"], unread
    try:
        values, texts = (_json(_PIECE.sub(write, text[head.end() : end]), 0)[0] for write in (_value, _text))
    except ValueError as error:
        return [f"of {shown(head[1])} cannot be read ({error}); {form}"], unread
    closed = re.compile(rf"\s*{END}").match(text, end)
    if start.group() and not closed:
        return [f"of {shown(head[1])} has no closing {END}"], end
    bare = {name: value for name, value in texts.items() if isinstance(value, str)}
    return [Written(head[1], values, bare=bare)], closed.end() if closed else end


def _end(text: str, start: int) -> int | None:
    """The end of the braces that open at `start`; None where they do not close."""
    depth = 0
    for piece in _SCAN.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(piece.group(), 0)
        if not depth:
            return piece.end()
    return None


def _text(piece: re.Match[str]) -> str:
    """A piece as JSON, where a value without quotes is text."""
    return json.dumps(piece[piece.lastgroup]) if piece.lastgroup else piece.group()


def _value(piece: re.Match[str]) -> str:
    """A piece as JSON, where a value without quotes is a number, true, false or null if it can be."""
    with contextlib.suppress(ValueError):
        if (bare := piece["bare"]) and _json(bare, 0)[1] == len(bare):
            return str(bare)
    return _text(piece)


def _call(value: Any, keys: tuple[str, ...], form: str) -> Written | str:
    """A JSON value as a call, whose arguments are below one of `keys`."""
    if not isinstance(value, dict):
        return f"is {_kind(value)}; expected {form}"
    name = value.get("name")
    if not isinstance(name, str):
        return f"has no name; expected {form}"
    below = [key for key in keys if key in value]
    known = {"name", *keys} | ({"type"} if "parameters" in keys else set())
    if len(below) > 1 or not set(value) <= known:
        return f"of {shown(name)} has the keys {shown(', '.join(value))}; expected {form}"
    arguments = value[below[0]] if below else {}
    if not isinstance(arguments, dict):
        return f"of {shown(name)} has {_kind(arguments)} as {below[0]}; expected an object, {form}"
    return Written(name, arguments)


def _json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start`, whitespace before it skipped, and its end. Raises ValueError alone."""
    blank = re.compile(r"[ \t\r\n]*").match(text, start)
    try:
        return _DECODER.raw_decode(text, blank.end() if blank else start)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{shown(digits)} is too large a number")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"{shown(twice)} is there twice")
    return value


# What Python reads beyond JSON is refused, since tools and tables could not hold it.
_DECODER = json.JSONDecoder(parse_constant=_constant, parse_float=_finite, object_pairs_hook=_object)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def shown(text: str, most: int = 80) -> str:
    """A text of the policy's in an error: quoted, and cut where it is long."""
    return repr(text if len(text) <= most else text[:most] + "...")


READERS: Mapping[str, Reader] = {"hermes": hermes, "llama": llama, "gemma": gemma}
