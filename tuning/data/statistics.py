"""Statistics of prepared data for its card: counts of each step, and lengths of rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf.tuning.data.flat import FOLDER, completions_of, load_flat
from rlhf.tuning.data.schema import SCHEMAS

BINS = 24
AT_A_TIME = 1 << 18
"""Rows whose lengths are held."""
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
    """How many rows have 0, 1, 2, ... tokens: a length is bounded, the number of rows is not."""
    total = np.zeros(0, np.int64)
    for lengths in _pieces_of_lengths(out / output, column):
        found = np.bincount(lengths)
        longer, shorter = (total, found) if len(total) > len(found) else (found, total)
        total = longer + np.pad(shorter, (0, len(longer) - len(shorter)))
    return total


def _pieces_of_lengths(folder: Path, column: str) -> Iterator[np.ndarray]:
    """The tokens of each row of an output, some rows at a time: by the arrays of tokens, where it has them."""
    if (folder / FOLDER).is_dir():
        names = ["prompt", *completions_of(folder.name)]
        _, _, spans = load_flat(folder / FOLDER, len(names))
        of_column = spans[:, names.index(column.removesuffix("_ids"))]
        for start in range(0, len(of_column), AT_A_TIME):
            yield np.diff(of_column[start : start + AT_A_TIME])[:, 0]
        return
    for path in sorted(folder.glob("part-*.parquet")):
        yield pc.list_value_length(pq.read_table(path, columns=[column])[column]).to_numpy()


def _percentile(counts: np.ndarray, percent: float) -> float:
    """To the last bit that of `np.percentile`: between the two rows next to the place, in the order of lengths."""
    ends = np.cumsum(counts)
    place = (ends[-1] - 1) * (percent / 100)
    low, high = (int(np.searchsorted(ends, row(place), "right")) for row in (np.floor, np.ceil))
    share = place - np.floor(place)
    # From the nearer of the two, as NumPy does.
    return float(low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share))


def _id_columns(output: str) -> list[str]:
    return [name for name in SCHEMAS[output] if name.endswith("_ids")]


def token_lengths(out: Path, output: str) -> dict[str, dict[str, float]]:
    """Mean, median, 95th percentile and maximum length in tokens of each column of ids of an output below `out`."""
    summary: dict[str, dict[str, float]] = {}
    for column in _id_columns(output):
        counts = _lengths(out, output, column)
        rows = int(counts.sum())
        if not rows:
            continue
        middle, high = (_percentile(counts, percent) for percent in (50, 95))
        mean, most = round(float(counts @ np.arange(len(counts)) / rows), 3), float(len(counts) - 1)
        summary[column] = {"mean": mean, "p50": middle, "p95": high, "max": most}
    return summary


def histograms(out: Path, output: str) -> dict[str, dict[str, list[int]]]:
    """For each column of ids: edges of equal bins of lengths in tokens, and the number of rows in each."""
    bins: dict[str, dict[str, list[int]]] = {}
    for column in _id_columns(output):
        lengths = _lengths(out, output, column)
        # Whole tokens, so that every bin holds the same number of lengths; empty bins at the end are left out.
        width = max(1, -(-len(lengths) // BINS))
        edges = np.arange(0, width * BINS + 1, width)
        counts = np.pad(lengths, (0, width * BINS - len(lengths))).reshape(BINS, width).sum(axis=1)
        last = int(np.max(np.flatnonzero(counts), initial=0)) + 1
        bins[column] = {"edges": edges[: last + 1].tolist(), "counts": counts[:last].tolist()}
    return bins
