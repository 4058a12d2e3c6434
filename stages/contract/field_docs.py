"""What the docstrings below the fields of a class say, read from its source when somebody asks.

pydantic's `use_attribute_docstrings` reads and tokenizes the source of every model when it is imported: a fifth of the
start of each process, for texts that few commands show.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Mapping


@functools.cache
def field_docs(cls: type) -> Mapping[str, str]:
    """The docstring below each field of a class by the field's name, those of its bases for what it does not say."""
    docs: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        docs |= _own(one)
    return docs


def _own(cls: type) -> dict[str, str]:
    """The docstrings of the fields that stand in the class's own body; none where it has no source."""
    body = _classes(cls.__module__).get(cls.__qualname__)
    docs = {}
    for field, doc in itertools.pairwise(body.body if body is not None else ()):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = inspect.cleandoc(str(doc.value.value))
    return docs


@functools.cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    """The classes of a module of this project by name; of another one none, whose fields are nobody's settings."""
    if module.partition(".")[0] != "rlhf":
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
