"""The data card: one HTML page, without scripts or links, of the records that a preparation read, dropped and wrote.

`card.html.j2` is its template. The card is content of the artifact: the same data and settings give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.stages.prepare.settings import Config, DataSource
from rlhf.stages.store.keys import published

SAMPLES = 3
"""Rows shown of each output."""
DEAD_LETTERS = 12
"""Dead letters shown."""
LONGEST = 600
"""Characters shown of a text."""


def write_card(out: Path, facts: Mapping[str, Any], config: Config) -> None:
    """Write `card.html` next to the outputs; `facts` is the content of `statistics.json`."""
    from jinja2 import Environment, FileSystemLoader

    metrics = facts["metrics"]
    read = max(1, metrics["records"]["read"])
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.filters["share"] = lambda n: f"{100 * n / read:.2f} %"
    environment.filters["short"] = lambda t: t if len(t) <= LONGEST else f"{t[:LONGEST]} … ({len(t)} characters)"
    page = environment.get_template("card.html.j2").render(
        sources=[{"source": published(s.source), "settings": _settings(s)} for s in config.all_sources()],
        fates=_fates(metrics),
        metrics=metrics,
        steps=facts["steps"],
        letters=_first_rows(out / "dead" / "dead.parquet", DEAD_LETTERS, ["source", "record", "step", "reason"]),
        samples={name: _samples(out, name) for name in metrics["rows"]},
    )
    # Broken text of a source holds lone surrogates, which UTF-8 cannot encode.
    (out / "card.html").write_bytes(page.encode("utf-8", "backslashreplace"))


def _settings(source: DataSource) -> str:
    """Return the settings of a source that differ from their defaults, in one line."""
    values = published(source.model_dump(exclude_defaults=True, exclude={"source"}))
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _fates(metrics: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the fates of the records with their numbers, which add up to the first."""
    records = metrics["records"]
    dropped = [(f"dropped: {reason}", n) for reason, n in metrics["dropped_records"].items()]
    fates = [("kept", records["kept"]), ("equal to another", records["duplicates"]), *dropped]
    return [("read", records["read"]), *fates, ("dead letters", records["dead"])]


def _first_rows(path: Path, count: int, columns: list[str]) -> list[dict[str, Any]]:
    """Return the first `count` rows of a Parquet file without reading all of it."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for batch in pq.ParquetFile(path).iter_batches(batch_size=count, columns=columns):
        rows += batch.to_pylist()
        if len(rows) >= count:
            break
    return rows[:count]


def _samples(out: Path, output: str) -> list[dict[str, str]]:
    """Return the texts of the first rows of an output."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = min((out / output).glob("part-*.parquet"))
    texts = [f.name for f in pq.read_schema(path) if f.type == pa.string() and f.name not in ("id", "content", "group")]
    return [{k: v for k, v in row.items() if v} for row in _first_rows(path, SAMPLES, texts)]
