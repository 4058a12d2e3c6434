"""The memory that a stage needs on each device: exact sums of its arrays, and the peak by XLA's own compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rlhf.tuning.fit.machines import Machine

OPTIONS: dict[str, dict[str, Any]] = {
    # The bytes are planned before LLVM optimises.
    "cpu": {"xla_backend_optimization_level": 0},
    # Kernels cannot be timed without the device.
    "gpu": {"xla_gpu_autotune_level": 0},
    "tpu": {},
}


FEW, MORE = 2, 4
"""Layers of the two programs that stand for a program without a loop over layers: each further layer adds as much
as these do. Compiling all would take minutes."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """Of one device."""

    parts: dict[str, int]
    """Bytes of arrays by name, all of which are in memory at the same time."""
    shape: dict[str, Any]
    """How the work is divided: rows and micro-batches, or slots."""
    programs: Callable[[int], list[Any]]
    """Traces the stage's programs with a number of layers; their arguments are among `parts`."""
    layers: int = 0
    """Layers that the programs have one by one; 0: they loop over all."""
    within: int = 0
    """Bytes of `parts` that are temporary in the programs."""

    @property
    def held(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())


def peak(needs: Needs, on: Machine) -> int:
    """Bytes at the fullest moment of the stage's programs. Raises jax.errors.JaxRuntimeError if the compiler refuses
    a program, as that of TPUs does without room."""
    with on.compiling():
        if needs.layers <= MORE:
            most = max(_beside(program, on) for program in needs.programs(needs.layers))
        else:
            few, more = ([_beside(program, on) for program in needs.programs(layers)] for layers in (FEW, MORE))
            steps = (needs.layers - MORE) / (MORE - FEW)
            most = max(int(b + (b - a) * steps) for a, b in zip(few, more, strict=True))
    return needs.held - needs.within + most


def _beside(traced: Any, on: Machine) -> int:
    """Bytes of a compiled program next to its arguments."""
    platform = on.kind.platform
    lowered = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,))
    compiled = lowered.compile(compiler_options={} if on.here and platform != "cpu" else OPTIONS[platform])
    memory = compiled.memory_analysis()
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
