"""Tests as data sets publish them: asserts, functions for pytest, classes of unittest, and HumanEval's `check`."""

from __future__ import annotations

import ast
import warnings

from rlhf.tuning.python_syntax import parse

_ACTS = (ast.Assert, ast.Raise, ast.Call, ast.Attribute, ast.Subscript)
"""Parts of a program without one of which it cannot fail: a list of texts, read as a program, passes for any code."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CASE = """
import unittest
_result = unittest.defaultTestLoader.loadTestsFromTestCase({name}).run(unittest.TestResult())
assert _result.wasSuccessful() and _result.testsRun > len(_result.skipped), _result
"""
_SET_UP = ("setup_method", "setup_class", "teardown_method", "teardown_class")


class _WithoutMain(ast.NodeTransformer):
    """Without calls of `unittest.main`, which end a program before its result is known."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        return ast.Pass() if called in ("unittest.main", "main") else node


def runnable(test: str, entry_point: str | None = None) -> str:
    """The program with calls of the tests that it only defines: functions and classes that pytest and unittest run.

    `check(candidate)` is called with `entry_point`. Raises ValueError for a text that is no Python, for a program that
    no code fails, and for a test that needs arguments.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = parse(test, "<test>")
            compile(tree, "<test>", "exec", dont_inherit=True)
            main = "unittest" in test and "main(" in test
            tree = _WithoutMain().visit(tree) if main else tree
    # Nested too deep.
    except (MemoryError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    definitions = [node for node in tree.body if isinstance(node, (*_FUNCTIONS, ast.ClassDef))]
    nodes = [part for node in tree.body if node not in definitions for part in ast.walk(node)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    added, cases = "", {"TestCase", "IsolatedAsyncioTestCase"}
    for node in definitions:
        if isinstance(node, ast.ClassDef) and cases & {ast.unparse(base).rpartition(".")[2] for base in node.bases}:
            cases.add(node.name)
            # Also where it is named: a runner of its own raises nothing.
            added += _CASE.format(name=node.name) if _tests(node) else ""
        elif node.name not in names:
            added += _call(node, entry_point)
    if not added and not any(isinstance(node, _ACTS) for node in nodes):
        raise ValueError("it has no statement that can fail")
    return f"{ast.unparse(tree)}\n{added}" if added or main else test


def _tests(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [one for one in node.body if isinstance(one, _FUNCTIONS) and one.name.startswith("test")]


def _call(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, entry_point: str | None) -> str:
    """Return a program that runs a test which is only defined; empty for other code."""
    if isinstance(node, ast.ClassDef):
        tests = _tests(node) if node.name.startswith("Test") else []
        if tests and any(getattr(one, "name", "") in _SET_UP for one in node.body):
            raise ValueError(f"the class {node.name} has {' or '.join(_SET_UP[:2])}; call its tests")
        return "".join(f"{node.name}().{one.name}()\n" for one in tests if _is_called(one, 1))
    if node.name == "check" and len(node.args.args) == 1:
        if not entry_point or not entry_point.isidentifier():
            raise ValueError("check is called with the name in metadata.entry_point, which is missing")
        return f"check({entry_point})\n"
    return f"{node.name}()\n" if node.name.startswith("test") and _is_called(node, 0) else ""


def _is_called(node: ast.FunctionDef | ast.AsyncFunctionDef, own: int) -> bool:
    """Raises ValueError for a test that is a coroutine, or has more than its `own` arguments."""
    needed = len(node.args.posonlyargs + node.args.args) - len(node.args.defaults) - own
    if needed or isinstance(node, ast.AsyncFunctionDef):
        raise ValueError(f"{node.name} is a coroutine or needs arguments (fixtures, parametrize); call it")
    return True
