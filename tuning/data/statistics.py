"""Statistics of prepared data for its card: counts of each step, and lengths of rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf.tuning.data.flat import FOLDER, completions_of, load_flat
from rlhf.tuning.data.schema import SCHEMAS

MOST_NAMES = 256
"""Limit of listed names of metadata; data with more names has values in their place."""


def step_counts(receipts: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the sums of the counts of all blocks, by step in the order of the steps."""
    steps: dict[str, Counter[str]] = {}
    for receipt in receipts:
        for step, counts in receipt["counts"].items():
            steps.setdefault(step, Counter()).update(counts)
    # Blocks have different counters, so names are sorted.
    return {step: dict(sorted(counts.items())) for step, counts in steps.items()}


def metadata_names(out: Path, output: str) -> list[str] | None:
    """Return the sorted names of metadata in the rows of an output below `out`; None if there are too many."""
    names: set[str] = set()
    for path in sorted((out / output).glob("part-*.parquet")):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["metadata"]):
                for text in batch.column(0).unique().to_pylist():
                    names.update(json.loads(text))
                if len(names) > MOST_NAMES:
                    return None
    return sorted(names)


def token_lengths(out: Path, output: str) -> dict[str, dict[str, float]]:
    """Return mean, median, 95th percentile and maximum length in tokens of each column of ids of an output."""
    folder, columns = out / output, [name for name in SCHEMAS[output] if name.endswith("_ids")]
    if completions := completions_of(output):
        # Without decoding tokens.
        lengths = np.diff(load_flat(folder / FOLDER, 1 + len(completions))[2])[..., 0].T
    else:
        tables = [pq.read_table(path, columns=columns) for path in sorted(folder.glob("part-*.parquet"))]
        lengths = np.stack([np.concatenate([pc.list_value_length(t[c]).to_numpy() for t in tables]) for c in columns])
    summary: dict[str, dict[str, float]] = {}
    for column, sizes in zip(columns, lengths, strict=True):
        if len(sizes):
            middle, high = np.percentile(sizes, [50, 95]).tolist()
            mean = round(float(sizes.mean()), 3)
            summary[column] = {"mean": mean, "p50": middle, "p95": high, "max": float(sizes.max())}
    return summary
