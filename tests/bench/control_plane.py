"""Requests, bytes and seconds of the control plane over rounds, on a store whose requests take their time.

`python -m tests.bench.control_plane --rounds 10 100 1000 --write` makes, for each number of rounds, the artifacts of a
run with a file each, then has a run find them all (a hit each), and a plan. Requests are counted and take
`--milliseconds` for the plan; the run's own are counted alone.
"""

import argparse
import json
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "control_plane.json"


def recipe_of(store: str, rounds: int) -> Any:
    from rlhf.flows.recipe.reading import load_recipe

    sets = [f"store={store}", f"rl.rounds={rounds}", "rl.checkpoint_every=1000", "export=null"]
    return load_recipe("smoke", sets=sets)


def fill(recipe: Any, folder: Path) -> int:
    """Makes the artifacts of a run under their keys, each of small files that others read. Returns their number."""
    from rlhf.flows.graph.build import build
    from rlhf.flows.graph.keying import Codes, key_of, key_parts
    from rlhf.stages.store.artifacts import Store

    nodes, store, codes = build(recipe), Store(recipe.store), Codes()
    made: dict[str, Any] = {}
    read: dict[str, set[str]] = {}
    for wanted in (i for node in nodes for i in node.inputs.values()):
        read.setdefault(wanted.node, set()).update(wanted.parts)
    for number, node in enumerate(nodes):
        parts = key_parts(node, made, codes)
        for part in read.get(node.name) or {""}:
            place = folder / f"out-{number}" / (f"{part}content.json" if part == "" or part.endswith("/") else part)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps([node.name]))
        manifest = {"stage": node.stage, "key": key_of(parts), "key_parts": parts, "metrics": {"rows": {}}, "seed": 0}
        more = {"config": {}, "inputs": {}, "seconds": 1.0}
        made[node.name] = store.commit(folder / f"out-{number}", manifest | more)
    return len(made)


def measure(rounds: int, milliseconds: float) -> dict[str, Any]:
    """One number of rounds."""
    import io

    from rlhf.flows.graph.plan import plan
    from rlhf.flows.report.console import ConsoleReporter
    from rlhf.flows.report.terminal import LastingConsole
    from rlhf.flows.running.session import Session
    from tests.stages.store.distant import Distant

    with tempfile.TemporaryDirectory() as folder:
        Distant.begin()
        recipe = recipe_of(f"distant://{uuid.uuid4().hex}", rounds)
        nodes = fill(recipe, Path(folder))
        Distant.begin()
        began, cpu = time.monotonic(), time.process_time()
        session = Session(recipe, ConsoleReporter(LastingConsole(file=io.StringIO())), "one")
        for name in list(session.nodes):
            state, _ = session.run_node(name)
            assert state == "hit", name
            # As a run that makes each stage: its record is written at the start and the end of it.
            session.save()
            session.save()
        session.finish("finished")
        found: dict[str, Any] = {
            "rounds": rounds,
            "nodes": nodes,
            "run_seconds_without_latency": time.monotonic() - began,
            "run_processor_seconds": time.process_time() - cpu,
        }
        found |= {"run_requests": Distant.requests, "run_megabytes": Distant.bytes_written / 1e6}
        Distant.begin(milliseconds / 1000)
        began, cpu = time.monotonic(), time.process_time()
        planned = plan(recipe)
        assert {p.state for p in planned} == {"hit"}
        found |= {"plan_seconds": time.monotonic() - began, "plan_requests": Distant.requests}
        found |= {"plan_processor_seconds": time.process_time() - cpu}
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--milliseconds", type=float, default=50.0, help="of each request of the plan")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    found = [measure(rounds, args.milliseconds) for rounds in args.rounds]
    for row in found:
        print(json.dumps(row))
    if args.write:
        RESULTS.write_text(json.dumps({"milliseconds": args.milliseconds, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
