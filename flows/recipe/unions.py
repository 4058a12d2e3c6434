"""Mistakes in settings of several forms: one mistake for each, about the form that was evidently meant.

Pydantic tells of each form by itself, and puts names of types of its own into the place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Mistake = Mapping[str, Any]
"""One of pydantic's errors."""

_EXPECTED = "Input should be "
_WORDS = {"a valid array": "a list", "an object": "a mapping", "a valid dictionary": "a mapping"}
"""Words of JSON and Python, and YAML's words for them."""


def settled(mistakes: Iterable[Mistake], values: Any) -> list[Mistake]:
    """The mistakes in `values`, at places that a recipe has."""
    found: list[Mistake] = []
    forms: dict[tuple[Any, ...], list[Mistake]] = {}
    for mistake in mistakes:
        place, union = _place(mistake, values)
        told = _told({**mistake, "loc": place})
        if union is None:
            found.append(told)
            continue
        if union not in forms:
            # Where the first of them was told of.
            found.append({"union": union})
        forms.setdefault(union, []).append(told)
    all_of_them = [m for entry in found for m in (_meant(forms[entry["union"]]) if "union" in entry else [entry])]
    said = [m for m in all_of_them if _is_written(m["loc"], values)]
    # What a section takes over from another is told of where it was written.
    return [m for m in all_of_them if m in said or not any(_is_same(m, one) for one in said)]


def _is_written(place: Iterable[Any], values: Any) -> bool:
    for part in place:
        if not (
            part in values if isinstance(values, dict) else isinstance(values, list) and part in range(len(values))
        ):
            return False
        values = values[part]
    return True


def _is_same(one: Mistake, other: Mistake) -> bool:
    """Whether two settings of one name have the same mistake."""
    return all(one.get(k) == other.get(k) for k in ("msg", "input")) and one["loc"][-1:] == other["loc"][-1:]


def _place(mistake: Mistake, values: Any) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
    """The place of a mistake without names of forms, and the setting of several forms; None where there is none."""
    place: list[Any] = []
    union: tuple[Any, ...] | None = None
    parts = mistake["loc"]
    for number, part in enumerate(parts):
        inside = isinstance(values, dict) and part in values
        inside = inside or (isinstance(values, list) and isinstance(part, int) and part < len(values))
        if inside:
            values = values[part]
        elif part != "[key]" and not (mistake["type"] == "missing" and number == len(parts) - 1):
            union = union or tuple(place)
            continue
        place.append(part)
    # A section that the recipe leaves out has its defaults: its own names are in no value.
    return (tuple(place), union) if union is not None and _is_form(parts, union) else (parts, None)


def _is_form(parts: tuple[Any, ...], union: tuple[Any, ...]) -> bool:
    """Whether the part after a place is the name of a type, not a field."""
    name = str(parts[len(union)])
    return name in ("str", "int", "float", "bool") or not name.isidentifier() or name[:1].isupper()


def _told(mistake: Mistake) -> Mistake:
    """The mistake in words of YAML; one in a key is about the mapping that has it."""
    message = mistake["msg"]
    for word, plain in _WORDS.items():
        message = message.replace(word, plain)
    place = mistake["loc"]
    if place[-1:] == ("[key]",):
        message = message.replace(_EXPECTED, "unknown key; expected ")
        return {**mistake, "loc": place[:-1], "msg": message, "type": "key", "input": {}}
    return {**mistake, "msg": message}


def _meant(told: list[Mistake]) -> list[Mistake]:
    """Of the mistakes of one setting, one for each form, those of the form that was meant; else one of all forms."""
    shortest = min(len(m["loc"]) for m in told)
    deeper = {m["loc"]: m for m in reversed(told) if len(m["loc"]) > shortest}
    if deeper:
        return list(reversed(deeper.values()))
    wanted = [m["msg"].removeprefix(_EXPECTED) for m in told]
    # A number that is out of its bounds has the right form.
    bounded = [m for m in told if not m["type"].endswith(("_type", "_parsing", "literal_error"))]
    return bounded[:1] or [{**told[0], "msg": _EXPECTED + " or ".join(dict.fromkeys(wanted))}]
