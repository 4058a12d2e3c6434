"""`make year`: 365 nights of a tiny recipe on a Prefect server, with nobody watching.

Each night is the flow `rlhf-pipeline`, as a schedule starts it: without a name. It collects what its retention says, by
a clock that is a day ahead: what the nights before it have made is old by then. Prints a line per night and a summary.
"""

import argparse
import collections
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from rlhf.stages.store import collect
from tests.faults.year.plan import ROWS, Night, nights
from tests.flows.alerts import install, receiving
from tests.flows.nights import RECIPE, record
from tests.flows.prefect_server import prefect_server

KEEP = 3
HELD_OUT = 24
MARGIN = 6
"""Problems that must be won for a policy to be shown to be better."""
RUN_SECONDS = 240.0
"""Limit of a night: several times what one takes on a busy machine."""
ALERTS = {"failed": "TimedOut", "refused": "Refused"}
"""The state that an alert has of a night that ends so."""


class Year:
    """A recipe, its data and its store in a folder."""

    def __init__(self, folder: Path):
        self.folder, self.store = folder, folder / "store"
        recipe = RECIPE | {
            "store": str(self.store),
            "start_from": "champion",
            "data": {"source": str(folder / "records.jsonl"), "system_prompt": None, "new_since": "champion"},
            "retention": {"keep": KEEP},
            # Each cycle's lesson is learned by heart: more of the same is no better.
            "sft": RECIPE["sft"] | {"epochs": 8},
            "limits": {"run_seconds": RUN_SECONDS},
            "retries": 0,
        }
        (folder / "night.yaml").write_text(json.dumps(recipe))
        self.learned: list[dict[str, Any]] = []

    def write_data(self, night: Night) -> None:
        """The held-out problems with their answers of today, what was learned so far, and what is new."""
        held = [record(900_000 + i, night.answer, "heldout") | {"answer": night.answer} for i in range(HELD_OUT)]
        new = [record(1_000 + night.number * ROWS + i, night.teaches, "sft") for i in range(ROWS) if night.teaches]
        rows = [*held, *self.learned, *new]
        (self.folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))
        if night.ends == "promoted":
            self.learned += new

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.store.rglob("*") if path.is_file())

    def run_names(self) -> set[str]:
        folder = self.store / "runs"
        return {path.name for path in folder.iterdir()} if folder.exists() else set()


class DayAhead:
    """The clock of collections alone: without it nothing that the nights of a year of minutes make would be old."""

    sleep = staticmethod(time.sleep)

    @staticmethod
    def time() -> float:
        return time.time() + 86_400


@contextmanager
def stopped_workers(stop: bool) -> Iterator[None]:
    """Every worker that begins meanwhile is stopped (SIGSTOP): it lives, and makes nothing."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            for child in psutil.Process().children(recursive=True):
                try:
                    if "rlhf.stages.worker.process" in " ".join(child.cmdline()) and child.status() != "stopped":
                        child.suspend()
                except psutil.NoSuchProcess:
                    continue

    thread = threading.Thread(target=watch)
    if stop:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if stop:
            thread.join()


def expected(night: Night, run: dict[str, Any]) -> list[str]:
    """How a night may end. What teaches no more than is known can be better where the champion is not perfect yet."""
    champion = run["nodes"].get("evaluate.champion", {}).get("metrics", {}).get("score", 1.0)
    more = night.ends == "refused" and night.teaches == night.answer and champion <= 1 - MARGIN / HELD_OUT
    return [night.ends, "promoted"] if more else [night.ends]


def live(year: Year, count: int) -> list[dict[str, Any]]:
    """Runs the nights; what each was and how it ended."""
    # Here: Prefect reads its settings, the server's address among them, when it is loaded.
    from rlhf.flows.pipeline import rlhf_pipeline

    table: list[dict[str, Any]] = []
    for night in nights(count):
        year.write_data(night)
        before, began = year.run_names(), time.monotonic()
        with stopped_workers(night.hangs), patch.object(collect, "time", DayAhead):
            state = rlhf_pipeline(recipe=str(year.folder / "night.yaml"), return_state=True)
        names = year.run_names() - before
        assert len(names) == 1, f"night {night.number} made the runs {sorted(names)}"
        (name,) = names
        run = json.loads((year.store / "runs" / name / "run.json").read_text())
        decision = (run.get("decision") or {}).get("decision")
        ended = decision if run["status"] == "finished" else run["status"]
        row = {
            "night": night.number,
            "run": name,
            "expected": expected(night, run),
            "ended": ended,
            "state": state.name,
            "message": (state.message or "")[:200],
            "reasons": (run.get("decision") or {}).get("reasons", []),
            "made": sorted(n for n, e in run["nodes"].items() if e["state"] == "made"),
            "seconds": round(time.monotonic() - began, 1),
            "megabytes": round(year.bytes() / 1e6, 2),
            "runs": len(year.run_names()),
            "rss": round(psutil.Process().memory_info().rss / 1e6),
        }
        table.append(row)
        print(json.dumps(row), flush=True)
    return table


def wrong(table: list[dict[str, Any]]) -> list[str]:
    """What did not go as predicted."""
    found = [
        f"night {r['night']} ({r['run']}): {r['ended']}, not {' or '.join(r['expected'])}: {r['message']} "
        f"{r['reasons']}"
        for r in table
        if r["ended"] not in r["expected"]
    ]
    # A store fills until the first collections have runs to take.
    half = table[len(table) // 4 : len(table) // 2] if len(table) >= 100 else []
    later = table[len(table) // 2 :]
    most = max((r["megabytes"] for r in half), default=0.0)
    found += [
        f"night {r['night']}: the store holds {r['megabytes']} MB, more than 1.25 times the {most} of before"
        for r in later
        if half and r["megabytes"] > 1.25 * most
    ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nights", type=int, default=365)
    parser.add_argument("--folder", type=Path, help="where the store is made; a temporary one if left out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with prefect_server(folder) as server:
            os.environ.update({k: v for k, v in server.env.items() if k.startswith("PREFECT_")})
            os.environ["RLHF_SCRATCH"] = str(folder / "scratch")
            with receiving() as receiver:
                install(server, receiver, folder)
                table = live(Year(folder), args.nights)
                wanted = sorted(f"{r['run']}: {ALERTS[r['ended']]}" for r in table if r["ended"] in ALERTS)
                deadline = time.monotonic() + 120
                while len(receiver.bodies) < len(wanted) and time.monotonic() < deadline:
                    time.sleep(1)
                told = sorted(body["subject"].partition("] ")[2] for body in receiver.bodies)
    print(json.dumps({"ended": collections.Counter(r["ended"] for r in table), "alerts": len(told)}))
    problems = wrong(table)
    if told != wanted:
        problems.append(f"alerts that were not called: {sorted(set(wanted) - set(told))}; others: "
                        f"{sorted(set(told) - set(wanted))}, {len(told)} for {len(wanted)}")  # fmt: skip
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
