"""The section `retention` of a recipe: which runs a finished run leaves."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Retention(BaseModel):
    """The number of runs that a garbage collection keeps in addition to running, pinned and named ones."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    keep: Annotated[int, Field(ge=0)] = 5
    """Number of the newest runs to keep: of those that finished, were refused, had nothing new, and did not end."""
    keep_days: Annotated[float, Field(ge=0)] | None = None
    """Also keep runs that began in this number of days; null: age keeps no run."""
