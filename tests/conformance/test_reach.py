"""Vectors test what runs: every function of `tuning` that an op calls is reached from a stage, or from the registry.

Static, by names. A node is a function, class or constant at the top of a module. It uses the names in its own source
that its module defines or imports; a class stands for all its methods. Roots are the stages, and what is loaded by
name: the algorithms of the registry and the reward functions of a recipe. A name that is used is taken as called.
"""

import ast
import functools
from pathlib import Path

import pytest

from rlhf.tuning.algorithms.registry import ALGORITHMS

ROOT = Path(__file__).parents[2]
OPS = sorted(path.stem for path in Path(__file__).parent.glob("ops_*.py"))
BY_NAME = {"rlhf.tuning.rewards.functions": "reward functions are named in a recipe"}
"""Modules whose every function counts as reached, with the reason."""

Node = tuple[str, str]


def module_of(path: Path) -> str:
    return ".".join(("rlhf", *path.relative_to(ROOT).with_suffix("").parts))


@functools.cache
def tree(module: str) -> ast.Module | None:
    path = ROOT / (module.removeprefix("rlhf.").replace(".", "/") + ".py")
    return ast.parse(path.read_text()) if path.is_file() else None


@functools.cache
def imported(module: str) -> dict[str, str]:
    """Names that a module imports anywhere, with the dotted module or object that each stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
    return found


def names_of(statement: ast.stmt) -> list[str]:
    """Names that a statement at the top of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return []


@functools.cache
def defined(module: str) -> dict[str, ast.stmt]:
    body = tree(module)
    return {} if body is None else {name: s for s in body.body for name in names_of(s)}


def resolved(dotted: str) -> Node | None:
    """The node of a dotted name, if it is one of this repository."""
    module, _, name = dotted.rpartition(".")
    return (module, name) if name in defined(module) else None


def uses(module: str, source: ast.AST) -> set[Node]:
    """Nodes that a piece of the module's source names."""
    imports = imported(module)
    found: set[Node | None] = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Name):
            found.add((module, node.id) if node.id in defined(module) else resolved(imports.get(node.id, "")))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(resolved(f"{imports.get(node.value.id, '')}.{node.attr}"))
    return {node for node in found if node is not None}


@functools.cache
def reached() -> frozenset[Node]:
    stages = [module_of(p) for p in (ROOT / "stages").rglob("*.py")]
    todo = {node for module in stages for node in uses(module, tree(module))}
    todo |= {(f"rlhf.tuning.algorithms.{entry.module}", "algorithm") for entry in ALGORITHMS.values()}
    todo |= {(module, name) for module in BY_NAME for name in defined(module)}
    done: set[Node] = set()
    while todo:
        node = todo.pop()
        done.add(node)
        todo |= uses(node[0], defined(node[0])[node[1]]) - done
    return frozenset(done)


@pytest.mark.slow
@pytest.mark.parametrize("ops", OPS)
def test_every_target_of_an_op_is_reached_by_a_stage(ops: str) -> None:
    module = f"tests.conformance.{ops}"
    targets = {node for node in uses(module, tree(module)) if node[0].startswith("rlhf.tuning.")}
    assert targets, "an op module that calls nothing of the project tests nothing"
    unreached = sorted(".".join(node) for node in targets - reached())
    assert not unreached, f"vectors test functions that no stage calls: {unreached}"


@pytest.mark.parametrize("room", ["tuning/losses", "tuning/algorithms"])
def test_no_public_function_is_reached_by_tests_alone(room: str) -> None:
    modules = [module_of(p) for p in (ROOT / room).glob("*.py")]
    public = {(m, n) for m in modules for n, s in defined(m).items() if isinstance(s, ast.FunctionDef) and n[0] != "_"}
    unreached = sorted(".".join(node) for node in public - reached())
    assert not unreached, f"no stage and no algorithm calls {unreached}"


def test_the_walk_sees_a_function_that_nothing_calls() -> None:
    assert ("rlhf.tuning.losses.policy", "clipped_surrogate") in reached()
    assert ("tests.conformance.harness", "load") not in reached()
