"""The fingerprint of a stage's code: the behaviour of the modules that it reaches by import, not their places.

A module counts by its syntax tree without comments, docstrings and the names of this project's modules in its imports,
so moving a file changes no fingerprint. `Code.imports` is a hash of the content that each import reaches, so importing
another module's function of the same name does change it. A C source or a page's template in the same folder and with
the same name is part of a module.

The import graph comes from the syntax trees, functions included (stages import the core inside `run`), so nothing is
executed and JAX is not loaded.

Processes share a cache of parsed modules, because parsing is most of the time of a cached run. An entry is valid for
the content of the module, whatever its file's times are, and while the names that the parser looked up still are
modules of this project, or still are not.
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
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf.stages.store.disk import mark_of
from rlhf.tuning import digest_cache
from rlhf.tuning.atomic import whole_file
from rlhf.tuning.python_syntax import parse

OWN = "rlhf"

# Packages that cannot change a result: they describe, find, store and move it.
INFRASTRUCTURE = ("rlhf.stages.contract.", "rlhf.stages.store.", "rlhf.stages.worker.")

# Versions of libraries that change numbers or bytes.
NUMERIC_LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers", "transformers", "pyarrow", "safetensors"),
    # The order of prompts and examples; the text of chat templates.
    *("grain", "jinja2"),
)

# Arguments of a module's `STAGE = Stage(...)` that describe the stage and place it in a run or on processes. They are
# not in the key, which has the artifacts that it reads as digests of its inputs.
DESCRIPTION = ("section", "title", "reads", "makes", "headline", "samples", "processes", "work", "tidy")

_OWN_NAME = re.compile(rf"{OWN}(\.\w+)+\.?")


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def package_versions(modules: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the packages with these top-level modules, by the packages' names; or `absent`.

    A module of no package, or of one that is installed for editing, can change without a new version, so its content
    and that of its imports count.
    """
    versions: dict[str, str] = {}
    queue, seen = list(modules), set(modules)
    while queue:
        module = queue.pop()
        names = _distributions().get(module, [module])
        versions |= library_versions(tuple(names))
        spec = find_spec(module)
        places = [Path(p) for p in ([*(spec.submodule_search_locations or ())] or [spec.origin or ""])] if spec else []
        if not places or not places[0].exists() or any(_holds(name, places[0]) for name in names):
            continue
        files = sorted(f for p in places for f in ([p] if p.is_file() else p.rglob("*")) if f.suffix in (".py", ".so"))
        content = [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]
        # A file that cannot be parsed has no known imports.
        with contextlib.suppress(SyntaxError):
            code = reached(*_modules(places[0], module), folder=places[0].parent)
            content += [*sorted(set(code.modules.values())), code.imports]
            more = set(code.packages) - seen
            queue, seen = queue + sorted(more), seen | more
        versions[module] = f"content {_short_hash(json.dumps(content))}"
    return versions


def _holds(distribution: str, place: Path) -> bool:
    """Whether an installed distribution has a module at this place in its folder."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.distribution(distribution)
        editable = '"editable": true' in (found.read_text("direct_url.json") or "")
        return not editable and place.is_relative_to(Path(str(found.locate_file(""))))
    return False


def _modules(place: Path, name: str) -> list[str]:
    """Return the dotted names of a module, or of a package with all modules below it."""
    below = place.rglob("*.py") if place.is_dir() else ()
    return [name, *(".".join((name, *f.relative_to(place).with_suffix("").parts)) for f in below)]


@functools.cache
def library_versions(names: tuple[str, ...] = NUMERIC_LIBRARIES) -> dict[str, str]:
    """Return installed versions by name; a library that is not installed is `absent`."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


@dataclasses.dataclass(frozen=True)
class Code:
    """The code that modules reach by import."""

    modules: dict[str, str]
    """Short hash of each module's content, by its name. Names are for messages; keys contain the hashes."""
    imports: str
    """Hash of the graph of imports: the content that each import statement reaches, and its imports in turn."""
    packages: tuple[str, ...]
    """Top-level names of imported modules that belong neither to the project nor to Python."""
    files: dict[str, str] = dataclasses.field(compare=False)
    """SHA-256 of the sources by module, and of files with its name by module and suffix. A process compares them with
    the code that it has loaded. Not in a key, because comments count here."""


