"""Recipes: one YAML file describes a run. An unknown key is an error that names file, line and the nearest key."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rlhf.flows.recipe.field_paths import hint, lines_of, merge, takes, whole
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.secrets import secrets_in
from rlhf.flows.recipe.text import COMMENT, DEEPEST, Unusable, in_comment, parsed, read_text, short
from rlhf.flows.recipe.unions import settled
from rlhf.tuning.allowed import NotAllowed, check_file

RECIPES = Path(__file__).parents[1] / "recipes"
LONGEST_NAME = 4096
LONGEST_PART = 256
"""Characters of a recipe's name or path, and of a part of a place."""


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path, or a name among the built-in ones. Raises RecipeError where there is none."""
    if len(name) > LONGEST_NAME or "\0" in name:
        raise RecipeError(f"no recipe {short(name)!r}; give a name or a path")
    path = Path(name)
    # A name with this suffix is a path, also where there is no such file: the error is about the file then.
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise RecipeError(f"recipe file {name} does not exist")
        try:
            check_file(path)
        except NotAllowed as e:
            raise RecipeError(str(e)) from e
        return path
    built_in = RECIPES / f"{name}.yaml"
    # A name, and no path to a file elsewhere.
    if path.name == name and built_in.is_file():
        return built_in
    names = sorted(p.stem for p in RECIPES.glob("*.yaml"))
    beside = [Path(f"{name}{suffix}") for suffix in (".yaml", ".yml")]
    near = [str(file) for file in beside if file.is_file()] or difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise RecipeError(f"no recipe {name!r}; built in are {', '.join(names)}{hint}")


def load_recipe(name: str, overrides: dict[str, Any] | None = None, sets: list[str] | None = None) -> Recipe:
    """Reads a recipe; `overrides` are merged in, `sets` are `a.b=value` with the value in YAML.

    Raises RecipeError with file, line and field.
    """
    path = find_recipe(name)
    node, values = _read(path)
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, found {type(values).__name__}")
    # A recipe without a name has that of its file.
    values.setdefault("name", path.stem)
    unset = merge(values, overrides or {})
    values, set_places = with_sets(unset, sets or [])
    return checked(values, path, node, set_places, unset)


def with_sets(values: dict[str, Any], sets: list[str]) -> tuple[dict[str, Any], set[str]]:
    """The values with each `a.b=value` merged in, and the dotted places that were set. Raises RecipeError."""
    set_places: set[str] = set()
    for item in sets:
        place, equals, value = item.partition("=")
        if not equals or not place:
            raise RecipeError(f"--set {item}: expected a.b=value")
        item = short(item)
        parts = place.split(".")
        if not place.isprintable() or "" in parts or len(parts) > DEEPEST or max(map(len, parts)) > LONGEST_PART:
            raise RecipeError(f"--set {item}: {short(place)!r} is no place; expected names with dots between them")
        set_places.add(place)
        try:
            _, given = parsed(value)
        except Unusable as e:
            raise RecipeError(f"--set {item}: the value cannot be read: {e}") from e
        _check_items(values, place, item)
        values = merge(values, _nested(parts, given))
    return values, set_places


def _read(path: Path) -> tuple[yaml.Node | None, Any]:
    """(nodes, values) of a file. Raises RecipeError."""
    try:
        node, values = parsed(read_text(path))
    except Unusable as e:
        raise RecipeError(f"{path}{'' if e.line is None else f':{e.line}'}: {e}") from e
    except OSError as e:
        raise RecipeError(f"{path} cannot be read: {e.strerror}") from e
    if values is None:
        raise RecipeError(f"{path}: the file holds no settings; `name: {path.stem}` alone takes all defaults")
    return node, values


def _check_items(values: Any, place: str, item: str) -> None:
    """Raises RecipeError where a part of `place` is to be an item of a list that has none of that number."""
    parts = place.split(".")
    for number, name in enumerate(parts):
        if isinstance(values, list) and not (name.isdecimal() and int(name) < len(values)):
            above = ".".join(parts[:number])
            numbers = f"a number from 0 to {len(values) - 1} for {name!r}, or " if values else ""
            of_all = f"--set {above}=[...]"
            raise RecipeError(f"--set {item}: {above} is a list of {len(values)}: expected {numbers}{of_all}")
        if isinstance(values, list):
            values = values[int(name)]
        else:
            values = values.get(name) if isinstance(values, dict) else None


def added(name: str, sets: list[str]) -> list[str]:
    """A line for each section that a recipe's file says is null and an option `--set` of one of its fields adds."""
    path = find_recipe(name)
    _, values = _read(path)
    null = {n for n, value in values.items() if value is None}
    lines: dict[str, str] = {}
    for place in (item.partition("=")[0] for item in sets):
        section, dot, _ = place.partition(".")
        if not dot:
            # Said outright, whatever it is.
            null.discard(section)
        elif section in null:
            lines.setdefault(section, f"--set {place} adds the section {section}, which is null in {path}")
    return list(lines.values())


