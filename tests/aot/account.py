"""What a compiled program holds, computes and sends, read from the compiler's own word."""

import collections
import dataclasses
import math
import re
from typing import Any

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
BYTES |= {"s16": 2, "u16": 2, "f8e4m3fn": 1, "f8e5m2": 1}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"= (?P<shapes>\(?[^=]*?\)?) (?P<kind>{_KINDS})(-start)?\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Account:
    """Of one device."""

    held: int
    """Bytes of arguments and results, those in the same place counted once."""
    temporary: int
    """Bytes beside them."""
    flops: float
    """FLOPs of products where each loop goes round once; kernels are not counted. 0 where the compiler does not say,
    as that of GPUs does not."""
    collectives: dict[str, list[int]]
    """For each kind and type, as `all-gather bf16`: how many the program has, and bytes of the largest result."""


def account(compiled: Any) -> Account:
    """The account of a compiled program."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    flops = float((compiled.cost_analysis() or {}).get("flops", 0.0))
    return Account(int(held), int(memory.temp_size_in_bytes), flops, collectives(compiled.as_text()))


def collectives(text: str) -> dict[str, list[int]]:
    """Collectives of an HLO module by kind and type: [count, bytes of the largest].

    One that is hidden behind other work is written several times, with one channel. A sum of which each device keeps
    its part, which a TPU computes as a sum inside of a fusion, is a reduce-scatter.
    """
    found: dict[str, tuple[str, int]] = {}
    computation = ""
    for number, line in enumerate(text.splitlines()):
        if start := _COMPUTATION.match(line):
            computation = start[1]
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        shapes = [(t, math.prod(map(int, filter(None, s.split(","))))) for t, s in _SHAPE.findall(match["shapes"])]
        # The types of counters and contexts are no part of what is sent.
        sizes = [(t, n * BYTES[t]) for t, n in shapes if t in BYTES]
        if not sizes:
            continue
        widest, size = max(sizes, key=lambda x: x[1])
        kind = "reduce-scatter" if "all-reduce-scatter" in computation else match["kind"]
        channel = re.search(r"channel_id=(\d+)", line)
        found[channel[1] if channel else f"line {number}"] = f"{kind} {widest}", size
    counted: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for name, size in found.values():
        counted[name] = [counted[name][0] + 1, max(counted[name][1], size)]
    return dict(sorted(counted.items()))


_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%[\w.\-]+ = .*? (?P<op>[a-z][\w\-]*)\(")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_CONTROL = {"while", "conditional", "call"}


def loops(text: str) -> dict[str, int]:
    """Kernels of one iteration of each loop of a GPU's program, without those of loops and branches inside it.

    The loop of decoding has the most: its iteration is a step.
    """
    bodies = set(re.findall(r"\bbody=%?([\w.\-]+)", text))
    counted, computation = dict.fromkeys(bodies, 0), ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            computation = start[1]
        elif computation in counted and (match := _INSTRUCTION.match(line)):
            counted[computation] += match["op"] not in _FREE | _CONTROL
    return counted


def concatenations(text: str) -> list[int]:
    """Bytes of the result of each concatenation in an HLO module."""
    shapes = re.findall(r"= (\w+)\[([\d,]*)\]\S* concatenate\(", text)
    return [BYTES[kind] * math.prod(map(int, filter(None, sizes.split(",")))) for kind, sizes in shapes]
