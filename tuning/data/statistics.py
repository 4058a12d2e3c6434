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

from tuning.data.schema import SCHEMAS

BINS = 24
MOST_NAMES = 256
"""Names of metadata that are told; data with more names has values in their place."""


def added(receipts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of the counts of all blocks, by step in the order of the steps."""
    steps: dict[str, Counter[str]] = {}
    for receipt in receipts:
        for step, counts in receipt["counts"].items():
            steps.setdefault(step, Counter()).update(counts)
    # Blocks have different counters, so names are sorted.
    return {"steps": {step: dict(sorted(counts.items())) for step, counts in steps.items()}}


def metadata_names(out: Path, output: str) -> list[str] | None:
    """Names of entries of metadata that a row of an output below `out` has, sorted; None for more than MOST_NAMES."""
    names: set[str] = set()
    for path in sorted((out / output).glob("part-*.parquet")):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["metadata"]):
                for text in batch.column(0).unique().to_pylist():
                    names.update(json.loads(text))
                if len(names) > MOST_NAMES:
                    return None
    return sorted(names)


def _lengths(out: Path, output: str, column: str) -> np.ndarray:
    files = sorted((out / output).glob("part-*.parquet"))
    columns = [pc.list_value_length(pq.read_table(path, columns=[column])[column]).to_numpy() for path in files]
    return np.concatenate(columns)


def _id_columns(output: str) -> list[str]:
    return [name for name in SCHEMAS[output] if name.endswith("_ids")]


def token_lengths(out: Path, output: str) -> dict[str, dict[str, float]]:
    """Mean, median, 95th percentile and maximum length in tokens of each column of ids of an output below `out`."""
    summary: dict[str, dict[str, float]] = {}
    for column in _id_columns(output):
        values = _lengths(out, output, column)
        if not len(values):
            continue
        middle, high = np.percentile(values, [50, 95])
        mean, most = round(float(values.mean()), 3), float(values.max())
        summary[column] = {"mean": mean, "p50": float(middle), "p95": float(high), "max": most}
    return summary


def histograms(out: Path, output: str) -> dict[str, dict[str, list[int]]]:
    """For each column of ids: edges of equal bins of lengths in tokens, and the number of rows in each."""
    bins: dict[str, dict[str, list[int]]] = {}
    for column in _id_columns(output):
        values = _lengths(out, output, column)
        # Whole tokens, so that every bin holds the same number of lengths; empty bins at the end are left out.
        width = max(1, -(-(int(values.max(initial=0)) + 1) // BINS))
        edges = np.arange(0, width * BINS + 1, width)
        counts, _ = np.histogram(values, edges)
        last = int(np.max(np.flatnonzero(counts), initial=0)) + 1
        bins[column] = {"edges": edges[: last + 1].tolist(), "counts": counts[:last].tolist()}
    return bins
