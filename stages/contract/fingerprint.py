"""The fingerprint of a stage's code: what the modules that it reaches by import do, not where they are.

A module counts by its syntax tree without comments and docstrings, and with the names of this project's modules left
out of its imports: moving a file changes no fingerprint. Which content each import reaches is hashed beside it
(`Code.imports`), so that importing another module's function of the same name does change it. A C source or
a page's template of the same name, beside a module, is part of it.

The import graph is read from the syntax trees, functions included (stages import the core inside `run`), so nothing is
executed and JAX is not loaded.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf.stages.contract import ast_cache
from rlhf.stages.store.disk import mark_of

OWN = "rlhf"

# Packages of which no module can change a result: they describe, find, store and move it.
INFRASTRUCTURE = ("rlhf.stages.contract", "rlhf.stages.store", "rlhf.stages.worker")

# Versions of libraries that change numbers or bytes.
NUMERIC_LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers", "transformers", "pyarrow", "safetensors"),
    # The order of prompts and examples; the text of chat templates.
    *("grain", "jinja2"),
)

# Arguments of a module's `STAGE = Stage(...)` that describe the stage and place it in a run or on processes: no part of
# its key.
# Which artifacts it reads is in the key already, as the digests of its inputs.
DESCRIPTION = ("section", "title", "reads", "makes", "headline", "samples", "processes", "work", "tidy")

_OWN_NAME = re.compile(rf"{OWN}(\.\w+)+\.?")


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def package_versions(modules: tuple[str, ...]) -> dict[str, str]:
    """Versions of the packages that hold top-level modules, by the packages' names; `absent` without one.

    A module that no package holds, or one that is installed for editing, keeps its version when it changes: its content
    counts, and that of what it imports.
    """
    versions: dict[str, str] = {}
    queue, seen = list(modules), set(modules)
    while queue:
        module = queue.pop()
        # Most packages are called as their module: the list of all takes a tenth of a second.
        found = library_versions((module,))
        names = [module] if found[module] != "absent" else _distributions().get(module, [module])
        versions |= library_versions(tuple(names))
        spec = find_spec(module)
        places = [Path(p) for p in ([*(spec.submodule_search_locations or ())] or [spec.origin or ""])] if spec else []
        if not places or not places[0].exists() or any(_holds(name, places[0]) for name in names):
            continue
        files = sorted(f for p in places for f in ([p] if p.is_file() else p.rglob("*")) if f.suffix in (".py", ".so"))
        content = [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]
        # What cannot be parsed imports nothing that is found.
        with contextlib.suppress(SyntaxError):
            code = reached(*_modules(places[0], module), folder=places[0].parent)
            content += [*sorted(set(code.modules.values())), code.imports]
            more = set(code.packages) - seen
            queue, seen = queue + sorted(more), seen | more
        versions[module] = f"content {_short_hash(json.dumps(content))}"
    return versions


def _holds(distribution: str, place: Path) -> bool:
    """Whether an installed distribution has a module at this place in its own folder."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.distribution(distribution)
        editable = '"editable": true' in (found.read_text("direct_url.json") or "")
        return not editable and place.is_relative_to(Path(str(found.locate_file(""))))
    return False


def _modules(place: Path, name: str) -> list[str]:
    """The dotted names of a module, or of a package with all below it."""
    below = place.rglob("*.py") if place.is_dir() else ()
    return [name, *(".".join((name, *f.relative_to(place).with_suffix("").parts)) for f in below)]


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


@dataclasses.dataclass(frozen=True)
class Code:
    """The code that some modules reach by import."""

    modules: dict[str, str]
    """Short hash of each module's content, by the module's name. The names serve messages; keys hold the hashes."""
    imports: str
    """Hash of the graph of imports: which content each import statement reaches, and what that one reaches."""
    packages: tuple[str, ...]
    """Top-level names of the modules of others that are imported, but for Python's own."""
    files: dict[str, str] = dataclasses.field(compare=False)
    """SHA-256 of the sources, by module, and with its suffix for what lies beside one: what a process compares with
    what it has loaded. Not in a key: comments count here."""


