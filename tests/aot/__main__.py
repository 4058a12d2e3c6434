"""Compiles programs for devices that are not here, and compares with what is committed of them or writes it.

    python -m tests.aot                      all cases against bounds.json
    python -m tests.aot --only decode        those whose name has the word
    python -m tests.aot --on gpu             those for GPUs
    python -m tests.aot --write              new bounds of the programs that have changed; look at the difference
    python -m tests.aot --write --again      of the others too
    python -m tests.aot --table              the table of docs/reference/compiled-programs.md again, from bounds.json

Each case is a process of its own with a limit of time. `--write` writes a case, and the table, as soon as it is known,
and keeps the bounds of what does not compile. It may be interrupted and run again: a program that is what it was is not
compiled. Exit status 1 where a case is worse than committed or does not compile. Needs the compilers
(`make tpu`, `make gpu-aot`).
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.aot.bounds import broken, commit, committed, forget, tabulate
from tests.aot.cases import CASES, Case, named

NAMES = [case.name for case in CASES]
LIMIT = 3600
"""Seconds of a case. The largest known takes about two minutes of a processor, which a busy machine shares out."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--on", choices=("tpu", "gpu"), help="the cases of one platform")
    parser.add_argument("--write", action="store_true", help="write bounds.json")
    parser.add_argument("--again", action="store_true", help="with --write: compile what has not changed too")
    parser.add_argument("--table", action="store_true", help="write the table of the docs")
    parser.add_argument("--text", type=Path, help="write the compiled program of the last case here")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds of a case, {LIMIT} unless given")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--unless", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        from tests.aot.compiled import found

        print(json.dumps(found(named(asked.child), asked.unless, asked.text)))
        return 0
    if asked.table:
        tabulate(NAMES)
        return 0
    if asked.write:
        # Here alone: a recording that outlives an edit of the cases keeps what it does not know.
        forget(NAMES)
    known = committed()
    chosen = [c for c in CASES if asked.only in c.name and asked.on in (None, c.platform)]
    if not chosen:
        parser.error(f"no case has {asked.only!r} in its name; there are {', '.join(NAMES)}")
    wrong = []
    for number, case in enumerate(chosen, 1):
        print(f"{case.name} ({number} of {len(chosen)})", flush=True)
        wrong += one(case, known.get(case.name), asked)
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


def one(case: Case, known: dict[str, Any] | None, asked: argparse.Namespace) -> list[str]:
    """Compiles a case in a process of its own; what is wrong with it."""
    same = known.get("program", "") if known and asked.write and not asked.again else ""
    command = [sys.executable, "-m", "tests.aot", "--child", case.name, "--unless", same]
    command += ["--text", str(asked.text)] if asked.text else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | environment(case), timeout=asked.limit
        )
    except subprocess.TimeoutExpired:
        return [f"{case.name}: not compiled within {asked.limit:.0f} s"]
    if done.returncode:
        return [f"{case.name}: {reason(done.stderr)}"]
    found = json.loads(done.stdout.splitlines()[-1])
    if found is None:
        print("  as committed: its program is the same")
        return []
    print(f"  {json.dumps(found)}", flush=True)
    if asked.write:
        commit({case.name: found}, NAMES)
        tabulate(NAMES)
        # In the log of a recording: what the difference of bounds.json shows.
        for line in broken(case.name, found, known or found):
            print(f"  {line}", flush=True)
        return []
    return broken(case.name, found, known)


def reason(errors: str) -> str:
    """The error of a process that failed, from what it wrote: its exception, and the lines that say how much."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join(lines[starts[-1] :][:6]) if starts else " ".join(lines[-3:]) or "it ended without a word"


def environment(case: Case) -> dict[str, str]:
    """Of a process that compiles the case: this machine has CPUs, and the libraries compile alone."""
    common = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if case.platform == "gpu":
        # Kernels cannot be tried.
        return common | {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    # libtpu asks no machine of Google's what it runs on, and locks no chip.
    return common | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }


if __name__ == "__main__":
    sys.exit(main())
