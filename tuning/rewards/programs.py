"""Tests as data sets publish them: asserts, functions for pytest, classes of unittest, and HumanEval's `check`."""

from __future__ import annotations

import ast
import warnings

_ACTS = (ast.Assert, ast.Raise, ast.Call, ast.Attribute, ast.Subscript, ast.Import, ast.ImportFrom)
"""Parts of a program without one of which it cannot fail: a list of texts, read as a program, passes for any code."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CASE = """
import unittest
_result = unittest.defaultTestLoader.loadTestsFromTestCase({name}).run(unittest.TestResult())
assert _result.wasSuccessful() and _result.testsRun > len(_result.skipped), _result
"""
_CLASS = "for _name in dir({name}):\n    if _name.startswith('test'): getattr({name}(), _name)()\n"


def runnable(test: str, entry_point: str | None = None) -> str:
    """The program with calls of the tests that it only defines: functions and classes that pytest and unittest run.

    `check(candidate)` is called with `entry_point`. Raises ValueError for a text that is no Python, and for a program
    that no code fails.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(test, "<test>")
            compile(tree, "<test>", "exec", dont_inherit=True)
    # Nested too deep.
    except (MemoryError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    acts = [node for node in tree.body if not isinstance(node, _DEFINITIONS)]
    # It would end the program before its result is known.
    mains = [node for node in acts if "unittest.main" in (ast.get_source_segment(test, node) or "")]
    nodes = [part for node in acts if node not in mains for part in ast.walk(node)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    tests = [node for node in tree.body if isinstance(node, _DEFINITIONS) and node.name not in names]
    added = [call for node in tests if (call := _call(node, entry_point))]
    if not added and not any(isinstance(node, _ACTS) for node in nodes):
        raise ValueError("it has no statement that can fail")
    lines = test.splitlines()
    for node in mains:
        lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return "\n".join([*lines, *added]) if added or mains else test


def _call(node: ast.stmt, entry_point: str | None) -> str:
    """A program that runs a test which is only defined; empty for what is no test."""
    if isinstance(node, ast.ClassDef):
        bases = {getattr(base, "attr", getattr(base, "id", "")) for base in node.bases}
        if any(base.endswith("TestCase") for base in bases):
            return _CASE.format(name=node.name)
        return _CLASS.format(name=node.name) if node.name.startswith("Test") else ""
    if not isinstance(node, ast.FunctionDef):
        return ""
    needed = len(node.args.posonlyargs + node.args.args) - len(node.args.defaults)
    if node.name == "check" and needed == 1 and entry_point and entry_point.isidentifier():
        return f"check({entry_point})"
    return f"{node.name}()" if node.name.startswith("test") and not needed else ""
