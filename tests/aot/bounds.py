"""What is committed of each program, and what may differ from it."""

import json
from pathlib import Path
from typing import Any

from tests.aot.account import Account

BOUNDS = Path(__file__).with_name("bounds.json")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compiled-programs.md"
HEAD = (
    "| program, model | topology | held, temporary MB a device | FLOPs share | collectives | kernels | compile, CPU s |"
)
MEMORY = 1.05
"""How much more a program may hold than what is committed."""
FLOPS, GROWTH = 1.15, 1.01
"""FLOPs of a device against its share of the model's. A program that is committed with more may not grow past this."""


LESS, SMALL = 0.9, 0.1
"""A program with less of what is committed than this share has changed; amounts below the other are noise."""


def committed() -> dict[str, Any]:
    """Bounds by name of the case."""
    return json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}


def commit(rows: dict[str, Any], order: list[str]) -> None:
    """Writes the bounds of some programs and keeps those of the others: known ones in `order`, then the rest."""
    known = committed() | rows
    names = [n for n in order if n in known] + [n for n in known if n not in order]
    _write({n: known[n] for n in names})


def forget(names: list[str]) -> None:
    """Drops the bounds of programs that are not among these."""
    known = committed()
    if any(n not in names for n in known):
        _write({n: at for n, at in known.items() if n in names})


def _write(known: dict[str, Any]) -> None:
    partial = BOUNDS.with_suffix(".partial")
    partial.write_text(json.dumps(known, indent=1) + "\n")
    # At once: a recording that is killed leaves what was there, or all.
    partial.replace(BOUNDS)


def row(found: Account, ideal: float, seconds: float, program: str) -> dict[str, Any]:
    """What is committed of a program. `program` tells it from others (`__main__.digest`)."""
    return {
        "held_mb": round(found.held / 1e6, 1),
        "temporary_mb": round(found.temporary / 1e6, 1),
        "flops_share": round(found.flops / ideal, 3) if ideal and found.flops else None,
        "collectives": found.collectives,
        "compile_cpu_seconds": round(seconds),
        "program": program,
    }


def broken(name: str, found: dict[str, Any], known: dict[str, Any] | None) -> list[str]:
    """What a program does otherwise than is committed, a sentence each: better asks for a look as well."""
    if known is None:
        return [f"{name}: nothing is committed of it; python -m tests.aot --write"]
    wrong = []
    for key, what in (("held_mb", "arguments and results"), ("temporary_mb", "memory beside them")):
        if found[key] > known[key] * MEMORY:
            wrong.append(f"{name}: {what} take {found[key]:,} MB a device, committed are {known[key]:,}")
    share, most = found["flops_share"], max(FLOPS, (known["flops_share"] or 0.0) * GROWTH)
    if share is not None and share > most:
        wrong.append(f"{name}: FLOPs are {share} of a device's share, at most {most:.3g} are allowed")
    if (kernels := found.get("kernels", 0)) > (most := known.get("kernels", 0)):
        wrong.append(f"{name}: a step of decoding has {kernels} kernels, committed are {most}")
    # Less is a change too: what compiles to nothing, or is no longer counted, holds, computes and sends nothing.
    for key in ("held_mb", "temporary_mb", "flops_share"):
        if (known[key] or 0.0) > SMALL and (found[key] or 0.0) < known[key] * LESS:
            wrong.append(f"{name}: {key} is {found[key]}, committed is {known[key]}: if that is right, --write")
    for kind in known["collectives"].keys() - found["collectives"].keys():
        wrong.append(f"{name}: there is no {kind} any more, committed are {known['collectives'][kind][0]}: --write")
    for kind, (count, size) in found["collectives"].items():
        before, largest = known["collectives"].get(kind, (0, 0))
        if count > before or size > largest:
            wrong.append(f"{name}: {count} {kind} of up to {size:,} bytes, committed are {before} of up to {largest:,}")
    return wrong


def table(known: dict[str, Any], names: list[str]) -> str:
    """The rows of the docs' table, for these programs."""
    lines = [HEAD, "|---|---|---|---|---|---|---|"]
    for name in names:
        program, model, topology = name.split()
        if name not in known:
            lines.append(f"| {program}, {model} | {topology} | not recorded | | | | |")
            continue
        at = known[name]
        sent = ", ".join(f"{count} {kind}" for kind, (count, _) in at["collectives"].items()) or "none"
        size = f"{at['held_mb']:,.0f}, {at['temporary_mb']:,.0f}"
        share = "" if at["flops_share"] is None else f"{at['flops_share']:.2f}"
        cells = [f"{program}, {model}", topology, size, share, sent, at.get("kernels") or "", at["compile_cpu_seconds"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def tabulate(names: list[str]) -> None:
    """Writes the table of the docs."""
    before, _, rest = PAGE.read_text().partition(HEAD)
    _, _, after = rest.partition("\n\n")
    PAGE.write_text(f"{before}{table(committed(), names)}\n\n{after}")
