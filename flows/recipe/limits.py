"""The section `limits` of a recipe: how long a run, a stage and silence may last. It is in no key."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]


class Limits(BaseModel):
    """How long things may take before they are ended; what is finished is kept, and the same command goes on."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    stall_seconds: Seconds | None = 7200.0
    """Time that a stage may report nothing before its worker is ended as hung, and thrice that while it compiles;
    null: for ever."""
    stage_seconds: Seconds | None = None
    """Time that one stage may be at work before its worker is ended, and the stage tried again as often as `retries`
    says; null: any."""
    run_seconds: Seconds | None = None
    """Time that a whole run may take, waits and retries included, before it fails; null: any."""
