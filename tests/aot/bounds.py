"""What is committed of each program, and what may differ from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.aot.account import Account
from tests.aot.programs import Case

BOUNDS = Path(__file__).with_name("bounds.json")
CASES = [
    Case("sft", "qwen3-0.6b", "v5e:2x4"),
    Case("grpo", "qwen3-0.6b", "v5e:2x4"),
    Case("prefill", "qwen3-0.6b", "v5e:2x4"),
    Case("decode", "qwen3-0.6b", "v5e:2x4"),
    Case("sft", "llama-3-8b", "v5e:4x4"),
]
OPTIONS = {
    # Products in turn with parts of their operands are as many collectives as parts: as one each, they can be counted.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}
MEMORY = 1.05
"""How much more a program may hold than what is committed."""
FLOPS = 1.15
"""FLOPs of a device against its share of the model's."""


def row(found: Account, ideal: float, seconds: float) -> dict[str, Any]:
    """What is committed of a program."""
    return {
        "held_mb": round(found.held / 1e6, 1),
        "temporary_mb": round(found.temporary / 1e6, 1),
        "flops_share": round(found.flops / ideal, 3),
        "collectives": found.collectives,
        "compile_cpu_seconds": round(seconds),
    }


def broken(found: dict[str, Any], known: dict[str, Any] | None) -> list[str]:
    """What a program does worse than is committed, in words."""
    if known is None:
        return ["nothing is committed of it: python -m tests.aot --write"]
    wrong = []
    for name in ("held_mb", "temporary_mb"):
        if found[name] > known[name] * MEMORY:
            wrong.append(f"{name} {found[name]} where {known[name]} is committed")
    if found["flops_share"] > FLOPS:
        wrong.append(f"FLOPs are {found['flops_share']} of the device's share, more than {FLOPS}")
    for kind, (count, size) in found["collectives"].items():
        most, largest = known["collectives"].get(kind, (0, 0))
        if count > most or size > largest:
            wrong.append(f"{kind}: {count} of up to {size} bytes where {most} of up to {largest} are committed")
    return wrong


def table(known: dict[str, Any]) -> str:
    """The rows of the docs' table."""
    lines = [
        "| program, model | topology | held, temporary MB a chip | FLOPs share | collectives | compile, CPU s |",
        "|---|---|---|---|---|---|",
    ]
    for name, at in known.items():
        program, model, topology = name.split()
        sent = ", ".join(f"{count} {kind}" for kind, (count, _) in at["collectives"].items())
        size = f"{at['held_mb']:,.0f}, {at['temporary_mb']:,.0f}"
        share = f"{at['flops_share']:.2f}"
        lines.append(f"| {program}, {model} | {topology} | {size} | {share} | {sent} | {at['compile_cpu_seconds']} |")
    return "\n".join(lines)
