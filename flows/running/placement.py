"""Reserves the resources of a role on a Ray cluster, and reports the reason where a role has to wait for them."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.flows.recipe.workers import WorkerSettings
from rlhf.stages.worker.client import StageFailed

LOOK_SECONDS = 1.0
REPORT_SECONDS = 60.0
"""How often a role that waits reports it."""
SLICE_SECONDS = 20.0
"""How long one attempt to reserve a TPU slice takes."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The reserved resources of a role: a Ray placement group with a bundle for each host."""

    group: Any
    bundles: list[dict[str, float]]
    release: Callable[[], None]

    def is_whole(self) -> bool:
        """Whether no node of it was lost since it was reserved."""
        from ray.util import placement_group_table

        return bool(placement_group_table(self.group)["state"] == "CREATED")


def place(
    role: str,
    settings: WorkerSettings,
    wait_seconds: float,
    tell: Callable[[str], None],
    check_time: Callable[[], None],
) -> Placement:
    """Reserves a role's resources, each bundle on a node of its own where the cluster has that many.

    wait_seconds: for resources that no node has; for those in use it waits without limit. Raises StageFailed, naming
    what is missing.
    """
    wait = _Wait(role, settings, wait_seconds, tell, check_time)
    if settings.tpu is not None:
        return _place_slice(settings, wait)
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles = [settings.bundle()] * settings.hosts
    while True:
        # Fewer nodes than hosts may have the resources of all of them, as a node with eight GPUs for two processes.
        spread = wait.spread()
        group = placement_group(bundles, strategy="STRICT_SPREAD" if spread else "PACK")
        try:
            while not group.wait(LOOK_SECONDS):
                wait.look()
                if wait.spread() != spread:
                    break
            else:
                return Placement(group, bundles, functools.partial(remove_placement_group, group))
        except BaseException:
            remove_placement_group(group)
            raise
        remove_placement_group(group)


def _place_slice(settings: WorkerSettings, wait: _Wait) -> Placement:
    from ray.util.tpu import slice_placement_group

    assert settings.tpu is not None
    version, _, topology = settings.tpu.partition(":")
    while True:
        try:
            found = slice_placement_group(
                topology,
                version,
                resources_per_bundle=settings.bundle(),
                strategy="STRICT_SPREAD",
                head_reservation_timeout_s=SLICE_SECONDS,
            )
            break
        except ValueError as e:
            raise StageFailed(f"workers.{wait.role}.tpu: {e}") from e
        except (TimeoutError, RuntimeError):
            wait.look()
    try:
        while not found.placement_group.wait(LOOK_SECONDS):
            wait.look()
    except BaseException:
        found.shutdown()
        raise
    return Placement(found.placement_group, [dict(found.bundle_resources)] * found.num_bundles, found.shutdown)


class _Wait:
    """The wait of one role for its resources."""

    def __init__(
        self,
        role: str,
        settings: WorkerSettings,
        seconds: float,
        tell: Callable[[str], None],
        check_time: Callable[[], None],
    ):
        self.role, self._settings, self._seconds = role, settings, seconds
        self._tell, self._check_time = tell, check_time
        self._reported = -math.inf
        self._lacking_since: float | None = None

    def spread(self) -> bool:
        """Whether each bundle is placed on a node of its own."""
        fits = _fits(self._settings)
        return len(fits) >= self._settings.hosts or sum(fits.values()) < self._settings.hosts

    def look(self) -> None:
        """Reports the wait, and ends it with StageFailed when the cluster does not have the resources for too long."""
        self._check_time()
        now = time.monotonic()
        lacking = self._settings.tpu is not None or sum(_fits(self._settings).values()) < self._settings.hosts
        self._lacking_since = (self._lacking_since or now) if lacking else None
        needs = f"{self._needs()}; nodes: {_shown_nodes()}"
        if self._lacking_since is not None and now - self._lacking_since >= self._seconds:
            raise StageFailed(
                f"role {self.role} needs {needs}. No such resources within {self._seconds:g} s "
                f"(workers.wait_seconds): start nodes that have them, or change workers.{self.role}"
            )
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            which = "the cluster does not have" if lacking else "others use"
            join = f"; `ray start --address={_gcs()}` on a host adds it" if lacking else ""
            self._tell(f"role {self.role} waits for resources that {which}: {needs}{join}")

    def _needs(self) -> str:
        settings = self._settings
        if settings.tpu is not None:
            return f"a TPU slice {settings.tpu}"
        hosts = f"{settings.hosts} hosts with " if settings.hosts > 1 else ""
        return f"{hosts}{_shown(settings.bundle())}{' each' if hosts else ''}"


def _gcs() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _fits(settings: WorkerSettings) -> dict[str, int]:
    """By node how many bundles its resources are enough for, in use or not; nodes without enough are left out."""
    found = {}
    for node in _nodes():
        count = min(int(node["Resources"].get(name, 0) // amount) for name, amount in settings.bundle().items())
        if count:
            found[node["NodeID"]] = count
    return found


def _shown(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) + "}"


def _shown_nodes() -> str:
    """Name, address and resources of each node, without what Ray adds by itself."""
    hidden = ("memory", "object_store_memory")
    return ", ".join(
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) "
        + _shown({n: a for n, a in sorted(node["Resources"].items()) if n not in hidden and not n.startswith("node:")})
        for node in _nodes()
    )
