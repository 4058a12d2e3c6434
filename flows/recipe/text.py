"""YAML of recipes and options as plain values: mappings with text as keys, lists, texts, numbers, true, false, null.

A file may come from anywhere, such as a pull request or a parameter of a deployment. What would expand without end, is
nested without end, or is no value of a setting is an error with its line, before anything is made of it.
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
COMMENT = "a # begins a comment: put a value that has one in quotes"
SHOWN = 200
"""Characters of a mistake that a message shows."""

_PLAIN = tuple(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge"))
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
_BACKWARDS = re.compile(r"[\u202a-\u202e\u2066-\u2069]")
_VALUE_IN_COMMENT = re.compile(r"^[^#\"']*[\w\"']:\s+#")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class Unusable(ValueError):
    """A text that is no recipe; `line` is None where it has none."""

    def __init__(self, message: str, mark: Any = None):
        super().__init__(message)
        self.line: int | None = None if mark is None else mark.line + 1


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number, as in YAML 1.2; PyYAML alone reads it as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_text(path: Path) -> str:
    """The text of a file. Raises Unusable where it is none, or too large."""
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise Unusable(f"the file is larger than {LARGEST} bytes, which no recipe is")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Unusable(f"line {line} is no UTF-8 ({error.reason} at byte {error.start})") from error


def parsed(text: str) -> tuple[yaml.Node | None, Any]:
    """(the nodes, which know their lines; the value). Raises Unusable."""
    try:
        # Events first: what is made of them is made by recursion.
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise Unusable(f"nested deeper than {DEEPEST} levels", event.start_mark)
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return None, None
        _size(node, {})
        loader = _Loader("")
        return node, loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        lines = text.splitlines()[: mark.line + 1] if mark else []
        # What closes a bracket behind the mark is missed at the end of the text.
        cut = [n for n, line in enumerate(lines, 1) if in_comment(line) and not _is_heading(lines, n)]
        hidden = f"; in line {cut[-1]} {COMMENT}" if cut else ""
        raise Unusable(f"not YAML: {short(str(error))}{hidden}", mark) from error


def in_comment(line: str) -> bool:
    """Whether a line of YAML has a `#` where a value would stand."""
    return _VALUE_IN_COMMENT.search(line) is not None


def _is_heading(lines: list[str], number: int) -> bool:
    """Whether the value of a line stands in those below it: the next one is indented deeper, or a list's."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    below = next((line for line in lines[number:] if line.strip() and not line.lstrip().startswith("#")), "")
    deeper = indent(below) - indent(lines[number - 1])
    return deeper > 0 or (deeper == 0 and below.lstrip().startswith("- "))


def short(text: str) -> str:
    """A text of others for a terminal: without control characters, its middle left out where it is long."""
    text = _BACKWARDS.sub("?", _CONTROL.sub("?", _SURROGATE.sub("?", text)))
    return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} ... {text[-SHOWN:]}"


def _size(node: yaml.Node, known: dict[int, int | None]) -> int:
    """How many values a node becomes; each is checked on the way. None in `known`: it is being counted."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise Unusable("an alias names what it is in", node.start_mark)
        return size
    known[id(node)] = None
    size = 1
    if isinstance(node, yaml.MappingNode):
        size += _mapping(node, known)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_size(one, known) for one in node.value)
    else:
        _check_scalar(node)
    if node.tag not in _PLAIN:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        what = f"{short(repr(node.value))} is a {kind}" if isinstance(node, yaml.ScalarNode) else f"a {kind}"
        raise Unusable(f"{what}, which is no value of a setting: put a text in quotes", node.start_mark)
    if size > MOST:
        raise Unusable(f"aliases expand it to more than {MOST} values", node.start_mark)
    known[id(node)] = size
    return size


def _mapping(node: yaml.MappingNode, known: dict[int, int | None]) -> int:
    seen: set[str] = set()
    size = 0
    for key, value in node.value:
        merges = key.tag == "tag:yaml.org,2002:merge"
        if not isinstance(key, yaml.ScalarNode) or (key.tag != "tag:yaml.org,2002:str" and not merges):
            shown = short(str(key.value)) if isinstance(key, yaml.ScalarNode) else "in brackets"
            raise Unusable(f"the key {shown} is no text: put it in quotes, or check the indentation", key.start_mark)
        if _CONTROL.search(key.value) or _BACKWARDS.search(key.value) or _SURROGATE.search(key.value):
            raise Unusable(f"the key {short(key.value)!r} has a control character", key.start_mark)
        if key.value in seen and not merges:
            raise Unusable(f"the key {short(key.value)!r} is there twice", key.start_mark)
        seen.add(key.value)
        size += _size(value, known)
    return size


def _check_scalar(node: yaml.Node) -> None:
    text = node.value
    if _CONTROL.search(text):
        raise Unusable("a text has a control character", node.start_mark)
    if _SURROGATE.search(text):
        raise Unusable("a text has half of a surrogate pair, which is no character", node.start_mark)
    if node.tag in _NUMBERS and len(text) > LONGEST:
        raise Unusable(f"a number of {len(text)} characters; {LONGEST} at most", node.start_mark)
