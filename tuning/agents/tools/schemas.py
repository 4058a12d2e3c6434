"""The schema of a function for chat templates, from its type hints and its docstring in Google's style.

It equals transformers' `get_json_schema`, which TRL's users know (a test compares the two); that function imports torch
if it is installed, and each process of episodes would hold it. Types are pydantic's.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any

from pydantic import PydanticUserError, TypeAdapter

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):[ \t]*$", re.MULTILINE)
_NAME = r"(\w+)(?:[ \t]*\([^)\n]*\))?:"
_ARGUMENT = re.compile(rf"^{_NAME}(.*(?:\n(?!{_NAME}).*)*)", re.MULTILINE)
_CHOICES = re.compile(r"\(choices:\s*(\[.*\])\)\s*$")


def schema_of(function: Callable[..., Any], hidden: Sequence[str] = ()) -> dict[str, Any]:
    """The schema of a function without its `hidden` parameters. Raises ValueError where hints or docstring lack."""
    name = getattr(function, "__name__", str(function))
    description, told, returned = documented(inspect.getdoc(function) or "")
    if not description:
        raise ValueError(f"tool {name}: no docstring: expected one that says what it does")
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ValueError(f"tool {name}: {error}: expected type hints that its module can resolve") from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in hidden or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for given, what in ((hints, "a type hint"), (told, f"a line `{parameter.name}: what it is` below `Args:`")):
            if parameter.name not in given:
                raise ValueError(f"tool {name}: parameter {parameter.name}: expected {what}")
        properties[parameter.name] = _with_text(type_of(hints[parameter.name], name), told[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    found = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints:
        found["return"] = type_of(hints["return"], name) | ({"description": returned} if returned else {})
    return {"type": "function", "function": found}


def documented(text: str) -> tuple[str, dict[str, str], str]:
    """Description, parameters and result of a docstring in Google's style."""
    pieces = _SECTION.split(text)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    block = textwrap.dedent(next((sections[s] for s in ("Args", "Arguments", "Parameters") if s in sections), ""))
    # A line without a name belongs to the parameter before it.
    told = {found[1]: re.sub(r"\s*\n\s*", " ", found[2].strip()) for found in _ARGUMENT.finditer(block)}
    returned = sections.get("Returns", sections.get("Return", ""))
    return pieces[0].strip(), told, " ".join(re.sub(r"^\s*[\w\[\], |]+:\s", "", returned).split())


def type_of(hint: Any, name: str = "") -> dict[str, Any]:
    """A type as JSON schema. Raises ValueError for a type that JSON does not have."""
    if hint is NoneType or hint is None:
        return {"type": "null"}
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else ()
    if NoneType in kinds:
        others = [kind for kind in kinds if kind is not NoneType]
        return {**type_of(typing.Union[tuple(others)], name), "nullable": True}  # noqa: UP007
    try:
        schema = TypeAdapter(hint).json_schema()
        return _plain(schema, schema.pop("$defs", {}))
    except (PydanticUserError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"tool {name}: type {hint}: expected one that JSON has") from error


def _plain(schema: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema as chat templates show it: the type first, without titles, references and unconstrained parts.

    named: the schemas that references name. Raises RecursionError for a type that has itself as a part.
    """
    if "$ref" in schema:
        schema = {**named[schema["$ref"].rpartition("/")[2]], **{k: v for k, v in schema.items() if k != "$ref"}}
    order = ("type", "items", "properties", "additionalProperties", "enum", "anyOf")
    found = {key: schema[key] for key in (*order, *sorted(set(schema) - set(order))) if key in schema}
    for key in ("title", "default", "discriminator"):
        found.pop(key, None)
    if found.get("additionalProperties") is True:
        del found["additionalProperties"]
    if found.get("items") == {}:
        del found["items"]
    for key, value in found.items():
        if key == "properties":
            found[key] = {name: _plain(one, named) for name, one in value.items()}
        elif isinstance(value, Mapping):
            found[key] = _plain(value, named)
        elif isinstance(value, list):
            found[key] = [_plain(one, named) if isinstance(one, Mapping) else one for one in value]
    return found


def _with_text(schema: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the schema of a parameter with its docstring and the choices in it, as transformers reads them."""
    if choices := _CHOICES.search(text):
        schema = {**schema, "enum": [str(choice).strip() for choice in json.loads(choices[1])]}
        text = text[: choices.start()].strip()
    return {**schema, "description": text}
