"""The fingerprint of a stage's code: the modules that it reaches by import, without comments and docstrings.

What lies beside a module in C, under the same name, is part of it.

The import graph is read from the syntax trees, functions included (stages import the core
inside `run`), so nothing is executed and JAX is not loaded.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sysconfig
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


def module_hashes(root: str, folder: Path | None = None) -> dict[str, str]:
    """Short hash by module name of `root` and every own module that it reaches by import.

    Own are the modules of this project and, where it is given, those that lie in `folder`; of a folder
    of installed packages the root's package alone.
    """
    installed = str(folder) in {sysconfig.get_path(n) for n in ("stdlib", "purelib", "platlib")}
    found: dict[str, str] = {}
    seen: set[str] = set()
    queue = [root]
    while queue:
        name = queue.pop()
        if name in seen or name in INFRASTRUCTURE:
            continue
        seen.add(name)
        inside = not installed or name.split(".")[0] == root.split(".")[0]
        path = _source(name, folder if inside else None)
        if path is None:
            continue
        # Importing a.b.c runs a/__init__.py and a/b/__init__.py first.
        queue.extend(name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1))
        changed = tuple(p.stat().st_mtime_ns for p in (path, *_in_c(path)))
        tree_hash, imports = _read(str(path), changed, name)
        queue.extend(imports)
        if tree_hash is not None:
            found[name] = tree_hash
    return dict(sorted(found.items()))


def function_digests(name: str, where: str) -> dict[str, str]:
    """Hashes of the code behind a reward function: for `module:function` its module and the modules beside it.

    Empty for a built-in, whose code the stage reaches by import. Raises ValueError, naming `where`,
    for a function that is not there; nothing is executed.
    """
    from tuning.rewards.functions import BUILT_IN, PACKAGES

    if name in PACKAGES:
        return {f"package:{n}": v for n, v in library_versions(PACKAGES[name]).items()}
    if name in BUILT_IN:
        return {}
    if ":" not in name:
        near = difflib.get_close_matches(name, list(BUILT_IN), 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BUILT_IN)}, or module:function"
        raise ValueError(f"{where}: no reward function {name!r}; {hint}")
    return _user_digests(name, where)


def algorithm_digests(name: str, where: str) -> dict[str, str]:
    """Hashes of the code of an algorithm, which is found by name: of its module and what that reaches.

    Raises ValueError, naming `where`, for one that is not there; nothing is executed.
    """
    from tuning.algorithms.registry import find

    entry = find(name)
    if entry is None:
        return _user_digests(name, where)
    return {f"module:{k}": v for k, v in module_hashes(f"tuning.algorithms.{entry.module}").items()}


def _user_digests(name: str, where: str) -> dict[str, str]:
    module = name.partition(":")[0]
    top = _spec(module.split(".")[0])
    places = [*(top.submodule_search_locations or []), top.origin] if top is not None else []
    found = module_hashes(module, Path(places[0]).parent) if places and places[0] else {}
    if module not in found:
        raise ValueError(f"{where}: no module {module!r} can be imported from {Path.cwd()}")
    return {f"module:{k}": v for k, v in found.items()}


def _spec(package: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def _source(name: str, folder: Path | None) -> Path | None:
    package, *rest = name.split(".")
    if package in OWN:
        spec = _spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        base = Path(next(iter(spec.submodule_search_locations))).joinpath(*rest)
    elif folder is not None:
        base = folder.joinpath(package, *rest)
    else:
        return None
    for candidate in (base / "__init__.py", base.with_name(f"{base.name}.py")):
        if candidate.is_file():
            return candidate
    return None


@functools.cache
def _read(path: str, _mtimes_ns: tuple[int, ...], name: str) -> tuple[str | None, tuple[str, ...]]:
    """(hash of the code, or None where there is none; names that it imports)."""
    tree = ast.parse(Path(path).read_text(), filename=path)
    inside = name.split(".") if Path(path).name == "__init__.py" else name.split(".")[:-1]
    imports: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: len(inside) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            imports.add(module)
            imports.update(f"{module}.{alias.name}" for alias in node.names)
    _strip_docstrings(tree)
    if all(isinstance(s, ast.Pass) for s in tree.body):
        return None, ()
    text = ast.dump(tree, annotate_fields=False, include_attributes=False)
    for source in _in_c(Path(path)):
        text += re.sub(r"\s*//.*", "", source.read_text())
    return hashlib.sha256(text.encode()).hexdigest()[:16], tuple(sorted(imports))


def _in_c(path: Path) -> list[Path]:
    return [p for p in (path.with_suffix(s) for s in (".c", ".h")) if p.exists()]


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
