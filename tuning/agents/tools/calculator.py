"""The tool `calculator`: arithmetic on numbers, read by Python's parser and computed here; nothing is evaluated."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.tuning.python_syntax import parse

LONGEST = 300
"""Characters of an expression."""
BITS = 4096
"""Largest whole number that a power may give."""

Number = int | float


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base).bit_length() * abs(exponent) > BITS:
        raise ValueError(f"the power has more than {BITS} bits")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the power is no real number")
    return value


_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: Mapping[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
# As people write them; `^` is a power, which binds as one.
_SIGNS = str.maketrans({"^": "**", "×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


def make() -> Callable[[str], str]:
    """The tool."""

    def calculator(expression: str) -> str:
        """Computes an arithmetic expression.

        Args:
            expression: Numbers with + - * / // % ** and parentheses, such as 12 * (3 + 4).
        """
        return shown(value_of(expression))

    return calculator


def value_of(expression: str) -> Number:
    """The value of an arithmetic expression. Raises ValueError, ZeroDivisionError or OverflowError."""
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters: at most {LONGEST} are allowed")
    try:
        tree = parse(expression.translate(_SIGNS).strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"not an arithmetic expression: {expression}") from None
    return _value(tree.body)


def shown(value: Number) -> str:
    """A number as text: whole numbers without a point, others with 12 significant digits at most."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OverflowError("the result is too large")
        if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        return f"{value:.12g}"
    return str(value)


def _value(node: ast.AST) -> Number:
    # A subclass of int, and no number to people.
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value: Number = _UNARY[type(node.op)](_value(node.operand))
        return value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
        return value
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")
