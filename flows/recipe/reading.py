"""Reads a recipe from YAML. Errors name file, line and field, and for an unknown key the nearest one.

The YAML of recipes and options has mappings with text keys, lists, texts, numbers, true, false and null. A file may
come from anywhere, such as a pull request or a parameter of a deployment. Aliases that expand without end, deep nesting
and values that no setting takes are errors with their line, found before any value is made. ruamel.yaml knows lines,
double keys and 1e-4, but checks neither depth nor aliases, and is slower than PyYAML.

Pydantic reports each form of a setting separately, and puts names of types into the place of an error: `settled` makes
of them errors about the form that the user meant.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rlhf.flows.recipe.field_paths import SYNONYMS, hint, lines_of, mappings_in, merge, whole
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.secrets import secrets_in
from rlhf.stages.prepare.settings import ALONE
from rlhf.stages.store import datasets
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.datasets import DatasetError
from rlhf.stages.store.keys import WRITTEN, published
from rlhf.tuning.allowed import NotAllowed, check_file

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


DATASETS = ("source", "sources", "decontaminate")
"""Settings of data that may name data sets."""
LARGEST = 2**20
"""Bytes of a recipe."""
DEEPEST = 40
"""Levels of lists and mappings."""
MOST = 100_000
"""Values, counted as often as aliases name them."""
LONGEST = 64
"""Characters of a number."""
SHOWN = 200
"""Characters at each end of a text of a user that a message shows."""

_MERGE = "tag:yaml.org,2002:merge"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_PLAIN = (*_NUMBERS, _MERGE, *(f"tag:yaml.org,2002:{name}" for name in ("str", "bool", "null", "map", "seq")))
# Control characters, marks that reverse the direction of text, and halves of surrogate pairs.
_CONTROL = re.compile(
    "[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x84\\x86-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)

# To base 60, and to base 8.
_ODD = re.compile(r".*:.*|[-+]?0[0-9_]+")


class Unusable(ValueError):
    """A text that is not a recipe; `line` is None if it has none."""

    def __init__(self, message: str, mark: Any = None):
        super().__init__(message)
        self.line: int | None = None if mark is None else mark.line + 1


class _Loader(yaml.SafeLoader):
    """A loader for which 1e-4 is a number, as in YAML 1.2; PyYAML reads it as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_text(path: Path) -> str:
    """Read a file. Raises Unusable if it is too large or is not UTF-8."""
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise Unusable(f"the file is larger than {LARGEST} bytes, the maximum of a recipe")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Unusable(f"the file is not UTF-8: {error.reason} at byte {error.start}") from error


def parse(text: str) -> tuple[yaml.Node | None, Any]:
    """Return the nodes, which know their lines, and the value. Raises Unusable."""
    try:
        # Events first, because nodes are composed by recursion.
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise Unusable(f"nested deeper than {DEEPEST} levels", event.start_mark)
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return None, None
        _count(node, {})
        return node, _Loader("").construct_document(node)
    except yaml.YAMLError as error:
        raise Unusable(f"not YAML: {short(str(error))}", getattr(error, "problem_mark", None)) from error