def reached(*roots: str, folder: Path | None = None) -> Code:
    """Return the code of the modules `roots` and of all own modules that they reach by import, except infrastructure.

    Own modules are those of this project and, if given, of `folder`. In a folder of installed packages only the package
    of the first root is own.
    """
    installed = str(folder) in {sysconfig.get_path(n) for n in ("stdlib", "purelib", "platlib")}
    only = roots[0].split(".")[0] if installed else None
    hashes: dict[str, str] = {}
    links: dict[str, list[list[str]]] = {}
    files: dict[str, str] = {}
    packages: set[str] = set()
    seen: set[str] = set()
    queue = list(roots)
    while queue:
        name = queue.pop()
        # The top package holds the client of notebooks, which imports everything and which no stage calls.
        if name in seen or name == OWN or f"{name}.".startswith(INFRASTRUCTURE):
            continue
        seen.add(name)
        path = _source(name, folder, only)
        if path is None:
            continue
        # Importing a.b.c runs a/__init__.py and a/b/__init__.py first.
        queue.extend(name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1))
        marks = tuple(map(mark_of, (path, *_beside(path))))
        content, imports, others, sources = _read(str(path), marks, name, folder, only)
        queue.extend(target for _, target in imports)
        files |= {f"{name}{suffix}": value for suffix, value in sources.items()}
        packages.update(others)
        if content is not None:
            hashes[name], links[name] = content, imports
    keep()
    return Code(dict(sorted(hashes.items())), _graph_hash(roots, hashes, links), tuple(sorted(packages)), files)


def _graph_hash(roots: tuple[str, ...], contents: Mapping[str, str], links: Mapping[str, list[list[str]]]) -> str:
    """Return a hash of modules and imports without the modules' names.

    Modules of the same content differ by their imports, however far away the difference is: hashes are refined by those
    of the imported modules until no more modules differ (colour refinement, which allows cycles).
    """
    refined = dict(contents)
    while True:
        before = len(set(refined.values()))
        reaches = {n: [(bound, refined.get(target, "")) for bound, target in links[n]] for n in contents}
        refined = {n: _short_hash(json.dumps([content, reaches[n]])) for n, content in contents.items()}
        if len(set(refined.values())) == before:
            return _short_hash(json.dumps([[refined.get(root, "") for root in roots], sorted(set(refined.values()))]))


