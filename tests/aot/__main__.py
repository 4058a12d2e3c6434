"""Compiles the programs for TPUs that are not here, and compares with what is committed or writes it.

    python -m tests.aot                    all cases against bounds.json
    python -m tests.aot --only decode      those whose name has the word
    python -m tests.aot --write            takes what is found as the new bounds; look at the difference before a commit
    python -m tests.aot --table            the table of docs/devices.md from bounds.json

One at a time on a machine: a second process waits for libtpu's lock and fails. Needs libtpu (`make tpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# libtpu is a compiler here, and asks no machine of Google's what it runs on.
os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_HOSTNAMES="localhost")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

from tests.aot.account import account
from tests.aot.bounds import BOUNDS, CASES, OPTIONS, broken, row, table
from tests.aot.programs import lowered


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--write", action="store_true", help="write bounds.json")
    parser.add_argument("--table", action="store_true", help="print the table of the docs")
    parser.add_argument("--text", type=Path, help="write the compiled program of the last case here")
    arguments = parser.parse_args()
    known = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
    if arguments.table:
        print(table(known))
        return 0
    failed = False
    for case in (c for c in CASES if arguments.only in c.name):
        start = time.process_time()
        program, ideal = lowered(case)
        compiled = program.compile(compiler_options=OPTIONS)
        if arguments.text:
            arguments.text.write_text(compiled.as_text())
        found = row(account(compiled), ideal, time.process_time() - start)
        wrong = [] if arguments.write else broken(found, known.get(case.name))
        failed |= bool(wrong)
        print(case.name, json.dumps(found), *wrong, sep="\n  ", flush=True)
        if arguments.write:
            known[case.name] = found
            BOUNDS.write_text(json.dumps(known, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
