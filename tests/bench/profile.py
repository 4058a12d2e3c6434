"""`make profile`: where the time of a step goes, by operation: seconds, FLOPs, bytes, and the machine's bounds.

`python -m tests.bench.profile W2 W4 --dtype float32 bfloat16 --write`. Each piece of work runs in a process of its own,
compiled anew, once under JAX's profiler. An operation's bound is the least time in which the machine could do it: its
FLOPs at the rate of a large product of its type, or its bytes at the rate of memory, both measured in the same process.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.stages.worker.client import worker_environment
from rlhf.tuning import precision
from tests.bench.hlo import Module, Work
from tests.bench.inputs import SHAPES

WORKS = ("W2", "W3", "W4", "W6")
DTYPES = ("float32", "bfloat16", "fast")
RESULTS = Path(__file__).parent / "results" / "profile.json"
TOP = 12
"""Operations that a piece of work lists."""
OWN = "outside of programs"
"""What of the wall time no operation of a program has: Python, packing, pages given back and taken."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.profile", description=__doc__)
    parser.add_argument("works", nargs="*", choices=[*WORKS, []], default=[], help="all by default")
    parser.add_argument("--model", default="smol135", choices=["smol135", "tiny"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "fast"], choices=DTYPES)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--here", metavar="FOLDER", help="in this process, whose programs are dumped there")
    args = parser.parse_args()
    if args.here:
        [work], [dtype] = args.works, args.dtype
        print(json.dumps(breakdown(work, args.model, dtype, Path(args.here))))
        return
    found = []
    for work in args.works or WORKS:
        for dtype in args.dtype:
            found.append(_in_a_process(work, args.model, dtype))
            print(table(found[-1]), flush=True)
    if args.write:
        RESULTS.write_text(json.dumps({"processor": processor(), "works": found}, indent=1) + "\n")


