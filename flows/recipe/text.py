"""Reads the YAML of recipes and options as mappings with text keys, lists, texts, numbers, true, false and null.

A file may come from anywhere, such as a pull request or a parameter of a deployment. Aliases that expand without end,
deep nesting and values that no setting takes are errors with their line, found before any value is made. ruamel.yaml
knows lines, double keys and 1e-4, but checks neither depth nor aliases, and is slower than PyYAML.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

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
