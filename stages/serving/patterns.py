"""Regular expressions that clients send in the schemas of tools: those whose search may not end are refused.

Answers are compared with them while the interpreter's lock is held, so one that does not end stops everybody.
"""

from __future__ import annotations

import math
import re
import re._constants as codes  # type: ignore[import-untyped, import-not-found, unused-ignore]
import re._parser as parser  # type: ignore[import-untyped, import-not-found, unused-ignore]
from collections.abc import Mapping
from typing import Any

LONGEST = 512
"""Characters of a pattern."""
TEXT = 4096
"""Characters of a text that is compared, in the count of steps."""
MOST_STEPS = 2.0**26
"""About a second of Python's engine."""
DEEPEST = 32
"""Levels of a schema, for whatever walks over it."""
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)


def check_schema(schema: Any, depth: int = 0) -> None:
    """Raises ValueError for a schema that is too deep, or has a pattern that may not end."""
    if depth > DEEPEST:
        raise ValueError(f"the schema is deeper than {DEEPEST} levels")
    if isinstance(schema, list):
        for one in schema:
            check_schema(one, depth + 1)
    if not isinstance(schema, Mapping):
        return
    if isinstance(schema.get("pattern"), str):
        check_pattern(schema["pattern"])
    if isinstance(properties := schema.get("patternProperties"), Mapping):
        for pattern in properties:
            check_pattern(pattern)
    for one in schema.values():
        check_schema(one, depth + 1)


def check_pattern(pattern: str) -> None:
    """Raises ValueError for a pattern that is none, or whose search may try too many ways."""
    if len(pattern) > LONGEST:
        raise ValueError(f"a pattern of {len(pattern)} characters is not offered; {LONGEST} at most")
    try:
        parsed = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression ({error})") from error
    starts = 0.0 if list(parsed)[:1] == [(codes.AT, codes.AT_BEGINNING)] else math.log2(TEXT)
    if starts + _ways(parsed) > math.log2(MOST_STEPS):
        raise ValueError(
            f"the pattern {pattern!r} may take too long: begin it with ^, and let few parts repeat, none within another"
        )


def _ways(parsed: Any) -> float:
    """Logarithm (base 2) of the ways in which a pattern can fit a text: a bound on what a search tries."""
    total = 0.0
    for op, argument in parsed:
        if op in _REPEATS:
            least, most = argument[0], min(int(argument[1]), TEXT)
            total += math.log2(max(1, most - least + 1)) + most * _ways(argument[2])
        elif op is codes.BRANCH:
            total += math.log2(sum(2.0 ** min(_ways(one), 100.0) for one in argument[1]))
        else:
            total += sum(_ways(one) for one in _inner(argument))
    return total


def _inner(argument: Any) -> list[Any]:
    """Patterns within an operation, such as a group or a look ahead."""
    parts = argument if isinstance(argument, list | tuple) else [argument]
    return [part for part in parts if isinstance(part, parser.SubPattern)]