def reached(*roots: str, folder: Path | None = None) -> Code:
    """The code of the modules `roots` and of every own module that they reach by import, infrastructure left out.

    Own modules are those of this project and, if given, of `folder`. Of a folder of installed packages only the
    first root's package counts.
    """
    installed = str(folder) in {sysconfig.get_path(n) for n in ("stdlib", "purelib", "platlib")}
    only = roots[0].split(".")[0] if installed else None
    hashes: dict[str, str] = {}
    links: dict[str, tuple[tuple[str, str], ...]] = {}
    files: dict[str, str] = {}
    packages: set[str] = set()
    seen: set[str] = set()
    queue = list(roots)
    while queue:
        name = queue.pop()
        if name in seen or _is_infrastructure(name):
            continue
        seen.add(name)
        path = _source(name, folder, only)
        if path is None:
            continue
        # Importing a.b.c runs a/__init__.py and a/b/__init__.py first.
        queue.extend(name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1))
        changed = {str(p): mark_of(p) for p in (path, *_beside(path))}
        module = _read(str(path), tuple(changed.values()), name, folder, only)
        queue.extend(target for _, target in module.imports)
        files |= {f"{name}{suffix}": value for suffix, value in module.files.items()}
        packages |= module.packages
        if module.content is not None:
            hashes[name], links[name] = module.content, module.imports
    ast_cache.keep()
    return Code(dict(sorted(hashes.items())), _graph_hash(roots, hashes, links), tuple(sorted(packages)), files)


def _graph_hash(
    roots: tuple[str, ...], contents: Mapping[str, str], links: Mapping[str, tuple[tuple[str, str], ...]]
) -> str:
    """Hash of modules and imports without the modules' names.

    A module is told from another of the same content by what it imports, however far away the difference is: hashes are
    refined by those of the imported modules until no more modules differ (colour refinement, which allows cycles).
    """
    refined = dict(contents)
    while True:
        before = len(set(refined.values()))
        reaches = {n: [(bound, refined.get(target, "")) for bound, target in links[n]] for n in contents}
        refined = {n: _short_hash(json.dumps([content, reaches[n]])) for n, content in contents.items()}
        if len(set(refined.values())) == before:
            return _short_hash(json.dumps([[refined.get(root, "") for root in roots], sorted(set(refined.values()))]))


def _is_infrastructure(name: str) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in INFRASTRUCTURE)


