"""What is said of a stage on a machine: bytes a device by part, FLOPs, and the least that a step can take.

The least is a roofline (Williams et al., 2009): FLOPs, bytes of memory and bytes between devices, each at the device's
public rate, and the largest of the three times. What is measured is longer: kernels reach 0.3 to 0.7 of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tuning.fit.machines import Machine

Bound = Literal["FLOPs", "memory", "interconnect"]


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one device."""

    parts: dict[str, int]
    """Bytes that are there for the whole stage, by what they are."""
    temporary: tuple[int, int, int]
    """Bytes beside them at the fullest moment: least, expected, most."""
    flops: float
    """FLOPs of a step."""
    moved: float
    """Bytes that a step reads and writes in memory."""
    sent: float
    """Bytes that a step sends to other devices."""
    shape: dict[str, Any]
    """How a step is divided: micro-batches, rows, slots."""
    step: str = "step"
    """What is counted as a step."""

    @property
    def held(self) -> int:
        """Bytes that are there for the whole stage."""
        return sum(self.parts.values())

    @property
    def peak(self) -> tuple[int, int, int]:
        """Bytes at the fullest moment: least, expected, most."""
        low, middle, high = (self.held + t for t in self.temporary)
        return low, middle, high

    def seconds(self, machine: Machine) -> dict[Bound, float]:
        """Seconds of a step by what it waits for, at the machine's public rates."""
        kind = machine.kind
        sent = self.sent / machine.link_rate if self.sent else 0.0
        return {"FLOPs": self.flops / kind.flops, "memory": self.moved / kind.memory_rate, "interconnect": sent}

    def verdict(self, machine: Machine) -> Literal["fits", "tight", "does not fit"]:
        """Whether the peak is within what the machine's devices have; `tight`: the expected one is, the most is not."""
        _, middle, high = self.peak
        if high <= machine.limit:
            return "fits"
        return "tight" if middle <= machine.limit else "does not fit"
