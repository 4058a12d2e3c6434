"""Parameters of a function or class that a recipe names, read from its module's syntax tree: nothing is executed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rlhf.stages.contract.fingerprint import find_spec
from rlhf.tuning.names import nearest

MOST_HOPS = 5
"""Modules, and bases of a class, through which a name is followed."""
WITHOUT_INIT = ("object", "Generic", "Protocol", "ABC")
"""Bases that take no arguments."""
_VALUES = ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.Set | ast.JoinedStr
"""What cannot be called, of what a name may be bound to."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What a function or class can be called with."""

    positional: tuple[str, ...]
    """Names of parameters that can be given by position, in order."""
    named: tuple[str, ...]
    """All parameters that can be given by name."""
    required: tuple[str, ...]
    """Those without a default."""
    takes_more: bool
    """Whether `**columns` takes further names. `**_` does too, but says that they have no effect: it is none."""
    takes_any: bool = False
    """Whether `*values` takes any number by position."""
    is_async: bool = False
    """Whether it is `async def`, whose calls return something to wait for."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The parameters of a reward that get prompts and completions: by name if they are called so, else the first
        two; of one in verl's form all that verl gives (`rlhf.tuning.rewards.calls`)."""
        if "solution_str" in self.named:
            return ("data_source", "solution_str", "ground_truth", "extra_info")
        names = ("prompts", "completions")
        by_name = "completions" in self.named and (*self.positional, *self.named)[0] in names
        return names if by_name else self.positional[:2]


def of_callable(function: Callable[..., Any]) -> Parameters:
    """The parameters of a function at hand."""
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
    """The parameters of `module:function`, or those of the constructor of `module:Class`.

    None where the tree does not tell (what is decorated, the result of a call, a class whose base is not found). kind:
    what is looked for, in words. Raises ValueError, naming `where`, for a name that its module does not define.
    """
    module, _, function = name.partition(":")
    return _parameters(module, function, f"{where}: ", kind, MOST_HOPS)


def source_file(module: str) -> Path | None:
    """The file of a module, found without importing it or the packages above; None where there is none in Python."""
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


def _parameters(module: str, name: str, where: str, kind: str, hops: int) -> Parameters | None:
    path = source_file(module)
    if path is None or not hops:
        return None
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as e:
        raise ValueError(f"{where}{path}, line {e.lineno}: {e.msg}") from e
    bound = _bound(tree.body)
    if name not in bound:
        # What `import *` and a module's `__getattr__` bring cannot be seen.
        if "*" in bound or "__getattr__" in bound:
            return None
        functions = ast.FunctionDef | ast.AsyncFunctionDef
        defined = functions if kind == "function" else functions | ast.ClassDef
        hint = nearest(name, [n for n, at in bound.items() if isinstance(at, defined)])
        raise ValueError(f"{where}{path.name} has no {kind} {name!r}; {hint}")
    at = bound[name]
    # Of several targets the value is a tuple, and one of them may be a function.
    alone = isinstance(at, ast.AnnAssign) or (isinstance(at, ast.Assign) and isinstance(at.targets[0], ast.Name))
    if isinstance(at, ast.Assign | ast.AnnAssign) and alone and isinstance(at.value, _VALUES):
        raise ValueError(f"{where}{path.name} has {name!r}, a value: expected a {kind}")
    if isinstance(at, ast.FunctionDef | ast.AsyncFunctionDef):
        return _of_definition(at)
    if isinstance(at, ast.ClassDef):
        return _of_class(at, module, bound, where, hops)
    if isinstance(at, ast.ImportFrom) and not at.level and at.module:
        original = next(a.name for a in at.names if (a.asname or a.name) == name)
        # A submodule has no entry in its package's file.
        if source_file(f"{at.module}.{original}") is None:
            return _parameters(at.module, original, where, kind, hops - 1)
    return None


def _of_definition(at: ast.FunctionDef | ast.AsyncFunctionDef, bound: int = 0) -> Parameters | None:
    """The parameters of a function; of a method without the first, which is bound. None where it is decorated."""
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


def _of_class(at: ast.ClassDef, module: str, bound: Mapping[str, ast.stmt], where: str, hops: int) -> Parameters | None:
    """The parameters of a class's `__init__`, its own or that of its base; None where the tree does not tell."""
    methods = _bound(at.body)
    # A decorator, a metaclass and `__new__` may make something else of a call.
    if at.decorator_list or at.keywords or "__new__" in methods:
        return None
    if "__init__" in methods:
        init = methods["__init__"]
        return _of_definition(init, bound=1) if isinstance(init, ast.FunctionDef) else None
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in at.bases]
    bases = [base for base in bases if not (isinstance(base, ast.Name) and base.id in WITHOUT_INIT)]
    if not bases:
        return Parameters((), (), (), False)
    # The first of several may leave it to the next.
    if len(bases) > 1 or not isinstance(bases[0], ast.Name) or bases[0].id not in bound:
        return None
    return _parameters(module, bases[0].id, where, "class", hops - 1)


def _bound(statements: Collection[ast.stmt]) -> dict[str, ast.stmt]:
    """The names that a module's statements bind, those of its branches included, and the statement of each."""
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
    """Raises ValueError, naming `where`, for an argument that a function does not take.

    given: what the pipeline passes itself.
    """
    own = [n for n in parameters.named if n not in given]
    for argument in arguments:
        if argument in given:
            raise ValueError(f"{where}: {argument} is given to {function} by the pipeline: leave it out")
        if argument not in parameters.named and not parameters.takes_more:
            hint = nearest(argument, own) if own else "it takes none"
            raise ValueError(f"{where}: {function} takes no argument {argument!r}; {hint}")


def check_required(
    parameters: Parameters, arguments: Collection[str], where: str, function: str, given: Collection[str] = ()
) -> None:
    """Raises ValueError, naming `where`, for a parameter without a default that nothing gives."""
    missing = [n for n in parameters.required if n not in arguments and n not in given]
    if missing:
        raise ValueError(f"{where}: {function} needs {', '.join(missing)}, which the recipe does not give")
