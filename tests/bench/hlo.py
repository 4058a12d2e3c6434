"""What each instruction of a compiled program does: FLOPs of its products, bytes that it reads and writes, its kind.

Read from XLA's text of an optimised module (`compiled.as_text()`, or a file of `--xla_dump_to`).
"""

import dataclasses
import math
import re
from collections.abc import Iterable

from tests.aot.account import BYTES

MOVES = {"copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "pad", "concatenate", "broadcast"}
MOVES |= {"reshape", "reverse", "convert", "gather", "iota"}
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
"""Instructions that are no work by themselves."""
HOLDERS = {"while", "conditional", "call"}
"""Instructions whose work is that of the computations which they call."""

_LINE = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$")
_HEAD = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """Type and shape of a value."""

    type: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return BYTES.get(self.type, 4) * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    result: tuple[Array, ...]
    operands: tuple[str, ...]
    calls: str | None
    attributes: str
    where: str
    """The path of functions and the primitive in JAX that it is from."""
    root: bool


@dataclasses.dataclass(frozen=True)
class Work:
    """What one run of an instruction is."""

    kind: str
    """`products TYPE`, `moves` (copies, transposes, slices), `elementwise` or `holder`."""
    flops: float
    bytes: int
    what: str
    """Shape of the result, and the primitive."""


class Module:
    """A compiled program's instructions by name."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        inside: dict[str, Instruction] = {}
        for line in text.splitlines():
            if head := _HEAD.match(line):
                inside = self.computations.setdefault(head[1], {})
            elif found := _instruction(line):
                inside[found.name] = found
        self.name = text[len("HloModule ") :].split(",", 1)[0]

    def work(self) -> dict[str, Work]:
        """The work of each instruction that runs by itself: those of fused computations are in their fusion's."""
        fused = {
            i.calls
            for inside in self.computations.values()
            for i in inside.values()
            if i.calls and i.opcode == "fusion"
        }
        return {
            i.name: self._work(i, inside)
            for name, inside in self.computations.items()
            if name not in fused
            for i in inside.values()
            if i.opcode not in FREE
        }

    def _work(self, i: Instruction, around: dict[str, Instruction]) -> Work:
        inside = self.computations.get(i.calls or "", {}) if i.opcode == "fusion" else {}
        parts = list(inside.values()) or [i]
        flops = sum(_flops(p, inside or around) for p in parts)
        types = {_type_of_product(p, inside or around) for p in parts if p.opcode == "dot" or _by_kernel(p)}
        if i.opcode in HOLDERS:
            kind = "holder"
        elif types:
            kind = f"products {'+'.join(sorted(types))}"
        elif {p.opcode for p in parts} <= MOVES | FREE:
            kind = "moves"
        else:
            kind = "elementwise"
        shape = ",".join(f"{a.type}[{','.join(map(str, a.shape))}]" for a in i.result[:2])
        return Work(kind, flops, self._bytes(i, around, inside), f"{shape} {i.where.rpartition('/')[2] or i.opcode}")

    def _bytes(self, i: Instruction, around: dict[str, Instruction], inside: dict[str, Instruction]) -> int:
        """Bytes read and written. Of a stack of layers that is sliced, or written in place, the part counts alone."""
        if i.opcode in HOLDERS:
            return 0
        if not inside:
            if i.opcode in ("dynamic-slice", "slice", "gather"):
                return 2 * _size(i)
            if i.opcode == "dynamic-update-slice":
                return 2 * _size(around[i.operands[1]])
            return _size(i) + sum(_size(around[name]) for name in i.operands if name in around)
        total = 0
        for parameter in (p for p in inside.values() if p.opcode == "parameter"):
            users = [p for p in inside.values() if parameter.name in p.operands]
            first = bool(users) and all(u.operands[0] == parameter.name for u in users)
            if first and all(u.opcode in ("dynamic-slice", "slice", "gather") for u in users):
                total += sum(_size(u) for u in users)
            elif not (first and all(u.opcode == "dynamic-update-slice" for u in users)):
                total += _size(parameter)
        [root] = [p for p in inside.values() if p.root]
        written = [inside[n] for n in root.operands] if root.opcode == "tuple" else [root]
        for value in written:
            while value.opcode == "bitcast":
                value = inside[value.operands[0]]
            in_place = value.opcode == "dynamic-update-slice"
            total += _size(inside[value.operands[1]]) if in_place else _size(value)
        return total


def _instruction(line: str) -> Instruction | None:
    found = _LINE.match(line)
    if found is None:
        return None
    name, result, opcode, rest = found.groups()
    arguments, _, attributes = rest.partition(")")
    calls = re.search(r"(?:calls|to_apply)=%([\w.-]+)", attributes)
    where = re.search(r'op_name="([^"]*)"', attributes)
    return Instruction(
        name=name, opcode=opcode, result=tuple(_arrays(result)), operands=tuple(_NAME.findall(arguments)),
        calls=calls[1] if calls else None, attributes=attributes, where=where[1] if where else "",
        root=line.lstrip().startswith("ROOT "),
    )  # fmt: skip


def _arrays(text: str) -> Iterable[Array]:
    for kind, sizes in _ARRAY.findall(text):
        yield Array(kind, tuple(int(n) for n in sizes.split(",") if n))


def _size(i: Instruction) -> int:
    return sum(a.bytes for a in i.result)


def _flops(i: Instruction, around: dict[str, Instruction]) -> float:
    """Two for each product of numbers that a matrix product sums."""
    if i.opcode != "dot" and not _by_kernel(i):
        return 0.0
    left = around[i.operands[0]].result[0].shape
    if _by_kernel(i):
        return 2.0 * i.result[0].shape[1] * math.prod(left)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
    sizes = [left[int(n)] for n in contracted[1].split(",") if n] if contracted else []
    return 2.0 * math.prod(i.result[0].shape) * math.prod(sizes)


def _by_kernel(i: Instruction) -> bool:
    """Whether it is a matrix product of this project (`tuning/models/matmul.c`)."""
    return i.opcode == "custom-call" and 'custom_call_target="rlhf_matmul' in i.attributes


def _type_of_product(i: Instruction, around: dict[str, Instruction]) -> str:
    """The narrower type of its operands, in which a processor may multiply; the sum's type is the result's."""
    if _by_kernel(i):
        return "bf16"
    types = [around[name].result[0].type for name in i.operands[:2]]
    return min(types, key=lambda t: BYTES.get(t, 4))
