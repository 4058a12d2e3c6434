"""Sends records through the pipeline's steps in this process, without a runner."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.tuning.data import files, gather, merge, pipeline, reading
from rlhf.tuning.data.blocks import Plan
from rlhf.tuning.data.flat import write_flat
from rlhf.tuning.data.receipts import read_receipts
from rlhf.tuning.data.schema import SCHEMAS, table_of, write_parquet
from rlhf.tuning.data.steps import STEPS, wanted_steps
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import save_tokenizer

NONE = np.zeros(0, "S64")
"""Contents that leave: none."""


def plan_of(folder: Path, tokenizer: Any = None, **settings: Any) -> Plan:
    """A plan whose tokenizer, of bytes unless another is given, is saved in the folder."""
    save_tokenizer(tokenizer or byte_tokenizer(), folder)
    return Plan(tokenizer=str(folder), **settings)


def parts_of(source: Any, spool: Path, part_bytes: int = 1 << 20) -> list[files.Part]:
    """The parts of all files of a source, whose positions follow each other."""
    parts: list[files.Part] = []
    for file in files.expand(str(source)):
        position = parts[-1].position + parts[-1].count if parts else 0
        parts += files.parts_of(file, part_bytes, str(spool), 0, position)
    return parts


def run(plan: Any, folder: Path, *records: Any, block_bytes: int = 1 << 20) -> list[str]:
    """Writes the records (objects, or bytes of a line) to a file, and its pieces below `folder`; returns the blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "data.jsonl"
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records))
    write = pipeline.Write(str(folder / "pieces"), plan.shards)
    steps = [(name, STEPS[name](plan)) for name in wanted_steps(plan)]
    made: list[str] = []
    for part in parts_of(path, folder / "spool"):
        for block in pipeline.blocks_of(part, block_bytes):
            for name, step in steps:
                block.counts[name] = {"in": len(block.alive()), **step(block)}
            made += write.process(block)
    return made


def blocks(folder: Path) -> dict[str, dict[str, str]]:
    """Checksums of the files of each finished block."""
    return {name: receipt["sums"] for name, receipt in read_receipts(str(folder / "pieces")).items()}


def pieces(plan: Any, folder: Path) -> gather.Pieces:
    return gather.gather(str(folder / "pieces"), blocks(folder), plan.shards, folder / "gathered")


def rows(plan: Any, output: str, folder: Path) -> list[dict[str, Any]]:
    """Merged rows of all shards of an output; of the ledger, its lines."""
    read = pieces(plan, folder)
    if output == "ledger":
        return [
            line for shard in range(plan.shards) for line in merge.unique(read.read("ledger", shard))[0].to_pylist()
        ]
    return [row for shard in range(plan.shards) for row in merge.merged(read, output, shard, NONE).to_pylist()]


def letters(folder: Path) -> list[dict[str, Any]]:
    """Dead letters in the order of their records."""
    read = gather.Pieces(folder / "gathered", 1, str(folder / "pieces"), blocks(folder))
    return [row for table in read.dead() for row in table.to_pylist()]


def examples_of(paths: list[Path], completions: tuple[str, ...] = ("completion",)) -> reading.Examples:
    """The examples of shards as training maps them."""
    with tempfile.TemporaryDirectory() as folder:
        write_flat(paths, completions, Path(folder))
        # A mapping outlives the removal of its file.
        return reading.map_examples(Path(folder), completions)


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
def job_server(folder: Path) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    """Options for PortableRunner of Beam's Python job service, and its process. Workers are threads of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    port = folder / "port"
    service = ["apache_beam.runners.portability.local_job_service_main", "--port", "0"]
    with _module([*service, "--port_file", str(port), "--staging_dir", str(folder / "staging")], folder) as server:
        while not port.exists() and server.poll() is None:
            time.sleep(0.1)
        yield {"job_endpoint": f"localhost:{port.read_text()}", "environment_type": "LOOPBACK"}, server


@contextlib.contextmanager
def worker_pool(folder: Path, code: Path | None = None) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    """Options of Beam's external worker pool, and its process, the first of its process group. code: on its path."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pool = ["apache_beam.runners.worker.worker_pool_main", f"--service_port={port}"]
    code = code or Path.cwd()
    with _module(pool, folder, code, PYTHONPATH=str(code)) as process:
        while socket.socket().connect_ex(("127.0.0.1", port)) and process.poll() is None:
            time.sleep(0.1)
        yield {"environment_type": "EXTERNAL", "environment_config": f"localhost:{port}"}, process


@contextlib.contextmanager
def _module(
    command: list[str], folder: Path, cwd: Path | None = None, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A module that runs in a process group, which is killed at the end."""
    # The pool starts `python`.
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (
        (folder / f"{command[0]}.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=log,
            stderr=log,
            env=os.environ | variables,
            cwd=cwd,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
