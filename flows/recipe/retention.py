"""The section `retention` of a recipe: which runs a finished run leaves."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Retention(BaseModel):
    """The number of runs that a garbage collection keeps in addition to running, pinned and named ones."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    keep: Annotated[int, Field(ge=0)] = 5
    """The newest of each recipe: so many that are finished, refused, with nothing new, and that have not ended."""
    keep_days: Annotated[float, Field(ge=0)] | None = None
    """Runs that began in the last so many days stay too; null: age keeps no run."""
