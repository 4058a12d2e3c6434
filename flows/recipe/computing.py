"""The section `compute` of a recipe: what every section computes in that does not say it itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stages.common.settings import Dtype
from stages.contract.definition import StageConfig
from stages.contract.registry import by_section


class Defaults(StageConfig):
    """Of the sections' `compute`."""

    dtype: Dtype = "auto"
    """As `compute.dtype` of a section."""


def sections() -> Iterator[str]:
    """Those with a `compute`, by dotted name."""
    return (name for name, stage in by_section().items() if "compute" in stage.config.model_fields)


def filled(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as written, whose sections say what the section `compute` says. defaults: of the sections left out."""
    compute = values.get("compute")
    found = dict(values)
    if not isinstance(compute, dict) or "dtype" not in compute:
        return found
    for section in sections():
        first, _, second = section.partition(".")
        written = found.get(first, {} if defaults.get(first) is not None else None)
        if not isinstance(written, dict):
            continue
        inner = written.get(second, {}) if second else written
        own = inner.get("compute", {}) if isinstance(inner, dict) else None
        if isinstance(own, dict):
            inner = inner | {"compute": {"dtype": compute["dtype"]} | own}
            found[first] = written | {second: inner} if second else inner
    return found
