"""The docstrings below the fields of a class, read from its source on demand.

pydantic's `use_attribute_docstrings` reads and tokenizes the source of every model at import: a fifth of the start of
each process, for texts that few commands show.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Mapping

from rlhf.tuning.python_syntax import parse


@functools.cache
def field_docs(cls: type) -> Mapping[str, str]:
    """Return the docstring below each field of a class and of its bases, by the field's name."""
    docs: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        docs |= _own(one)
    return docs


def _own(cls: type) -> dict[str, str]:
    """Return the docstrings of the fields in the class's own body; none if it has no source."""
    body = _classes(cls.__module__).get(cls.__qualname__)
    docs = {}
    for field, doc in itertools.pairwise(body.body if body is not None else ()):
        match field, doc:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
    return docs


@functools.cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    """Return the classes of a module of this project by name; none for other modules, which have no settings."""
    if module.partition(".")[0] != "rlhf":
        return {}
    tree = parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