def find_spec(package: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a top-level package or module; None if it cannot be imported."""
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def _source(name: str, folder: Path | None, only: str | None) -> Path | None:
    """Return the file of an own module; None for others. `only`: the only own package of `folder`."""
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
    # Most names are not modules; a `Path` for each would be slow.
    for candidate in (os.path.join(base, "__init__.py"), f"{base}.py"):
        if os.path.isfile(candidate):
            return Path(candidate)
    return None


DESCRIBED = "rlhf.tuning.agents.tools."
"""Modules of this project whose docstrings are in prompts."""


_Module = tuple[str | None, list[list[str]], list[str], dict[str, str]]
"""Of a module: short hash of its code (None: it has none); names that it binds by imports, each with its own module;
top-level names of other packages that it imports; SHA-256 of its source (under "") and of files of its name (by
suffix)."""


@functools.cache
def _reader() -> str:
    """Return a hash of the code of this parser and of Python's version."""
    return _short_hash(Path(__file__).read_text() + sys.version)


@functools.cache
def _read(path: str, _changed: tuple[Any, ...], name: str, folder: Path | None, only: str | None) -> _Module:
    sources = {"": Path(path).read_bytes()}
    sources |= {p.name.removeprefix(Path(path).stem): p.read_bytes() for p in _beside(Path(path))}
    files = {suffix: hashlib.sha256(data).hexdigest() for suffix, data in sources.items()}
    found = of_module(
        "\0".join([path, name, str(folder), str(only)]),
        [_reader(), files],
        lambda module: _source(module, folder, only) is not None,
        lambda is_own: _parsed(path, sources, name, is_own),
    )
    return (*found, files)


def _parsed(path: str, sources: dict[str, bytes], name: str, is_own: Callable[[str], bool]) -> list[Any]:
    """Return content, imports and packages of a `_Module`."""
    tree = parse(sources[""], filename=path)
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
    """Return a syntax tree as text, the same in every version of Python, without fields that are empty or None.

    `ast.dump` shows them up to 3.12 and not from 3.13 on, and each version has added some. Fields have names, so that
    the others keep their places without a field.
    """
    if isinstance(node, ast.AST):
        shown = [(n, canonical_tree(v)) for n, v in ast.iter_fields(node) if v is not None and v != []]
        # The context follows from the position of a name.
        return f"{type(node).__name__}({', '.join(f'{n}={v}' for n, v in shown if n != 'ctx')})"
    if isinstance(node, list):
        return f"[{', '.join(map(canonical_tree, node))}]"
    return repr(node)


class _Neutral(ast.NodeTransformer):
    """A transformer that removes the names of own modules from imports.

    In modules of this project it also removes docstrings, the description of a stage, names of modules in strings, and
    the order of neighbouring imports, which formatters derive from names. In a user's modules they may matter, and
    docstrings of tools (`described`) are in prompts.
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
        # `Stage.loads` lists modules that are loaded by name.
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
    """Sort neighbouring imports by their content, unless their order decides the value of a name."""
    ordered: list[ast.stmt] = []
    for is_import, group in itertools.groupby(statements, lambda s: isinstance(s, ast.Import | ast.ImportFrom)):
        neighbours = list(group)
        names = [a.asname or a.name for s in neighbours if isinstance(s, ast.Import | ast.ImportFrom) for a in s.names]
        free = is_import and "*" not in names and len(set(names)) == len(names)
        ordered.extend(sorted(neighbours, key=canonical_tree) if free else neighbours)
    return ordered


def _beside(path: Path) -> list[Path]:
    """Return C sources and page templates with a module's name, which are part of its code."""
    return [p for p in (path.with_suffix(s) for s in (".c", ".h", ".html.j2")) if p.exists()]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_lock = threading.Lock()
_known: dict[str, Any] = {}
_new: dict[str, Any] = {}


def _file() -> Path:
    return digest_cache.folder() / "code.json"


def _kept() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(_file().read_bytes())
        if isinstance(value, dict):
            return value
    return {}


IsOwn = Callable[[str], bool]
"""Whether the project has a module of this name."""


def of_module(place: str, state: list[Any], is_own: IsOwn, read: Callable[[IsOwn], Any]) -> Any:
    """Return the JSON value that `read` returns for a module, cached by `state` (its content and the parser).

    place: the module's file, and after a zero the other arguments of the parser. read: depends only on `state` and on
    the function that it gets.
    """
    with _lock:
        if not _known:
            _known.update(_kept())
        entry = _known.get(place)
    if entry is not None and entry.get("state") == state and all(is_own(n) == own for n, own in entry["asked"].items()):
        return entry["found"]
    asked: dict[str, bool] = {}

    def ask(name: str) -> bool:
        asked[name] = is_own(name)
        return asked[name]

    found = read(ask)
    with _lock:
        _known[place] = _new[place] = {"state": state, "asked": asked, "found": found}
    return found


def keep() -> None:
    """Write new entries next to those of other processes; drop entries of files that are gone."""
    with _lock:
        if not _new:
            return
        entries = {p: e for p, e in (_kept() | _new).items() if Path(p.split("\0")[0]).exists()}
        _new.clear()
    # A read-only home or a full disk only costs time.
    with contextlib.suppress(OSError), whole_file(_file()) as partial:
        partial.write_text(json.dumps(entries))