def _in_a_process(work: str, model: str, dtype: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        environment = worker_environment()
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_large_constants=false"
        # A program that is read from the cache is not dumped.
        environment |= {
            "XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {flags}",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }
        command = [sys.executable, "-m", "tests.bench.profile", work, "--model", model, "--dtype", dtype]
        done = subprocess.run([*command, "--here", folder], env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{work} in {dtype} ended with {done.returncode}")
        return dict(json.loads(done.stdout.splitlines()[-1]))


def breakdown(work: str, model: str, dtype: str, folder: Path) -> dict[str, Any]:
    """The seconds of one call by kind of operation and by operation, with their bounds."""
    import jax

    from tests.bench.measure import gemm_flops, memory_bandwidth

    function = _function(work, model, dtype)
    jax.block_until_ready(function())
    started = time.perf_counter()
    jax.block_until_ready(function())
    wall = time.perf_counter() - started
    traces = folder / "trace"
    # A name of another sort would be a Python function's; they cost as much as a small operation.
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    started = time.perf_counter()
    with jax.profiler.trace(str(traces), profiler_options=options):
        jax.block_until_ready(function())
        traced = time.perf_counter() - started
    programs = _programs(folder)
    hidden, inner = (int(SHAPES[model][name]) for name in ("hidden", "inner"))
    rates = {"products f32": gemm_flops(hidden, inner, "float32"), "products bf16": gemm_flops(hidden, inner, "fast")}
    bandwidth = memory_bandwidth()
    events = list(_events(traces))
    rows = _by_operation(events, programs)
    for row in rows:
        flops, moved = row["gflop"] * 1e9, row["gbytes"] * 1e9
        row["bound_s"] = max(flops / rates.get(row["kind"], rates["products f32"]), moved / bandwidth)
    kinds = _summed(rows, "kind")
    kinds.append({"kind": OWN, "seconds": traced - _covered([event.span for event in events])})
    return {
        "work": work,
        "model": model,
        "dtype": dtype,
        "wall_s": round(wall, 3),
        "traced_s": round(traced, 3),
        "gemm_gflops": {k: round(v / 1e9) for k, v in rates.items()},
        "memory_gb_s": round(bandwidth / 1e9, 1),
        "kinds": [_rounded(k) for k in kinds],
        "operations": [_rounded(r) for r in rows[:TOP]],
    }


def _function(work: str, model: str, dtype: str) -> Any:
    precision.use(dtype)
    if work == "W3":
        from tests.bench.rl import Steps

        return Steps(work, model, dtype).step
    from tests.bench.training import prepared

    return prepared(work, model, dtype).function


class Event(NamedTuple):
    """One run of an operation."""

    program: str
    operation: str
    seconds: float
    """By itself: without the operations that it waits for."""
    span: tuple[float, float]
    """Begin and end, ns."""


def _programs(folder: Path) -> dict[str, dict[str, Work]]:
    """The work of each program's instructions, by the program's name; of several of a name the larger one counts."""
    found: dict[str, dict[str, Work]] = {}
    for file in sorted(folder.glob("*cpu_after_optimizations.txt"), key=lambda f: f.stat().st_size):
        module = Module(file.read_text())
        found.setdefault(module.name, {}).update(module.work())
    return found


def _events(traces: Path) -> Iterator[Event]:
    """Each run of an operation, of every thread."""
    import jax

    [file] = traces.rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            found = []
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and not event.name.startswith("end: "):
                    program = str(stats["hlo_module"])
                    found.append((event.start_ns, -event.duration_ns, program, str(stats["hlo_op"])))
            yield from _alone(sorted(found))


def _alone(events: list[tuple[float, float, str, str]]) -> Iterator[Event]:
    """Events of one thread, each without the time of those inside it."""
    open_: list[list[Any]] = []
    for start, minus, program, name in [*events, (math.inf, 0.0, "", "")]:
        while open_ and open_[-1][0] <= start:
            end, length, inside, owner, ended = open_.pop()
            yield Event(owner, ended, max(0.0, length - inside) / 1e9, (end - length, end))
            if open_:
                open_[-1][2] += length
        open_.append([start - minus, -minus, 0.0, program, name])


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that lie in any of the spans (ns): operations of several threads run side by side."""
    covered, until = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / 1e9


def _by_operation(events: list[Event], programs: dict[str, dict[str, Work]]) -> list[dict[str, Any]]:
    """Operations of the same kind, shape and primitive together, the longest first."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for event in events:
        work = programs.get(event.program, {}).get(event.operation) or Work("elementwise", 0.0, 0, event.operation)
        new = {"program": event.program, "kind": work.kind, "what": work.what, "count": 0}
        new |= {"seconds": 0.0, "gflop": 0.0, "gbytes": 0.0}
        row = rows.setdefault((event.program, work.kind, work.what), new)
        row["count"] += 1
        row["seconds"] += event.seconds
        row["gflop"] += work.flops / 1e9
        row["gbytes"] += work.bytes / 1e9
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def _summed(rows: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    sums: dict[str, dict[str, Any]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        for name in ("count", "seconds", "gflop", "gbytes", "bound_s"):
            sums[row[by]][name] += row[name]
    found = [{by: key, **values} for key, values in sums.items()]
    return sorted(found, key=lambda row: -row["seconds"])


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}


def table(found: dict[str, Any]) -> str:
    """The kinds and the longest operations of a piece of work, as a person reads them."""
    rates = ", ".join(f"{k} {v}" for k, v in found["gemm_gflops"].items())
    head = f"{found['work']} {found['dtype']}: {found['wall_s']} s, {found['traced_s']} s under the profiler"
    lines = [f"\n{head}; GFLOP/s of large {rates}; memory {found['memory_gb_s']} GB/s", ""]
    lines += ["| what | runs | seconds | share | GFLOP | GB | bound, s |", "|---|---|---|---|---|---|---|"]
    for row in [*found["kinds"], *found["operations"]]:
        name = row["kind"] if "what" not in row else f"{re.sub('^jit_', '', row['program'])}: {row['what']}"
        figures = [f"{row[k]:.0f}" if k in row else "" for k in ("count",)]
        figures += [f"{row['seconds']:.2f}", f"{row['seconds'] / found['traced_s']:.0%}"]
        figures += [f"{row[k]:.1f}" if row.get(k) else "" for k in ("gflop", "gbytes")]
        figures += [f"{row['bound_s']:.2f}" if "bound_s" in row else ""]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


def processor() -> str:
    """Name and cores of the processor, and whether it has matrix units for bfloat16."""
    text = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    name = re.search(r"model name\s*: (.*)", text)
    features = [f for f in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if re.search(rf"\b{f}\b", text)]
    return f"{name[1] if name else 'unknown'}, {os.cpu_count()} cores, {' '.join(features)}"


if __name__ == "__main__":
    main()
