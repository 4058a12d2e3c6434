"""Sends records through the pipeline's steps in this process, without a runner."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuning.data import files, merge, pipeline
from tuning.data.schema import SCHEMAS, table_of, write_parquet
from tuning.data.steps import STEPS, wanted_steps


def run(plan: Any, folder: Path, *records: Any, block_bytes: int = 1 << 20) -> list[str]:
    """Writes the records (objects, or bytes of a line) to a file, and its pieces below `folder`; returns the blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "data.jsonl"
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records))
    write = pipeline.Write(str(folder / "pieces"), plan.shards)
    steps = [(name, STEPS[name](plan)) for name in wanted_steps(plan)]
    made: list[str] = []
    for part in files.parts_of(files.DataFile(str(path), path.name), 1 << 20, str(folder / "spool")):
        for block in pipeline.blocks_of(part, block_bytes):
            for name, step in steps:
                block.counts[name] = {"in": len(block.alive()), **step(block)}
            made += write.process(block)
    return made


def pieces(plan: Any, folder: Path) -> merge.Pieces:
    found = pipeline.receipts(str(folder / "pieces"))
    blocks = {name: r["sums"] for name, r in found.items()}
    return merge.gathered(str(folder / "pieces"), blocks, plan.shards, folder / "gathered")


def rows(plan: Any, output: str, folder: Path) -> list[dict[str, Any]]:
    """Merged rows of all shards of an output; of the ledger, its lines."""
    read = pieces(plan, folder)
    if output == "ledger":
        return [
            line for shard in range(plan.shards) for line in merge.unique(read.read("ledger", shard))[0].to_pylist()
        ]
    return [row for shard in range(plan.shards) for row in merge.merged(read, output, shard).to_pylist()]


def letters(folder: Path) -> list[dict[str, Any]]:
    """Dead letters in the order of their records."""
    found = pipeline.receipts(str(folder / "pieces"))
    read = merge.Pieces(folder / "gathered", 1, str(folder / "pieces"), {name: r["sums"] for name, r in found.items()})
    return [row for table in read.dead() for row in table.to_pylist()]


def shards(folder: Path, rows: list[dict[str, Any]], output: str = "sft", files: int = 2) -> list[Path]:
    """Writes rows as an output of the stage; returns the paths."""
    rows = [{"id": str(i)} | row for i, row in enumerate(rows)]
    size = -(-len(rows) // files) or 1
    paths = []
    for number in range(files):
        paths.append(folder / f"part-{number:05d}-of-{files:05d}.parquet")
        part = rows[number * size : (number + 1) * size]
        tables = [table_of(part[:3], SCHEMAS[output]), table_of(part[3:], SCHEMAS[output])]
        write_parquet(paths[-1], tables, SCHEMAS[output])
    return paths


@contextlib.contextmanager
def job_server(folder: Path) -> Iterator[dict[str, Any]]:
    """Options for PortableRunner of Beam's own job server, which takes pipelines in the form that Flink and Spark take.

    Its workers are threads of this process.
    """
    port_file = folder / "port"
    command = [*(sys.executable, "-m", "apache_beam.runners.portability.local_job_service_main"), "--port", "0"]
    command += ["--port_file", str(port_file), "--staging_dir", str(folder / "staging")]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            for _ in range(600):
                if port_file.exists() or server.poll() is not None:
                    break
                time.sleep(0.1)
            yield {"job_endpoint": f"localhost:{port_file.read_text()}", "environment_type": "LOOPBACK"}
        finally:
            server.kill()
