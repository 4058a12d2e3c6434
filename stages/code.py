"""The fingerprint of a stage's code: the modules that it reaches by import, without comments and docstrings.

The import graph is read from the syntax trees, functions included (stages import the core
inside `run`), so nothing is executed and JAX is not loaded.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

OWN = ("stages", "tuning")

# How a result is stored, moved and shown cannot change what it is.
INFRASTRUCTURE = frozenset(
    f"stages.{name}" for name in ("base", "artifacts", "keys", "code", "worker", "client", "leases", "registry")
)

# Versions of libraries that change numbers or bytes.
NUMERIC_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers", "transformers", "pyarrow", "safetensors")


@functools.cache
def library_versions(names: tuple[str, ...] = NUMERIC_LIBRARIES) -> dict[str, str]:
    """Installed versions by name; a library that is not installed is `absent`."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


def module_hashes(root: str) -> dict[str, str]:
    """Short hash by module name of `root` and every own module that it reaches by import."""
    found: dict[str, str] = {}
    queue = [root]
    while queue:
        name = queue.pop()
        if name in found or name in INFRASTRUCTURE:
            continue
        path = _source(name)
        if path is None:
            continue
        tree_hash, imports = _read(str(path), path.stat().st_mtime_ns, name)
        found[name] = tree_hash
        queue.extend(imports)
    return dict(sorted(found.items()))


@functools.cache
def _root_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _source(name: str) -> Path | None:
    package, *rest = name.split(".")
    root = _root_folder(package) if package in OWN else None
    if root is None:
        return None
    base = root.joinpath(*rest)
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


@functools.cache
def _read(path: str, _mtime_ns: int, name: str) -> tuple[str, tuple[str, ...]]:
    tree = ast.parse(Path(path).read_text(), filename=path)
    imports: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            imports.add(node.module)
            imports.update(f"{node.module}.{alias.name}" for alias in node.names)
    _strip_docstrings(tree)
    text = ast.dump(tree, annotate_fields=False, include_attributes=False)
    own = tuple(sorted(i for i in imports if i.split(".")[0] in OWN))
    return hashlib.sha256(text.encode()).hexdigest()[:16], own


def _strip_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        # Bare strings document a module, a function or a field; none of them runs.
        kept = [
            s
            for s in body
            if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, str))
        ]
        node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