def checked(
    values: dict[str, Any],
    path: Path,
    node: yaml.Node | None,
    set_places: set[str],
    unset: dict[str, Any] | None = None,
) -> Recipe:
    """Validates a recipe's values. Raises RecipeError with the line of each mistake.

    path: the recipe's file. node: its parsed YAML, which knows the lines; None where there is no file.
    set_places: dotted places that `--set` gave. unset: the values without them, whose mistakes are the file's.
    """
    for place in secrets_in(values):
        raise RecipeError(
            f"{path}: {place} looks like a secret, and records of runs hold a recipe's values: name an environment "
            "variable in capitals (key_variable of a judge), or give it to a server by engine.environment"
        )
    try:
        # Through JSON: strict JSON input may give lists and floats as YAML writes them.
        return Recipe.model_validate_json(json.dumps(values))
    except ValidationError as e:
        old = _mistakes(unset) if set_places and unset is not None else set()
        lines = [
            _explain(path, node, set() if _mistake(m) in old else set_places, m) for m in settled(e.errors(), values)
        ]
        raise RecipeError("\n".join(lines)) from e
    except TypeError as e:
        raise RecipeError(f"{path}: {e}") from e


def _mistakes(values: dict[str, Any]) -> set[tuple[Any, str]]:
    """Place and message of each mistake in a recipe's values."""
    try:
        Recipe.model_validate_json(json.dumps(values))
    except ValidationError as e:
        return {_mistake(error) for error in settled(e.errors(), values)}
    except TypeError:
        pass
    return set()


def _mistake(error: Any) -> tuple[Any, str]:
    return error["loc"], error["msg"]


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


def _explain(path: Path, node: Any, set_places: set[str], error: Any) -> str:
    """One of pydantic's errors in a sentence that begins with file and line, or with the option `--set`."""
    place = [str(p) for p in error["loc"]]
    dotted = ".".join(place)
    lines = lines_of(node, place)
    # An error is at the place written whole, an option may be written short.
    given = {".".join(whole(t.split("."))): t for t in sorted(set_places)}
    # `--set a.b=1` may be wrong at `a` (no such section) or at `a.b.c` (it gave a mapping).
    above = next((t for t in given if (dotted + ".").startswith(t + ".")), None)
    below = [written for t, written in given.items() if (t + ".").startswith(dotted + ".") and t != dotted]
    # A mistake between the fields of a section is told of the section: what was set there last is the likelier cause.
    section = error["type"] in ("value_error", "assertion_error")
    if above is not None:
        where = f"--set {given[above]}{dotted[len(above) :]}"
    elif dotted and below and not section and len(lines) < len(place):
        where = f"--set {dotted}"
    elif below and section:
        where = f"--set {', '.join(below)}"
        where += f": {dotted}" if dotted else ""
    elif dotted and below and not section:
        where = f"--set {', '.join(below)}: {dotted}"
    elif not dotted and set_places:
        where = f"--set {', '.join(_meant(error['msg'], set_places))}"
    elif set_places and len(lines) < len(place):
        # What a section takes over from another that was set.
        where = f"--set {', '.join(sorted(set_places))}: {dotted}"
    else:
        # Settings of a run's record have no lines.
        file = str(path) if node is None else f"{path}:{lines[-1] if lines else 1}"
        where = f"{file}: {dotted}" if dotted else f"{path}"
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key; {hint(place)}"
    message = error["msg"].removeprefix("Value error, ")
    value = error.get("input")
    if value is None and error["type"] != "missing":
        message = f"{message.replace('Input should be', 'expected')}, not null: leave it out for its default"
        is_number = error["type"].startswith(("float", "int"))
        message += ", or set it to 0" if is_number and takes(place, 0) else ""
        message += f" ({COMMENT})" if where.startswith(f"{path}:") and _hidden(path, lines[-1]) else ""
        return f"{where}: {message}"
    shown = "" if isinstance(value, dict) else f" (found {short(repr(value))})"
    return f"{where}: {message}{shown}"


def _hidden(path: Path, line: int) -> bool:
    """Whether the value in this line of the file, counted from 1, is a comment."""
    return in_comment(read_text(path).splitlines()[line - 1])


def _meant(message: str, set_places: set[str]) -> list[str]:
    """The places that were set in sections that a mistake of the whole recipe names; all where it names none."""
    words = set(re.findall(r"\w+", message))
    return sorted(t for t in set_places if t.split(".")[0] in words) or sorted(set_places)
