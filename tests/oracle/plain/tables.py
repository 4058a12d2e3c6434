"""Parquet tables of an artifact, as lists of dictionaries."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

Row = dict[str, Any]


def read(folder: Path) -> list[Row]:
    """All rows of the Parquet files of a folder, in the order of the files' names."""
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def read_json(path: Path) -> dict[str, Any]:
    """A file of one JSON object."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def name(row: Row) -> tuple[int, int]:
    """What a completion is called (R21): its place in the round, and its number among the samples of that place."""
    return row["place"], row["sample"]


def joined(rollouts: Sequence[Row], scores: Sequence[Row]) -> list[Row]:
    """The rows of the rollout table with `total` of their own scores.

    Raises ValueError unless each completion has one score and each score one completion.
    """
    by_name = {name(row): row for row in scores}
    if len(by_name) != len(scores) or by_name.keys() != {name(row) for row in rollouts} or len(scores) != len(rollouts):
        raise ValueError("completions and scores are not one to one")
    return [row | {"total": by_name[name(row)]["total"]} for row in rollouts]


def episodes(rollouts: Sequence[Row], scores: Sequence[Row], turns: Sequence[Row]) -> list[Row]:
    """The last row of each trajectory with its `total`, all of its rows as `parts`, and its `turns`, in their order."""
    parts: dict[tuple[int, int], list[Row]] = {}
    for row in rollouts:
        parts.setdefault(name(row), []).append(row)
    ordered = [sorted(own, key=lambda row: row["part"]) for own in parts.values()]
    found = joined([own[-1] for own in ordered], scores)
    for row, own in zip(found, ordered, strict=True):
        row["parts"] = own
        row["turns"] = sorted((t for t in turns if name(t) == name(row)), key=lambda t: t["turn"])
    return found
