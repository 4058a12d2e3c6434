"""The axes of a mesh of devices, as settings. A separate module: engines need it without the settings of training."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import AfterValidator, Field


def _some(count: int) -> int:
    if not count:
        raise ValueError("an axis has 1 or more devices, or -1 for the devices that the others leave")
    return count


Devices = Annotated[int, Field(ge=-1), AfterValidator(_some)]


@dataclasses.dataclass(frozen=True)
class Axes:
    """Devices along each axis of the mesh; -1 takes what the others leave. One device needs none of it."""

    data: Devices = 1
    """Copies of the model, each with a part of the batch; -1: the remaining devices."""
    fsdp: Devices = -1
    """Shards of parameters, optimizer and batch; -1: the remaining devices."""
    tensor: Devices = 1
    """Shards of heads, feed-forward and vocabulary."""
    context: Devices = 1
    """Shards of the length of rows, for rows whose activations do not fit on one device."""
