"""Damaged artifacts: checked again under their lease before they are moved to `damaged/`."""

from __future__ import annotations

from collections.abc import Callable

from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.leases import lease


def fault_of(store: Store, stage: str, key: str) -> tuple[Artifact | None, str | None]:
    """Return the artifact of a key and its damage, by the checksums of all files."""
    artifact, fault = store.examine(stage, key)
    return artifact, fault if artifact is None or fault is not None else store.verify(artifact)


def set_aside(
    store: Store,
    stage: str,
    key: str,
    on_wait: Callable[[str], None],
    check_time: Callable[[], None] = lambda: None,
) -> str | None:
    """Move the artifact of a key to `damaged/`, and return a line about it; None if no damaged one is there.

    A process that makes the artifact may have committed it since a caller saw damage: the check that decides holds the
    lease. on_wait, check_time: as in `lease`.
    """
    with lease(store, stage, key, on_wait, check_time):
        _, fault = fault_of(store, stage, key)
        if fault is None:
            return None
        return f"{store.address('artifacts', stage, key)}: {fault}; moved to {store.set_aside(stage, key)}"
