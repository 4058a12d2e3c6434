"""The platform that programs are made for: this process's own, or another for which one is compiled ahead of time.

Everything that a trace chooses by platform (kernels, types, sizes) asks here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

import jax

Platform = Literal["cpu", "gpu", "tpu"]

LANES = 128
"""Width of a TPU's vectors: the kernels' blocks and head sizes are multiples of it."""

# JAX's own context, not a ContextVar: it is part of the keys of compiled functions, so that what was traced for one
# platform is not taken for another.
_target = jax.make_user_context(None)
_few = jax.make_user_context(None)


def target_platform() -> str:
    """`cpu`, `gpu` or `tpu`: the platform of the program in tracing; by default the backend of this process."""
    return _target.value or jax.default_backend()


def compiling_for(platform: Platform) -> AbstractContextManager[None]:
    """Within it this thread traces for that platform, which this process need not have."""
    context: AbstractContextManager[None] = _target(platform)
    return context


def few_shapes() -> bool:
    """Whether shapes follow the limits of a recipe and not its data, so that a run compiles few programs.

    True for accelerators, whose programs take minutes to compile. On a CPU, where padding costs more than that, shapes
    follow the data.
    """
    return target_platform() != "cpu" if _few.value is None else _few.value


def choosing_few_shapes(few: bool) -> AbstractContextManager[None]:
    """Within it this thread has `few_shapes` as given, whatever the platform is."""
    context: AbstractContextManager[None] = _few(few)
    return context
