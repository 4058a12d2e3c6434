"""How many bytes a traced program holds at once beside its arguments, and how many it moves, without compiling it.

A model of what XLA does to a program: elementwise operations and reshapes are part of what reads them, everything else
has a buffer from its equation to its last reader; a loop has its carry once, its stacked outputs, and the most that its
body holds; a branch the most of its branches. What XLA does beyond that, its own order and the layouts of a platform,
is the error of the estimate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

FUSED = frozenset(
    """
    abs add add_any and atan2 bitcast_convert_type broadcast_in_dim ceil clamp concatenate convert_element_type copy
    copy_p cos div dynamic_slice eq erf erf_inv exp exp2 expand_dims expm1 floor ge gt integer_pow iota is_finite le
    log log1p logistic lt max min mul name ne neg not optimization_barrier or pad pow pvary random_bits
    random_unwrap random_wrap real reduce_precision rem reshape rev round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin slice split sqrt square squeeze stop_gradient sub tan tanh
    threefry2x32 transpose xor
    """.split()  # noqa: SIM905
)
"""Operations that have no buffer of their own unless something needs one."""
REDUCED = frozenset(
    ["reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"]
)
"""Operations that read fused inputs and write a buffer."""
IN_PLACE = frozenset(["dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter_max", "scatter_mul"])
"""Operations that write into their first operand where nothing else needs it."""
_ONCE = frozenset(["exp", "tanh", "log", "div", "rsqrt", "sqrt", "pow", "logistic", "erf", "integer_pow", "cos", "sin"])
"""Operations that are not done twice for two readers."""

WHOLE = frozenset(("dot_general", "dynamic_slice", "slice"))
"""Operations whose results are whole on each device: weights that were gathered, gradients that are not yet summed."""

_LOOPS = frozenset(("scan", "while", "cond"))
_VIEWS = frozenset(("reshape", "squeeze", "expand_dims", "name", "stop_gradient", "copy", "optimization_barrier"))
"""Operations whose result may be their operand's buffer."""

Size = Callable[[Any, bool], float]
"""(an abstract value, whether it is whole on each device) -> its bytes on a device."""


@dataclasses.dataclass(frozen=True)
class Held:
    """Of a program."""

    peak: float
    """Most bytes at once beside its arguments, its results included."""
    moved: float
    """Bytes that products and kernels read and write: what is elementwise may be part of them."""
    within: float = 0.0
    """Of the peak, what the body of a loop holds."""


def nbytes(aval: Any, whole: bool = True) -> float:
    """Bytes of an abstract value on the device; of keys of random numbers and the like none that matter."""
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return 0.0
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not hasattr(aval, "shape"):
        return 0.0
    try:
        return float(math.prod(aval.shape) * np.dtype(dtype).itemsize)
    except TypeError:
        return 8.0 * math.prod(aval.shape)


@dataclasses.dataclass
class _Step:
    """An equation after calls are inlined; variables are numbers."""

    name: str
    reads: list[int]
    writes: list[int]
    equation: Any


class _Flat:
    """The equations of a jaxpr, with calls in place."""

    def __init__(self, jaxpr: Any):
        self.steps: list[_Step] = []
        self.avals: dict[int, Any] = {}
        self._numbers = itertools.count()
        scope = {var: self._new(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)}
        self.inputs = list(scope.values())
        self._inline(jaxpr, scope)
        self.outputs = [scope[v] for v in jaxpr.outvars if not isinstance(v, core.Literal)]
        self._prune()

    def _new(self, aval: Any) -> int:
        number = next(self._numbers)
        self.avals[number] = aval
        return number

    def _inline(self, jaxpr: Any, scope: dict[Any, int]) -> None:
        for equation in jaxpr.eqns:
            inner = _called(equation)
            if inner is not None:
                inside: dict[Any, int] = {v: self._new(v.aval) for v in inner.constvars}
                for outer, own in zip(equation.invars, inner.invars, strict=True):
                    inside[own] = self._new(own.aval) if isinstance(outer, core.Literal) else scope[outer]
                self._inline(inner, inside)
                for outer, own in zip(equation.outvars, inner.outvars, strict=True):
                    scope[outer] = self._new(own.aval) if isinstance(own, core.Literal) else inside[own]
                continue
            reads = [scope[v] for v in equation.invars if not isinstance(v, core.Literal)]
            for var in equation.outvars:
                scope[var] = self._new(var.aval)
            self.steps.append(_Step(equation.primitive.name, reads, [scope[v] for v in equation.outvars], equation))

    def _prune(self) -> None:
        needed, kept = set(self.outputs), []
        for step in reversed(self.steps):
            if needed & set(step.writes):
                needed |= set(step.reads)
                kept.append(step)
        self.steps = kept[::-1]


