"""The new rows of the data: without those that the policy at the start was trained on.

Held-out files are copied unchanged, so that policies of many nights are compared on the same problems.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.stages.common.trained_prompts import COLUMNS, FOLDER, SPLITS, is_trained, read_names
from rlhf.stages.contract.definition import Context, Reads, Stage, StageConfig
from rlhf.stages.store.artifacts import Artifact


class Config(StageConfig):
    """It has no settings."""


def run(ctx: Context) -> dict[str, Any]:
    """Write the parts of the data; return how many rows of each part to train on are new, and how many are not."""
    from rlhf.tuning.data.flat import write_arrays

    data, trained = ctx.inputs["data"], read_names(ctx.inputs["start"])
    rows: dict[str, int] = {}
    old: dict[str, int] = {}
    for path in _tables(data):
        source, target = data.local(path), ctx.out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = path.split("/")[0]
        if part not in SPLITS:
            shutil.copyfile(source, target)
            continue
        kept, dropped = _without(source, target, trained)
        rows[part], old[part] = rows.get(part, 0) + kept, old.get(part, 0) + dropped
    for part in sorted(path.name for path in ctx.out.iterdir() if path.name in (*SPLITS, *_HELD_OUT)):
        write_arrays(ctx.out / part)
    ctx.log(", ".join(f"{part}: {rows[part]} new, {old[part]} trained on before" for part in rows))
    return {"rows": rows, "trained": old}


def _tables(data: Artifact) -> list[str]:
    """The tables of the data but for its dead letters."""
    paths = (f["path"] for f in data.manifest["files"])
    return sorted(p for p in paths if p.endswith(".parquet") and p.split("/")[0] in (*SPLITS, *_HELD_OUT))


_HELD_OUT = ("heldout", "heldout_sft", "heldout_preference", "heldout_labelled")


def _without(source: Path, target: Path, trained: set[str]) -> tuple[int, int]:
    """Write the new rows of a table, in their order; return how many are new, and how many are not."""
    from rlhf.tuning.data.schema import write_parquet

    file, schema = pq.ParquetFile(source), pq.read_schema(source)
    columns = [name for name in COLUMNS if name in schema.names]
    masks = [
        [not is_trained(row, trained) for row in batch.to_pylist()] for batch in file.iter_batches(columns=columns)
    ]
    new, total = sum(map(sum, masks)), sum(map(len, masks))
    if new == total:
        # Byte for byte: stages that read it are cache hits.
        shutil.copyfile(source, target)
        return new, 0
    batches = zip(file.iter_batches(), masks, strict=True)
    tables = (pa.Table.from_batches([batch]).filter(pa.array(mask)) for batch, mask in batches)
    write_parquet(target, tables, {field.name: field.type for field in schema})
    return new, total - new


STAGE = Stage(
    "fresh",
    1,
    Config,
    run,
    libraries=("pyarrow", "numpy"),
    computes=lambda config: False,
    draws=lambda config: False,
    processes=lambda config: "primary",
    work="data",
    title="new data",
    makes="data",
    reads={
        "data": Reads("data", (*(f"{part}/" for part in (*SPLITS, *_HELD_OUT)),)),
        "start": Reads("start", (f"{FOLDER}/",)),
    },
    headline=("new {rows}", "trained on before {trained}"),
)
