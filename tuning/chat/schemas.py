"""JSON schemas of tools, and the comparison of a call's arguments with one, in bounded time.

The draft is 2020-12, whatever `$schema` names. RE2 (in pyarrow) runs patterns, in time linear in the text; it has
neither lookaround nor back references. A schema of a client may be small and take exponential time, by references or
alternatives: a comparison counts its steps and gives up.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

MOST_BYTES = 16 * 1024
"""Of a client's schema, as JSON."""
MOST_NODES = 500
"""Objects, lists and elements of lists in it."""
DEEPEST = 32
"""Levels of objects and lists in it."""
MOST_STEPS = 30_000
"""Of a comparison: keywords, with the sizes of the compared values. About a second."""
MOST_PATTERN_STEPS = 1000
"""Of a search, for which the pattern is compiled: RE2 repeats a part up to a thousand times."""

_UNEVALUATED = {"unevaluatedProperties", "unevaluatedItems"}

_left: contextvars.ContextVar[list[int]] = contextvars.ContextVar("left")


class TooManySteps(Exception):
    """A comparison that was given up."""


def nodes_of(value: Any, depth: int = 0) -> list[Any]:
    """Return the objects, lists and elements of a schema. Raises ValueError if it is too deep."""
    if depth > DEEPEST:
        raise ValueError(f"the schema is deeper than {DEEPEST} levels")
    below = value if isinstance(value, list) else []
    if isinstance(value, Mapping):
        below = [one for one in value.values() if isinstance(one, Mapping | list)]
    return [value, *(node for one in below for node in nodes_of(one, depth + 1))]


def check(schema: Any) -> None:
    """Check a client's schema. Raises ValueError if it is large, not a schema, or has a pattern that RE2 cannot run."""
    if isinstance(schema, Mapping):
        # Before anything else reads it.
        if (count := len(nodes_of(schema))) > MOST_NODES:
            raise ValueError(f"the schema has {count} objects, lists and elements; at most {MOST_NODES} are supported")
        text = json.dumps(schema, sort_keys=True)
        if len(text) > MOST_BYTES:
            raise ValueError(f"the schema has {len(text)} bytes; at most {MOST_BYTES} are supported")
        _check_text(text)


@functools.lru_cache(1024)
def _check_text(text: str) -> None:
    """Check a schema against the draft. Agents send the same tools with each request."""
    from jsonschema import Draft202012Validator, FormatChecker, SchemaError

    root, *others = nodes_of(json.loads(text))
    if any(isinstance(node, dict) and isinstance(node.get("$schema"), str) for node in others):
        raise ValueError("$schema is supported at the root alone")
    try:
        # Without formats, of which one is a pattern of Python.
        Draft202012Validator.check_schema(root, FormatChecker(()))
    except SchemaError as error:
        raise ValueError(f"not a JSON schema (draft 2020-12): {error.message}") from error
    for node in (node for node in (root, *others) if isinstance(node, dict)):
        named = node.get("patternProperties")
        for pattern in [*(named if isinstance(named, dict) else ()), node.get("pattern")]:
            if isinstance(pattern, str):
                _found(pattern, "")
        # jsonschema follows these by rules of its own, uncounted and with Python's patterns.
        if found := _UNEVALUATED & node.keys():
            raise ValueError(f"{min(found)} is not supported: use additionalProperties or items")


def first_mismatch(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return the first error of jsonschema in the order of the schema's paths; None if the schema accepts the value.

    Raises jsonschema's errors and ValueError for a schema that is not one, TooManySteps, and RecursionError.
    """
    from referencing import Registry

    _left.set([MOST_STEPS])
    # Another default would fetch a schema's remote references.
    validator = _counted()({k: v for k, v in schema.items() if k != "$schema"}, registry=Registry())
    return min(validator.iter_errors(value), key=lambda error: (error.json_path, error.message), default=None)


@functools.cache
def _counted() -> Any:
    """The validator of draft 2020-12, with RE2, that counts its steps."""
    from jsonschema.validators import Draft202012Validator, extend

    own = {"pattern": _pattern, "patternProperties": _pattern_properties, "additionalProperties": _additional}
    rules = {n: r for n, r in (Draft202012Validator.VALIDATORS | own).items() if n not in _UNEVALUATED}
    return extend(Draft202012Validator, {name: _counts(name, rule) for name, rule in rules.items()})


def _counts(name: str, rule: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        size = _size(instance)
        # It compares each element with each.
        _spend(1 + _size(value) + (size * size // 16 if name == "uniqueItems" else size))
        yield from rule(validator, value, instance, schema) or ()

    return counted


def _size(value: Any) -> int:
    """Of a text by its repr, which each error holds."""
    return len(value) // 1024 if isinstance(value, str) else len(value) if isinstance(value, Mapping | list) else 0


def _spend(steps: int) -> None:
    left = _left.get()
    left[0] -= steps
    if left[0] < 0:
        raise TooManySteps


def _found(pattern: str, text: str) -> bool:
    """Whether RE2 finds the pattern in the text. Raises ValueError for a pattern that it cannot run."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return bool(pc.match_substring_regex(pa.scalar(text, pa.string()), pattern).as_py())
    except pa.ArrowInvalid as error:
        cause = str(error).partition(": ")[2] or str(error)
        raise ValueError(f"RE2 cannot run the pattern {pattern!r} ({cause}): write it without that") from error


def _matched(patterns: Iterable[str], texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(pattern, text that it fits)."""
    for pattern, text in itertools.product(patterns, texts):
        _spend(20 + len(text) // 64 + min(MOST_PATTERN_STEPS, math.prod(map(int, re.findall(r"(\d+)\}", pattern)))))
        if _found(pattern, text):
            yield pattern, text


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and not any(_matched([pattern], [instance])):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _names(instance: Any) -> Iterable[str]:
    return instance if isinstance(instance, Mapping) else ()


def _pattern_properties(validator: Any, schemas: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    for pattern, name in _matched(schemas, _names(instance)):
        yield from validator.descend(instance[name], schemas[pattern], path=name, schema_path=pattern)


def _additional(validator: Any, wanted: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    from jsonschema import Draft202012Validator

    matched = _matched(schema.get("patternProperties", {}), _names(instance))
    named = {**schema.get("properties", {}), **{name: True for _, name in matched}}
    rule = Draft202012Validator.VALIDATORS["additionalProperties"]
    yield from rule(validator, wanted, instance, {"properties": named}) or ()
