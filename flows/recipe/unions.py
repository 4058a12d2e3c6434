"""Validation errors of settings that have several forms, as errors about the form that the user meant.

Pydantic reports each form separately, and puts names of types into the place of an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Mistake = Mapping[str, Any]
"""One of pydantic's errors."""
Place = tuple[Any, ...]

_EXPECTED = "Input should be "


def settled(mistakes: Iterable[Mistake], values: Any) -> list[Mistake]:
    """Return the mistakes in `values` at places that a recipe has, those of one setting's forms as one."""
    groups: dict[Any, list[Mistake]] = {}
    for number, mistake in enumerate(mistakes):
        place, union = _place(mistake, values)
        groups.setdefault(number if union is None else union, []).append(_in_yaml({**mistake, "loc": place}))
    return [m for key, group in groups.items() for m in (group if isinstance(key, int) else _of_meant_form(group))]


def _is_in(part: Any, values: Any) -> bool:
    return part in values if isinstance(values, dict) else isinstance(values, list) and part in range(len(values))


def _place(mistake: Mistake, values: Any) -> tuple[Place, Place | None]:
    """Return the place of a mistake without names of forms, and the setting that has several forms, or None."""
    place: list[Any] = []
    union: Place | None = None
    parts = mistake["loc"]
    for number, part in enumerate(parts):
        if _is_in(part, values):
            values = values[part]
        elif part != "[key]" and not (mistake["type"] == "missing" and number == len(parts) - 1):
            union = union or tuple(place)
            continue
        place.append(part)
    if union is None:
        return parts, None
    # A section that the recipe leaves out has its defaults, whose names are not in the values either.
    name = str(parts[len(union)])
    is_form = name in ("str", "int", "float", "bool") or not name.isidentifier() or name[:1].isupper()
    return (tuple(place), union) if is_form else (parts, None)


def _in_yaml(mistake: Mistake) -> Mistake:
    """Return a mistake in words of YAML; a mistake in a key becomes that of the mapping."""
    message, place = mistake["msg"], mistake["loc"]
    for word, plain in {"a valid array": "a list", "an object": "a mapping", "a valid dictionary": "a mapping"}.items():
        message = message.replace(word, plain)
    if place[-1:] == ("[key]",):
        message = message.replace(_EXPECTED, "unknown key; expected ")
        return {**mistake, "loc": place[:-1], "msg": message, "type": "key", "input": {}}
    return {**mistake, "msg": message}


def _of_meant_form(mistakes: list[Mistake]) -> list[Mistake]:
    """Return the mistakes of the form that was meant, of one or more mistakes for each form; else one for all forms."""
    shortest = min(len(m["loc"]) for m in mistakes)
    if deeper := {m["loc"]: m for m in reversed(mistakes) if len(m["loc"]) > shortest}:
        return list(reversed(deeper.values()))
    expected = dict.fromkeys(m["msg"].removeprefix(_EXPECTED) for m in mistakes)
    # A number out of its bounds has the right form.
    bounded = [m for m in mistakes if not m["type"].endswith(("_type", "_parsing", "literal_error"))]
    return bounded[:1] or [{**mistakes[0], "msg": _EXPECTED + " or ".join(expected)}]
