"""Schemas of the JSON files of a store: whoever may write to it, and a disk that fails, may leave other JSON."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

# Fields beside these are another version's, and stay.


class File(TypedDict):
    """A file of an artifact."""

    path: str
    size: int
    sha256: str


class Manifest(TypedDict):
    """Of an artifact."""

    stage: str
    key: str
    digest: str
    metrics: dict[str, Any]
    files: list[File]


class Committed(Manifest):
    """Of an artifact that a store has committed, with when (ISO 8601)."""

    committed: str


class Holder(TypedDict):
    """Of a lease."""

    token: str
    pid: int
    started: float | None
    host: str
    beat: float


class Parted(TypedDict):
    """Of a run with parts: try, first and last number of each span of them."""

    nodes: dict[str, dict[str, Any]]
    parts: list[Annotated[list[int], Field(min_length=3, max_length=3)]]


class Sweep(TypedDict):
    """Of a sweep, with its runs."""

    name: str
    recipe: str
    started: str
    runs: list[str]
    settings: list[dict[str, Any]]


SUMS: TypeAdapter[Any] = TypeAdapter(dict[str, str])
"""Checksums of files by their paths in a folder."""
MANIFEST: TypeAdapter[Any] = TypeAdapter(Manifest)
COMMITTED: TypeAdapter[Any] = TypeAdapter(Committed)
HOLDER: TypeAdapter[Any] = TypeAdapter(Holder)
PARTED: TypeAdapter[Any] = TypeAdapter(Parted)
SWEEP: TypeAdapter[Any] = TypeAdapter(Sweep)


def misfit(value: Any, form: TypeAdapter[Any]) -> str | None:
    """Return the first part of a value that does not fit the schema, with its place; None if all fits."""
    try:
        form.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg']}" if place else first["msg"]
    return None