def find_spec(package: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a top-level package or module; None where it cannot be imported."""
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def _source(name: str, folder: Path | None, only: str | None) -> Path | None:
    """The file of an own module; None for another's. `only`: the one package of `folder` that counts."""
    package, *rest = name.split(".")
    if package == OWN:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        base = os.path.join(next(iter(spec.submodule_search_locations)), *rest)
    elif folder is not None and only in (None, package):
        base = os.path.join(folder, package, *rest)
    else:
        return None
    # Names that are none are most of what is asked: no `Path` is made for them.
    for candidate in (os.path.join(base, "__init__.py"), f"{base}.py"):
        if os.path.isfile(candidate):
            return Path(candidate)
    return None


DESCRIBED = "rlhf.tuning.agents.tools."
"""Modules of this project whose docstrings the policy reads."""


@dataclasses.dataclass(frozen=True)
class _Module:
    """What is read of one module."""

    content: str | None
    """Short hash of what it does; None where there is no code."""
    imports: tuple[tuple[str, str], ...]
    """(what is bound, own module that it comes from)."""
    packages: frozenset[str]
    """Top-level names of what it imports from others."""
    files: dict[str, str]
    """SHA-256 of its source (under "") and of what lies beside it (by suffix)."""


@functools.cache
def _reader() -> str:
    """What a reading depends on beside the module: this module, and Python's list of its own."""
    return _short_hash(Path(__file__).read_text() + sys.version)


@functools.cache
def _read(path: str, _changed: tuple[Any, ...], name: str, folder: Path | None, only: str | None) -> _Module:
    sources = {"": Path(path).read_bytes()}
    sources |= {p.name.removeprefix(Path(path).stem): p.read_bytes() for p in _beside(Path(path))}
    files = {suffix: hashlib.sha256(data).hexdigest() for suffix, data in sources.items()}
    content, imports, packages = ast_cache.of_module(
        "\0".join([path, name, str(folder), str(only)]),
        [_reader(), files],
        lambda module: _source(module, folder, only) is not None,
        lambda is_own: _parsed(path, sources, name, is_own),
    )
    return _Module(content, tuple((bound, target) for bound, target in imports), frozenset(packages), files)


def _parsed(path: str, sources: dict[str, bytes], name: str, is_own: Callable[[str], bool]) -> list[Any]:
    """Content, imports and packages of a module, as `_Module` has them."""
    tree = ast.parse(sources[""], filename=path)
    package = name.split(".") if Path(path).name == "__init__.py" else name.split(".")[:-1]
    neutral = _Neutral(package, is_own, name.split(".")[0] == OWN, described=name.startswith(DESCRIBED))
    tree = neutral.visit(tree)
    packages = sorted(neutral.packages - sys.stdlib_module_names - {OWN})
    if all(isinstance(s, ast.Pass) for s in tree.body):
        return [None, [], packages]
    text = canonical_tree(tree)
    for suffix, data in sources.items():
        if suffix:
            beside = data.decode().replace("\r\n", "\n")
            text += re.sub(r"\s*//.*", "", beside) if suffix in (".c", ".h") else beside
    return [_short_hash(text), [list(link) for link in sorted(neutral.imports)], packages]


def canonical_tree(node: Any) -> str:
    """A syntax tree as text, the same in every version of Python: fields that are empty or None are left out.

    `ast.dump` shows them up to 3.12 and not from 3.13 on, and each version has added some. Fields are named: without
    a field that is left out the others would change places.
    """
    if isinstance(node, ast.AST):
        shown = [(n, canonical_tree(v)) for n, v in ast.iter_fields(node) if v is not None and v != []]
        # A context follows from where a name is.
        return f"{type(node).__name__}({', '.join(f'{n}={v}' for n, v in shown if n != 'ctx')})"
    if isinstance(node, list):
        return f"[{', '.join(map(canonical_tree, node))}]"
    return repr(node)


class _Neutral(ast.NodeTransformer):
    """A syntax tree without names of own modules in its imports.

    In modules of this project it also leaves out docstrings, what describes a stage, names of modules in strings, and
    the order of neighbouring imports, which formatters derive from names. A user's modules promise none of that, and
    docstrings of tools (`described`) stand in prompts.
    """

    def __init__(self, package: list[str], is_own: Callable[[str], bool], in_project: bool, described: bool):
        self._package = package
        self._is_own = is_own
        self._in_project = in_project
        self._keeps_docstrings = described or not in_project
        self.imports: list[tuple[str, str]] = []
        self.packages: set[str] = set()

    def _link(self, bound: str, module: str) -> None:
        # Numbered: of two imports that bind one name, the later one wins.
        number = sum(b.rpartition("#")[0] == bound for b, _ in self.imports)
        self.imports.append((f"{bound}#{number}", module))

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and statements:
                code = statements if self._keeps_docstrings else _without_docstrings(statements)
                setattr(node, field, _sorted_imports(code) if self._in_project else code)
        return node

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            if not self._is_own(alias.name):
                self.packages.add(alias.name.split(".")[0])
                continue
            self._link(alias.asname or alias.name, alias.name)
            if alias.asname:
                alias.name = "own"
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        above = self._package[: len(self._package) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        submodules = [alias for alias in node.names if self._is_own(f"{module}.{alias.name}")]
        if not self._is_own(module) and not submodules:
            self.packages.add(module.split(".")[0])
            return node
        for alias in node.names:
            bound = alias.asname or alias.name
            if alias in submodules:
                self._link(bound, f"{module}.{alias.name}")
                alias.name, alias.asname = "own", bound
            else:
                self._link(f"{alias.name} as {bound}", module)
        node.module, node.level = "own", 0
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        call = node.value
        if self._in_project and ast.unparse(node.targets[0]) == "STAGE" and isinstance(call, ast.Call):
            call.keywords = [k for k in call.keywords if k.arg not in DESCRIPTION]
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        # A module that is loaded by name counts where a stage says so (`Stage.loads`).
        name = node.value if self._in_project and isinstance(node.value, str) else ""
        if _OWN_NAME.fullmatch(name) and self._is_own(name.rstrip(".")):
            node.value = "own"
        return node


def _without_docstrings(statements: list[ast.stmt]) -> list[ast.stmt]:
    # Bare strings document a module, a function or a field; none of them runs.
    kept = [
        s
        for s in statements
        if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, str))
    ]
    return kept or [ast.Pass()]


def _sorted_imports(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Neighbouring imports in the order of their content, unless their order decides what a name is bound to."""
    ordered: list[ast.stmt] = []
    for is_import, group in itertools.groupby(statements, lambda s: isinstance(s, ast.Import | ast.ImportFrom)):
        neighbours = list(group)
        names = [a.asname or a.name for s in neighbours if isinstance(s, ast.Import | ast.ImportFrom) for a in s.names]
        free = is_import and "*" not in names and len(set(names)) == len(names)
        ordered.extend(sorted(neighbours, key=canonical_tree) if free else neighbours)
    return ordered


def _beside(path: Path) -> list[Path]:
    """Files that a module's result depends on like on its code: C sources and a page's template, of its own name."""
    return [p for p in (path.with_suffix(s) for s in (".c", ".h", ".html.j2")) if p.exists()]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
