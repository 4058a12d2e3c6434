"""Commands about named data sets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from rlhf.flows.cli.shared import AsJson, StoreUrl, app, note, out, print_json, usage_error
from rlhf.flows.report.formats import when
from rlhf.stages.store import datasets
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.datasets import DatasetError, Version


@app.command("dataset")
def store_dataset(
    name: Annotated[str, typer.Argument(help="Name of the data set: a-z, 0-9, '_', '.' and '-'.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of records, or folders of them.")],
    store: StoreUrl,
) -> None:
    """Store files as the next version of a named data set. A recipe reads the newest as `source: dataset:NAME`.

    Equal files are no new version. `dataset:NAME@2` is the second version for ever.
    """
    place = Store(store)
    try:
        version, is_new = datasets.add(place, name, files)
    except DatasetError as e:
        raise usage_error(str(e)) from e
    if is_new:
        note(place, "dataset", outcome=f"{name}@{version.number}")
    out.print(_line(version) + ("" if is_new else "  (unchanged)"))


@app.command("datasets")
def list_datasets(store: StoreUrl, as_json: AsJson = False) -> None:
    """List the named data sets with their versions; the newest, which `dataset:NAME` stands for, comes first."""
    place = Store(store)
    try:
        found = {name: datasets.versions(place, name)[::-1] for name in datasets.names(place)}
    except DatasetError as e:
        raise usage_error(str(e)) from e
    if as_json:
        print_json({name: [dataclasses.asdict(version) for version in of] for name, of in found.items()})
        return
    if not found:
        out.print(f"no data sets in {place.shown}; `rlhf dataset NAME FILE...` stores one")
    for of in found.values():
        for version in of:
            out.print(_line(version))


def _line(version: Version) -> str:
    files = ", ".join(list(version.files)[:3]) + (" ..." if len(version.files) > 3 else "")
    return f"dataset:{version.name}@{version.number}  {when(version.when)}  {version.who}  {files}"
