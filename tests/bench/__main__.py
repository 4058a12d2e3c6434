"""`make bench`: every measurement in a process of its own, one JSON line each.

`python -m tests.bench W2 W4 --model smol135 --repeats 5`
"""

import argparse
import subprocess
import sys

from rlhf.stages.worker.client import worker_environment
from tests.bench.inputs import SHAPES

WORKS = dict.fromkeys(["W2", "W2lora", "W4", "W6"], "training")
WORKS |= dict.fromkeys(["W1", "W1b", "shared", "decode1", "decode8", "host64", "host256", "host1024"], "rollouts")
WORKS |= dict.fromkeys(["W3", "W5"], "rl")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("works", nargs="*", choices=[*WORKS, []], default=[], help="all by default")
    parser.add_argument("--model", default="smol135", choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "fast"], help="of steps")
    parser.add_argument("--here", action="store_true", help="in this process")
    args = parser.parse_args()
    if args.here:
        from importlib import import_module

        from rlhf.tuning import precision

        precision.use(args.dtype)
        for work in args.works:
            import_module(f"tests.bench.{WORKS[work]}").run(work, args.model, args.repeats, dtype=args.dtype)
        return
    failed = 0
    for work in args.works or WORKS:
        command = [sys.executable, "-m", "tests.bench", work, "--model", args.model, "--repeats", str(args.repeats)]
        failed += subprocess.call([*command, "--dtype", args.dtype, "--here"], env=worker_environment()) != 0
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
