"""Whether a built-in reward can read an answer, for checks before any completion is sampled.

Tests have the forms in which data sets publish them: asserts, functions for pytest, classes of unittest, and
HumanEval's `check`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.tuning.python_syntax import parse
from rlhf.tuning.rewards import mathematics, numbers

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


Check = Callable[[str | None, Mapping[str, Any]], str | None]


def accepted(answer: str | None, metadata: Mapping[str, Any] | None) -> list[str]:
    """The accepted answers: `metadata.answers` where the data has several, else the answer; empty without one."""
    several = (metadata or {}).get("answers")
    if isinstance(several, list):
        return [one if isinstance(one, str) else json.dumps(one) for one in several]
    return [] if answer is None else [answer]


def number(answer: str) -> numbers.Written:
    """The number that an answer is. Raises ValueError for another text."""
    found = numbers.only(answer)
    if found is None:
        raise ValueError(f"one number, got {_shown(answer)}{_taken_out(answer)}")
    return found


def _unless(readable: Callable[[str], Any], expected: str) -> Check:
    """The check that one of the accepted answers is readable."""

    def check(answer: str | None, metadata: Mapping[str, Any]) -> str | None:
        several = metadata.get("answers", [])
        if not isinstance(several, list) or not all(isinstance(one, str | int | float) for one in several):
            return f"a text or number as answer, or a list of them, got {_shown(several)}"
        texts = accepted(answer, metadata)
        if not texts and answer is None or any(map(readable, texts)):
            return None
        return f"{expected}, got {_shown(answer if len(texts) < 2 else texts)}{_taken_out(answer)}"

    return check


def code_passes(answer: str | None, metadata: Mapping[str, Any]) -> str | None:
    """The tests (`tests_of`) are Python that compiles and can fail, or pairs of input and output."""
    tests = tests_of(answer, metadata)
    if not isinstance(tests, list):
        return f"a list of tests in metadata.tests, got {_shown(tests)}"
    for test in tests:
        if isinstance(test, str):
            try:
                runnable(test, metadata.get("entry_point"))
            except (SyntaxError, ValueError) as error:
                return f"tests in Python that can fail, such as assert f(2) == 4, got {_shown(test)} ({error})"
        elif not (isinstance(test, Mapping) and all(isinstance(test.get(n), str) for n in ("input", "output"))):
            return f"tests as programs or as {{input, output}}, got {_shown(test)}"
    return None


def tests_of(answer: str | None, metadata: Mapping[str, Any]) -> Any:
    """The tests of a completion's code: `metadata.tests`, else all of `metadata.answers`, else the answer."""
    return metadata.get("tests") or metadata.get("answers") or ([] if answer is None else [answer])


CHECKS: dict[str, Check] = {
    "exact_match": _unless(str.strip, "a text that is not empty"),
    "number_match": _unless(numbers.only, "one number"),
    "math_equal": _unless(mathematics.expressions, "a mathematical expression"),
    "code_passes": code_passes,
}
"""By name of the reward. Rewards that are not here take any text, or no answer."""


def unreadable(name: str, answer: str | None, metadata: Mapping[str, Any]) -> str | None:
    """The form of answer that the reward `name` expects; None if it can read this one, or does not apply."""
    return CHECKS[name](answer, metadata) if name in CHECKS else None


def _taken_out(answer: str | None) -> str:
    """How the number is had of an answer that is a whole solution, as GSM8K publishes them; empty for others."""
    marked = re.findall(r"#+(?= *\S+ *$)", answer or "")
    if not marked:
        return ""
    mark = marked[-1]
    return f"; `fields: {{answer: {{from: answer, pattern: '{mark} (.*)'}}}}` in data takes the text after {mark}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
