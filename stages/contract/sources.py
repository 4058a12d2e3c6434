"""Digests, for keys, of code that a stage loads by name: reward functions and algorithms."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from pathlib import Path

from rlhf.stages.contract import signatures
from rlhf.stages.contract.fingerprint import OWN, Code, find_spec, library_versions, package_versions, reached
from rlhf.tuning.names import closest
from rlhf.tuning.python_syntax import parse


def function_digests(name: str, where: str) -> dict[str, str]:
    """Return hashes of a reward function's code: for `module:function` its module and the modules next to it.

    Empty for a built-in, whose code the stage reaches by import. Raises ValueError, naming `where`,
    for a function that is not there; nothing is executed.
    """
    from rlhf.tuning.rewards.functions import BUILT_IN, PACKAGES, near

    if name in PACKAGES:
        return {f"package:{n}": v for n, v in library_versions(PACKAGES[name]).items()}
    if name in BUILT_IN:
        return {}
    if ":" not in name:
        raise ValueError(f"{where}: no reward function {name!r}; {near(name)}")
    return user_digests(name, where)


def built_in_parameters(name: str) -> signatures.Parameters | None:
    """The parameters of a built-in reward function; None for a name that is none."""
    from rlhf.tuning.rewards.functions import BUILT_IN

    return signatures.of_callable(BUILT_IN[name]) if name in BUILT_IN else None


def is_own_source(name: str) -> bool:
    """Whether a data source is the user's `module:function`."""
    from rlhf.tuning.data import files, tasks

    return ":" in name and name not in tasks.BUILTIN and not files.is_files(name)


def user_digests(name: str, where: str) -> dict[str, str]:
    """Return hashes of a user's `module:function`: of each of the user's modules, and of all that they reach;
    and the versions of the packages that they import.

    Raises ValueError, naming `where`, for a module that is not there; nothing is executed.
    """
    module, code = name.partition(":")[0], user_code(name, where)
    theirs = {f"module:{k}": v for k, v in code.modules.items() if k.split(".")[0] != OWN}
    # Modules of this project among them count by content alone: they may move.
    everything = json.dumps([sorted(set(code.modules.values())), code.imports])
    reach = {f"reached from {module}": hashlib.sha256(everything.encode()).hexdigest()[:16]}
    return theirs | reach | {f"package:{n}": v for n, v in package_versions(code.packages).items()}


def user_code(name: str, where: str) -> Code:
    """Return the code of a user's `module:function`. Raises as `user_digests`."""
    module = name.partition(":")[0]
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ValueError(f"{where}: {name!r} is a file: a module is written without, {dotted}:{name.partition(':')[2]}")
    # The folder of the top-level package: modules beside it count as the user's.
    name_of_top = module.split(".")[0]
    top = find_spec(name_of_top)
    taken = {*sys.stdlib_module_names, OWN}
    if (beside := Path(f"{name_of_top}.py").absolute()).is_file() and name_of_top in taken:
        raise ValueError(
            f"{where}: {beside} has the name of a module of Python or of this project; give the file another one"
        )
    places = [*(top.submodule_search_locations or []), top.origin] if top is not None else []
    if not places or not places[0]:
        near = closest(module, [path.stem for path in Path.cwd().glob("*.py")])
        hint = f"; did you mean {near}?" if near else "; or set PYTHONPATH to its folder"
        raise ValueError(f"{where}: no module {module!r} can be imported from {Path.cwd()}{hint}")
    try:
        code = reached(module, folder=Path(places[0]).parent)
    except SyntaxError as e:
        raise ValueError(f"{where}: {e.filename}, line {e.lineno}: {e.msg}") from e
    if module not in code.modules:
        raise ValueError(f"{where}: no module {module!r} can be imported from {Path.cwd()}")
    return code


def check_imports(module: str, where: str) -> None:
    """Raise ValueError for a module with an import at its top that cannot be found; its stage would fail hours later.

    Imports inside functions and `try` may be missing. Modules that change the import path are not checked.
    """
    parts = module.split(".")
    files = [signatures.source_file(".".join(parts[: i + 1])) for i in range(len(parts))]
    trees = [parse(path.read_bytes(), filename=str(path)) for path in files if path is not None]
    path = files[-1]
    named = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if path is None or named & {"sys", "site", "importlib"}:
        return
    for statement in trees[-1].body:
        match statement:
            case ast.Import():
                names = [alias.name for alias in statement.names]
            case ast.ImportFrom(level=0, module=str(name)):
                names = [name]
            case _:
                continue
        for name in names:
            package = name.split(".")[0]
            if package not in sys.modules and find_spec(package) is None:
                raise ValueError(
                    f"{where}: {path}, line {statement.lineno}: no module {package!r} can be imported; install it, or "
                    "import it in the function, or under `try`, where it may be missing"
                )


def data_digests(source: str, where: str) -> dict[str, str]:
    """Digests of a source of records: of files and tasks as `rlhf.tuning.data.tasks` has them, of a user's function by
    all the code that it reaches; environments likewise. Files that the function opens by itself are not seen."""
    from rlhf.tuning.data import files, tasks

    if source in tasks.PLAYED:
        return {"task": source} | user_digests(tasks.PLAYED[source], where)
    if files.is_files(source) or source in tasks.BUILTIN or ":" not in source:
        return tasks.source_digests(source)
    return {"task": source.partition(":")[2]} | user_digests(source, where)