def short(text: str) -> str:
    """Return a user's text for a terminal: without control characters, and without the middle of a long one."""
    text = _CONTROL.sub("?", text)
    return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} ... {text[-SHOWN:]}"


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values of a node, and check each. `known` has 0 for a node that is being counted."""
    if (size := known.get(id(node))) == 0:
        raise Unusable("an alias names the collection that contains it", node.start_mark)
    if size is not None:
        return size
    known[id(node)] = 0
    text = node.value if isinstance(node, yaml.ScalarNode) else ""
    if node.tag not in _PLAIN:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        value = f"{short(repr(text))} is a {kind}" if text else f"a {kind}"
        raise Unusable(f"{value}, which no setting takes: put a text in quotes", node.start_mark)
    if _CONTROL.search(text):
        raise Unusable("a text has a control character", node.start_mark)
    if node.tag in _NUMBERS and len(text) > LONGEST:
        raise Unusable(f"a number of {len(text)} characters; {LONGEST} at most", node.start_mark)
    if node.tag in _NUMBERS and _ODD.fullmatch(text):
        value = _Loader("").construct_object(node)
        raise Unusable(f"{text} is {value} in YAML 1.1: put a text in quotes", node.start_mark)
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        parts = [value for _, value in node.value]
    else:
        parts = node.value if isinstance(node, yaml.SequenceNode) else []
    size = 1 + sum(_count(part, known) for part in parts)
    if size > MOST:
        raise Unusable(f"aliases expand it to more than {MOST} values", node.start_mark)
    known[id(node)] = size
    return size


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        text = short(key.value) if isinstance(key, yaml.ScalarNode) else "in brackets"
        if key.tag == _MERGE:
            continue
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            raise Unusable(f"the key {text} is not a text: put it in quotes, or check the indentation", key.start_mark)
        if _CONTROL.search(key.value):
            raise Unusable(f"the key {text!r} has a control character", key.start_mark)
        if key.value in seen:
            raise Unusable(f"the key {text!r} appears twice", key.start_mark)
        seen.add(key.value)


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
    return checked(values, path, node, options, WRITTEN)


def _laid(values: dict[str, Any], place: list[str], given: Any, replaced: list[Sequence[str]]) -> dict[str, Any]:
    """Return the values with one more merged in at a place. Nothing stays of the mappings at the places `replaced`."""
    for where, part in [*((mapping, None) for mapping in replaced), (place, given)]:
        for name in reversed(where):
            part = {name: part}
        values = merge(_without_source(values, part), part)
    return values


def readable(recipe: Recipe) -> dict[str, Any]:
    """Return the values of a recipe, with defaults, for a file: `checked` refuses those that are without effect."""
    values = published(recipe.model_dump(mode="json"))
    if recipe.data.sources:
        values["data"] = {name: value for name, value in values["data"].items() if name not in ALONE}
    for name in recipe.rl.update.ignored if recipe.rl is not None else ():
        del values["rl"]["update"][name]
    return values


def _without_source(values: dict[str, Any], part: Any) -> dict[str, Any]:
    """Return the values without the one source of their data if `part` has several."""
    data, given = values.get("data"), part.get("data") if isinstance(part, dict) else None
    if not (isinstance(data, dict) and isinstance(given, dict) and given.get("sources")):
        return values
    return values | {"data": {name: value for name, value in data.items() if name not in ALONE}}


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


def checked(
    values: dict[str, Any],
    path: Path,
    node: yaml.Node | None = None,
    options: Collection[str] = (),
    context: str | None = None,
) -> Recipe:
    """Validate a recipe's values. Raises RecipeError with the line or the option of each mistake.

    path: the recipe's file. node: its parsed YAML; None if there is no file. options: dotted places of `--set`.
    context: `WRITTEN` for values that a user has written, not those of a record.
    """
    for place in secrets_in(values):
        raise RecipeError(
            f"{path}: {place} looks like a secret, and records of runs hold a recipe's values: name an environment "
            "variable in capitals (key_variable of a judge), or give it to a server by engine.environment"
        )
    try:
        values = _with_datasets(values)
    except DatasetError as e:
        raise RecipeError(f"{path}: data: {e}") from e
    try:
        # Through JSON: strict JSON input may give lists and floats as YAML writes them.
        return Recipe.model_validate_json(json.dumps(values), context=context)
    except ValidationError as e:
        raise RecipeError("\n".join(_explain(path, node, options, m) for m in settled(e.errors(), values))) from e


def _with_datasets(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the URL of a version in place of each `dataset:NAME`. Raises DatasetError."""
    store = str(values.get("store") or Recipe.model_fields["store"].default)

    def located(part: Any) -> Any:
        if isinstance(part, str) and part.startswith(datasets.PREFIX):
            return datasets.located(Store(store), part)
        if isinstance(part, list):
            return [located(item) for item in part]
        if isinstance(part, dict):
            return part | {name: located(part[name]) for name in DATASETS if name in part}
        return part

    return values | {"data": located(values["data"])} if "data" in values else values


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
    unused = re.match(r"(\w+) has no meaning with", message)
    if unused and unused[1] in SYNONYMS:
        message += f"; {hint([*place, unused[1]])}"
    value = error.get("input")
    if value is None and error["type"] != "missing":
        return f"{where}: {message.replace('Input should be', 'expected')}, not null: leave it out for its default"
    shown = "" if isinstance(value, dict) else f" (found {short(repr(value))})"
    return f"{where}: {message}{shown}"