def _called(equation: Any) -> Any:
    """The jaxpr that an equation only calls; None where it is an operation, a loop or a kernel."""
    if equation.primitive.name in (
        "scan",
        "while",
        "cond",
        "pallas_call",
        "custom_call",
    ) or equation.primitive.name.startswith("scatter"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(name)
        if inner is not None and (hasattr(inner, "eqns") or hasattr(inner, "jaxpr")):
            plain = _plain(inner)
            return plain if len(plain.invars) == len(equation.invars) else None
    return None


def held(closed: Any, size: Size = nbytes, free: Sequence[int] = ()) -> Held:
    """What a closed jaxpr holds and moves.

    size: bytes of a value, smaller than `nbytes` for one that is cut over devices. free: numbers of arguments whose
    buffers it may write into.
    """
    return _held(_plain(closed), size, set(free))


def _held(jaxpr: Any, size: Size, free: set[int]) -> Held:
    flat = _Flat(jaxpr)
    whole = {w for step in flat.steps if step.name in WHOLE for w in step.writes}
    sizes = {number: size(aval, number in whole) for number, aval in flat.avals.items()}
    inputs = set(flat.inputs)
    roots, made = _fused(flat, inputs)
    last: dict[int, int] = {}
    for at, step in enumerate(flat.steps):
        for number in itertools.chain(*(roots[r] for r in step.reads)):
            last[number] = at
    for number in itertools.chain(*(roots[o] for o in flat.outputs)):
        last[number] = len(flat.steps)
    owned = {number for i, number in enumerate(flat.inputs) if i in free}
    alive: dict[int, float] = {}
    peak = now = moved = within = 0.0
    for at, step in enumerate(flat.steps):
        inner, inside = _inside(step, size)
        moved += inside
        written = [w for w in step.writes if w in made]
        reused: set[int] = set()
        for w in written:
            # A buffer whose last reader this is takes the result, where it is as large.
            ends = [
                r
                for r in itertools.chain(*(roots[x] for x in step.reads))
                if last.get(r) == at and (r in alive or r in owned) and r not in reused and sizes[r] == sizes[w]
            ]
            if ends and (step.name in FUSED | IN_PLACE or step.name in _LOOPS):
                reused.add(ends[0])
                if ends[0] in owned:
                    owned.discard(ends[0])
                    alive[w] = 0.0
                    continue
                alive[w] = alive.pop(ends[0])
            else:
                alive[w] = sizes[w]
                now += sizes[w]
        if step.name not in _LOOPS | FUSED | REDUCED:
            moved += _traffic(step, sizes)
        if now + inner > peak:
            peak, within = now + inner, inner
        for number in [n for n in alive if last.get(n, at) <= at]:
            now -= alive.pop(number)
    return Held(peak, moved, within)


def _traffic(step: _Step, sizes: dict[int, float]) -> float:
    """Bytes that an operation reads and writes: of a table only what it takes from it or puts into it."""
    if step.name == "gather":
        return 2 * sum(sizes[w] for w in step.writes)
    if step.name in IN_PLACE:
        return 2 * sum(sizes[r] for r in step.reads[1:])
    return sum(sizes[x] for x in (*step.reads, *step.writes))


def _fused(flat: _Flat, inputs: set[int]) -> tuple[dict[int, set[int]], set[int]]:
    """For each variable the buffers that its readers read, and the variables that are buffers."""
    readers: dict[int, list[str]] = {}
    for step in flat.steps:
        for read in step.reads:
            readers.setdefault(read, []).append(step.name)
    outputs = set(flat.outputs)
    roots: dict[int, set[int]] = {number: {number} for number in flat.avals}
    made: set[int] = set()
    for step in flat.steps:
        for w in step.writes:
            users = readers.get(w, [])
            fusible = step.name in FUSED
            needs = w in outputs or any(u not in FUSED | REDUCED for u in users)
            twice = len(users) > 1 and step.name in _ONCE
            source = set().union(*(roots[r] for r in step.reads)) if step.reads else set()
            view = step.name in _VIEWS and len(source) == 1 and not (w in outputs and source & inputs)
            if view or (fusible and not needs and not twice):
                roots[w] = source
            else:
                made.add(w)
    return roots, made


def _inside(step: _Step, size: Size) -> tuple[float, float]:
    """(bytes that an equation holds beside its results, bytes that it moves within)."""
    params, equation = step.equation.params, step.equation
    if step.name == "scan":
        body = _plain(params["jaxpr"])
        # In the order of constants, what is carried, what is read of each turn, which outside has an axis more.
        stacked = sum(_more_axes(v, inner) for v, inner in zip(equation.invars, body.invars, strict=True))
        carried = sum(not _more_axes(v, inner) for v, inner in zip(equation.outvars, body.outvars, strict=True))
        end = len(body.invars) - stacked
        found = _held(body, size, set(range(end - carried, end)))
        return found.peak, found.moved * params["length"]
    if step.name == "while":
        body = _plain(params["body_jaxpr"])
        # How often it runs is not known: its bytes are counted once.
        found = _held(body, size, set(range(len(body.invars) - len(equation.outvars), len(body.invars))))
        return found.peak, found.moved
    if step.name == "cond":
        branches = [_held(_plain(b), size, set()) for b in params["branches"]]
        results = sum(size(v.aval, False) for v in equation.outvars)
        return max(0.0, max(b.peak for b in branches) - results), max(b.moved for b in branches)
    return 0.0, 0.0


def _plain(jaxpr: Any) -> Any:
    """Without its constants, which versions of JAX wrap it with or not."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def _more_axes(outer: Any, inner: Any) -> bool:
    return len(outer.aval.shape) > len(inner.aval.shape)
