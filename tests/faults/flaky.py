"""Rounds of RL whose roles run beside each other, on a store behind a network that fails and dawdles.

`python -m tests.faults.flaky --rounds 200 --write` runs the recipe `smoke` by one worker on a disk, and with a worker
each for data, training, sampling and scoring, staleness 1, on an S3 API whose requests are lost, refused and delayed at
random. A run that an outage ends is begun again by the same command. The command fails where a node has another key or
digest than on the calm disk, where `rlhf verify` or `rlhf audit` find anything, or where a run is at work for longer
than `--seconds`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults.storm.network import Proxy, server
from tests.support import RLHF

RESULTS = Path(__file__).with_name("flaky.json")
WORKERS = "workers={train: {}, sample: {}, score: {}, data: {}}"
TRIES = 50


def command(store: str, rounds: int, *sets: str) -> list[str]:
    settings = [f"rl.rounds={rounds}", "rl.staleness=1", "evaluate=null", "export=null", *sets]
    words = [word for item in settings for word in ("--set", item)]
    return [str(RLHF), "run", "smoke", "--no-prefect", "--name", "rounds", "--store", store, *words]


def nodes_of(store: str) -> dict[str, Any]:
    """The nodes of the run: stage, key, digest."""
    from rlhf.stages.store import runs
    from rlhf.stages.store.artifacts import Store

    found = runs.read(Store(store), "rounds")
    assert found is not None and found["status"] == "finished", found
    return {name: [entry["key"], entry["digest"]] for name, entry in found["nodes"].items()}


def until_finished(words: list[str], environment: dict[str, str], seconds: float, log: Path) -> int:
    """Runs the same command until it has finished; how often that was."""
    for number in range(1, TRIES + 1):
        with log.open("ab") as out:
            code = subprocess.run(
                words, env=os.environ | environment, stdout=out, stderr=out, timeout=seconds, check=False
            ).returncode
        if code == 0:
            return number
        assert code == 1, (code, log.read_text()[-3000:])
    raise AssertionError(f"{TRIES} tries:\n{log.read_text()[-3000:]}")


def measured(folder: Path, rounds: int, share: float, seconds: float, seed: int) -> dict[str, Any]:
    """Both runs, compared."""
    import boto3

    calm = str(folder / "calm")
    began = time.monotonic()
    until_finished(command(calm, rounds), {}, seconds, folder / "calm.log")
    calm_seconds = time.monotonic() - began
    target, store = server(), "s3://rounds/store"
    boto3.client("s3").create_bucket(Bucket="rounds")
    proxy = Proxy(target, random.Random(seed), share, sys.maxsize)
    began = time.monotonic()
    away = {"AWS_ENDPOINT_URL": proxy.url, "RLHF_SCRATCH": str(folder / "scratch")}
    tries = until_finished(command(store, rounds, WORKERS), away, seconds, folder / "flaky.log")
    flaky_seconds = time.monotonic() - began
    proxy.close()
    wanted, found = nodes_of(calm), nodes_of(store)
    assert found == wanted, [name for name in wanted if found.get(name) != wanted[name]]
    for look in ("verify", "audit"):
        done = subprocess.run(
            [str(RLHF), look, "--store", store], env=os.environ | away | {"AWS_ENDPOINT_URL": target},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    return {
        "rounds": rounds,
        "nodes": len(found),
        "share": share,
        "seed": seed,
        "faults": dict(sorted(proxy.failed.items())),
        "tries": tries,
        "seconds": {"calm": round(calm_seconds), "flaky": round(flaky_seconds)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.02, help="of requests that fail or are delayed by up to 5 s")
    parser.add_argument("--seconds", type=float, default=7200.0, help="longest time of a try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flaky-") as folder:
        result = measured(Path(folder), args.rounds, args.share, args.seconds, args.seed)
    print(json.dumps(result, indent=1))
    if args.write:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
