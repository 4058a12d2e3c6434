"""Parameters of a function or class that a recipe names, read from its module's syntax tree: nothing is executed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rlhf.stages.contract.fingerprint import find_spec
from rlhf.tuning.names import nearest
from rlhf.tuning.python_syntax import parse


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters of a function or class."""

    positional: tuple[str, ...]
    """Names of parameters that can be given by position, in order."""
    named: tuple[str, ...]
    """All parameters that can be given by name."""
    required: tuple[str, ...]
    """Those without a default."""
    takes_more: bool
    """Whether `**columns` takes further names. It does not count `**_`, whose names have no effect."""
    takes_any: bool = False
    """Whether `*values` takes any number by position."""
    is_async: bool = False
    """Whether it is `async def`."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The parameters of a reward that get prompts and completions: by name if they have these names, else the
        first two; for a reward in verl's form all that verl passes (`rlhf.tuning.rewards.processes`)."""
        if "solution_str" in self.named:
            return ("data_source", "solution_str", "ground_truth", "extra_info")
        names = ("prompts", "completions")
        by_name = "completions" in self.named and (*self.positional, *self.named)[0] in names
        return names if by_name else self.positional[:2]


def of_callable(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a loaded function."""
    found = inspect.signature(function).parameters.values()
    plain = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Parameters(
        tuple(p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)),
        tuple(p.name for p in plain),
        tuple(p.name for p in plain if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD and p.name != "_" for p in found),
        any(p.kind is p.VAR_POSITIONAL for p in found),
        inspect.iscoroutinefunction(function),
    )


def of_name(name: str, where: str, kind: str = "function") -> Parameters | None:
    """Return the parameters of `module:function`, or those of the constructor of `module:Class`.

    None if the tree does not show them: a decorated function, the result of a call, a class without its own `__init__`.
    kind: the expected kind of object, in words. Raise ValueError, naming `where`, for a name that its module does not
    define.
    """
    module, _, function = name.partition(":")
    path = source_file(module)
    if path is None:
        return None
    try:
        tree = parse(path.read_bytes(), filename=str(path))
    except SyntaxError as e:
        raise ValueError(f"{where}: {path}, line {e.lineno}: {e.msg}") from e
    bound = _bound(tree.body)
    if function not in bound:
        # Names from `import *` and from a module's `__getattr__` are not in the tree.
        if "*" in bound or "__getattr__" in bound:
            return None
        functions = ast.FunctionDef | ast.AsyncFunctionDef
        defined = functions if kind == "function" else functions | ast.ClassDef
        hint = nearest(function, [n for n, at in bound.items() if isinstance(at, defined)])
        raise ValueError(f"{where}: {path.name} has no {kind} {function!r}; {hint}")
    match bound[function]:
        case ast.FunctionDef() | ast.AsyncFunctionDef() as at:
            return _of_definition(at)
        case ast.ClassDef() as at:
            return _of_class(at)
        case ast.ImportFrom(level=0, module=str(source)) as at:
            original = next(a.name for a in at.names if (a.asname or a.name) == function)
            # A submodule has no entry in its package's file.
            if source_file(f"{source}.{original}") is None:
                return of_name(f"{source}:{original}", where, kind)
    return None


def source_file(module: str) -> Path | None:
    """Return the Python file of a module, without importing it or the packages above; None if there is none."""
    package, *rest = module.split(".")
    spec = find_spec(package)
    if spec is None:
        return None
    if not rest and spec.origin is not None and not spec.submodule_search_locations:
        return Path(spec.origin) if spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*rest)
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return path
    return None


def _of_definition(at: ast.FunctionDef | ast.AsyncFunctionDef, bound: int = 0) -> Parameters | None:
    """Return the parameters of a function after the first `bound` ones; None if it is decorated."""
    if at.decorator_list:
        return None
    a = at.args
    positional = [p.arg for p in (*a.posonlyargs, *a.args)]
    without = positional[: len(positional) - len(a.defaults)][bound:]
    without += [p.arg for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
    own = positional[:bound]
    return Parameters(
        tuple(positional[bound:]),
        tuple(p.arg for p in (*a.args, *a.kwonlyargs) if p.arg not in own),
        tuple(without),
        a.kwarg is not None and a.kwarg.arg != "_",
        a.vararg is not None,
        isinstance(at, ast.AsyncFunctionDef),
    )


def _of_class(at: ast.ClassDef) -> Parameters | None:
    """Return the parameters of a class's own `__init__`; None if it has none, or if a call may do something else."""
    methods = {s.name: s for s in at.body if isinstance(s, ast.FunctionDef)}
    if at.decorator_list or at.keywords or "__new__" in methods or "__init__" not in methods:
        return None
    return _of_definition(methods["__init__"], bound=1)


def _bound(statements: Collection[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the names that a module's statements and their branches bind, with the statement of each."""
    bound: dict[str, ast.stmt] = {}
    for s in statements:
        match s:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound[s.name] = s
            case ast.Import() | ast.ImportFrom():
                bound |= {(a.asname or a.name).split(".")[0]: s for a in s.names}
            case _:
                names = [n.id for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
                bound |= dict.fromkeys(names, s)
        for field in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(s, field, ())
            if not isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for part in inner:
                    bound |= _bound(part.body if isinstance(part, ast.ExceptHandler) else [part])
    return bound


def check_arguments(
    parameters: Parameters, arguments: Collection[str], where: str, function: str, given: Collection[str] = ()
) -> None:
    """Raise ValueError, naming `where`, for an argument that a function does not take.

    given: arguments that the pipeline passes itself.
    """
    own = [n for n in parameters.named if n not in given]
    for argument in arguments:
        if argument in given:
            raise ValueError(f"{where}: the pipeline itself passes {argument} to {function}: leave it out")
        if argument not in parameters.named and not parameters.takes_more:
            hint = nearest(argument, own) if own else "it takes none"
            raise ValueError(f"{where}: {function} takes no argument {argument!r}; {hint}")


def check_required(
    parameters: Parameters, arguments: Collection[str], where: str, function: str, given: Collection[str]
) -> None:
    """Raise ValueError, naming `where`, for a parameter without a default that gets no value."""
    missing = [n for n in parameters.required if n not in arguments and n not in given]
    if missing:
        raise ValueError(f"{where}: {function} needs {', '.join(missing)}, which the recipe does not give")
