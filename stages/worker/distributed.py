"""JAX over the ranks of a gang."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from tuning import ranks
from tuning.ranks import Ranks

NEVER_SECONDS = 10_000_000
"""JAX's own watch over processes is not needed, and would end one that was stopped together with all others."""


def initialize(here: Ranks, coordinator: str) -> None:
    """Connects this process's devices with those of the other ranks. Every rank calls it at the same time."""
    import jax

    # Elsewhere than on CPUs it means nothing.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    host, _, port = coordinator.rpartition(":")
    jax.distributed.initialize(
        coordinator,
        num_processes=here.size,
        process_id=here.rank,
        heartbeat_timeout_seconds=NEVER_SECONDS,
        coordinator_bind_address=f"{host}:{port}" if here.rank == 0 else None,
    )
    if (jax.process_index(), jax.process_count()) != (here.rank, here.size):
        found = f"process {jax.process_index()} of {jax.process_count()}"
        raise RuntimeError(
            f"rank {here.rank} of {here.size} is {found} to its devices: number ranks as the place numbers its hosts"
        )
    from tuning.device import memory_bytes

    ranks.use(here)
    try:
        # Kept from now on: all ranks go by the least that one has.
        memory_bytes()
    finally:
        ranks.use(None)


def leave() -> NoReturn:
    """Ends this process with status 1 and at once: JAX would wait for the other ranks, five minutes, in which it seems
    to be well."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(1)
