"""Reads a recipe from YAML. Errors name file, line and field, and for an unknown key the nearest one."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rlhf.flows.recipe.field_paths import hint, lines_of, mappings_in, merge, whole
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.secrets import secrets_in
from rlhf.flows.recipe.text import DEEPEST, Unusable, parse, read_text, short
from rlhf.flows.recipe.unions import settled
from rlhf.tuning.allowed import NotAllowed, check_file

RECIPES = Path(__file__).parents[1] / "recipes"
LONGEST_NAME = 4096
LONGEST_PART = 256
"""Characters of a recipe's name or path, and of a part of a place."""


def find_recipe(name: str) -> Path:
    """Return the file of a recipe by its path or the name of a built-in one. Raises RecipeError for others."""
    if len(name) > LONGEST_NAME or "\0" in name:
        raise RecipeError(f"no recipe {short(name)!r}; give a name or a path")
    path = Path(name)
    # A name with this suffix is a path, also if the file does not exist: the error is about the file then.
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise RecipeError(f"recipe file {name} does not exist")
        try:
            check_file(path)
        except NotAllowed as e:
            raise RecipeError(str(e)) from e
        return path
    built_in = RECIPES / f"{name}.yaml"
    # A name, not a path to a file elsewhere.
    if path.name == name and built_in.is_file():
        return built_in
    names = sorted(p.stem for p in RECIPES.glob("*.yaml"))
    files = [file for suffix in (".yaml", ".yml") if Path(file := f"{name}{suffix}").is_file()]
    near = files or difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise RecipeError(f"no recipe {name!r}; built in are {', '.join(names)}{hint}")


def load_recipe(name: str, overrides: dict[str, Any] | None = None, sets: list[str] | None = None) -> Recipe:
    """Read a recipe; `overrides` are merged in, `sets` are `a.b=value` with the value in YAML.

    Raises RecipeError with file, line and field.
    """
    path = find_recipe(name)
    try:
        node, values = parse(read_text(path))
    except Unusable as e:
        raise RecipeError(f"{path}{'' if e.line is None else f':{e.line}'}: {e}") from e
    except OSError as e:
        raise RecipeError(f"{path} cannot be read: {e.strerror}") from e
    if values is None:
        raise RecipeError(f"{path}: the file holds no settings; `name: {path.stem}` alone takes all defaults")
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, found {type(values).__name__}")
    # Names of runs and stores have small letters, digits and hyphens alone.
    values.setdefault("name", re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "recipe")
    for name, value in (overrides or {}).items():
        # A form may send an empty mapping for a field that nobody has filled in.
        values = _laid(values, [name], value, [place for place, mapping in mappings_in([name], value) if mapping])
    values, options = with_sets(values, sets or [])
    return checked(values, path, node, options)


def _laid(values: dict[str, Any], place: list[str], given: Any, replaced: list[Sequence[str]]) -> dict[str, Any]:
    """Return the values with one more merged in at a place. Nothing stays of the mappings at the places `replaced`."""
    for where, part in [*((mapping, None) for mapping in replaced), (place, given)]:
        for name in reversed(where):
            part = {name: part}
        values = merge(values, part)
    return values


def with_sets(values: dict[str, Any], sets: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values with each `a.b=value` merged in, and the dotted places that were set. Raises RecipeError."""
    options = []
    for item in sets:
        place, equals, value = item.partition("=")
        if not equals or not place:
            raise RecipeError(f"--set {item}: expected a.b=value")
        item = short(item)
        parts = place.split(".")
        if not place.isprintable() or "" in parts or len(parts) > DEEPEST or max(map(len, parts)) > LONGEST_PART:
            raise RecipeError(f"--set {item}: {short(place)!r} is not a place; expected names with dots between them")
        options.append(place)
        try:
            _, given = parse(value)
        except Unusable as e:
            raise RecipeError(f"--set {item}: the value cannot be read: {e}") from e
        _check_items(values, parts, item)
        # A mapping takes the place of the recipe's, or no option could take a reward away.
        values = _laid(values, parts, given, [place for place, _ in mappings_in(parts, given)])
    return values, options


def _check_items(values: Any, parts: list[str], item: str) -> None:
    """Raises RecipeError if a part of a place is the number of an item that a list does not have."""
    for number, name in enumerate(parts):
        if isinstance(values, list):
            if not (name.isdecimal() and int(name) < len(values)):
                above = ".".join(parts[:number])
                numbers = f"a number from 0 to {len(values) - 1} for {name!r}, or " if values else ""
                of_all = f"--set {above}=[...]"
                raise RecipeError(f"--set {item}: {above} is a list of {len(values)}: expected {numbers}{of_all}")
            values = values[int(name)]
        else:
            values = values.get(name) if isinstance(values, dict) else None


def checked(values: dict[str, Any], path: Path, node: yaml.Node | None = None, options: Collection[str] = ()) -> Recipe:
    """Validate a recipe's values. Raises RecipeError with the line or the option of each mistake.

    path: the recipe's file. node: its parsed YAML; None if there is no file. options: dotted places of `--set`.
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
        raise RecipeError("\n".join(_explain(path, node, options, m) for m in settled(e.errors(), values))) from e


def _explain(path: Path, node: Any, options: Collection[str], error: Any) -> str:
    """Return one of pydantic's errors in a sentence that begins with file and line, or with the option `--set`."""
    place = [str(p) for p in error["loc"]]
    dotted = ".".join(place)
    lines = lines_of(node, place)
    # Errors have the full place; options may have the short form.
    given = {".".join(whole(option.split("."))): option for option in sorted(options)}
    above = next((t for t in given if (dotted + ".").startswith(t + ".")), None)
    below = [option for t, option in given.items() if not dotted or t.startswith(dotted + ".")]
    where = f"{path}:{lines[-1] if lines else 1}" if dotted and node is not None else f"{path}"
    if above is not None:
        where = f"--set {given[above]}{dotted[len(above) :]}"
    else:
        if below or (given and len(lines) < len(place)):
            # Values of the file and of the options do not fit each other.
            where += f" with --set {', '.join(below or sorted(options))}"
        where += f": {dotted}" if dotted else ""
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key; {hint(place)}"
    message = error["msg"].removeprefix("Value error, ")
    value = error.get("input")
    if value is None and error["type"] != "missing":
        return f"{where}: {message.replace('Input should be', 'expected')}, not null: leave it out for its default"
    shown = "" if isinstance(value, dict) else f" (found {short(repr(value))})"
    return f"{where}: {message}{shown}"
