"""Parquet folders of a stage: read whole, write by shard, go on after a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.contract.definition import Context
from stages.store.artifacts import Artifact


def read_rows(artifact: Artifact, part: str) -> list[dict[str, Any]]:
    """All rows of the Parquet files below `part`, in file order."""
    folder = artifact.local(part)
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def write_rows(path: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema) -> None:
    """One Parquet file, visible only when whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), partial, compression="zstd")
    partial.rename(path)


def reward_samples(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the rollout table as reward functions take them."""
    return [
        {
            "prompt": r["prompt"],
            "completion": r["text"],
            "completion_ids": r["token_ids"],
            "answer": r["answer"],
            "metadata": json.loads(r["metadata"] or "{}"),
        }
        for r in rows
    ]


def by_shard(
    ctx: Context,
    name: str,
    items: Sequence[Any],
    per_shard: int,
    schema: pa.Schema,
    make: Callable[[Sequence[Any]], list[dict[str, Any]]],
    unit: str,
) -> list[dict[str, Any]]:
    """Runs `make` on slices of `items`; slices that an earlier try finished are read, not made.

    Leaves the shards under `ctx.out/name` and returns all rows.
    """
    done: list[dict[str, Any]] = []
    total = -(-len(items) // per_shard)
    kept = 0
    for number in range(total):
        chunk = items[number * per_shard : (number + 1) * per_shard]
        path = ctx.work / f"{name}-{number:05d}" / f"part-{number:05d}-of-{total:05d}.parquet"
        if path.exists():
            rows = pq.read_table(path).to_pylist()
            kept += 1
        else:
            rows = make(chunk)
            write_rows(path, rows, schema)
            ctx.saved()
        done.extend(rows)
        ctx.progress(min((number + 1) * per_shard, len(items)), len(items), unit)
        target = ctx.out / name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    if kept:
        ctx.log(f"resumed: {kept} of {total} shards of {name} were there")
    return done
