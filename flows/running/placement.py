"""Reserves the resources of a role on a Ray cluster, and reports why a role waits for them."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.flows.recipe.workers import WorkerSettings
from rlhf.stages.worker.client import StageFailed

WAIT_SECONDS = 1.0
REPORT_SECONDS = 60.0
"""Time between two reports of a role that waits."""
SLICE_SECONDS = 20.0
"""Time of one attempt to reserve a TPU slice."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The reserved resources of a role: a Ray placement group with a bundle for each host."""

    group: Any
    bundles: list[dict[str, float]]
    release: Callable[[], None]

    def is_whole(self) -> bool:
        """Whether the cluster still has all nodes of the reservation."""
        from ray.util import placement_group_table

        return bool(placement_group_table(self.group)["state"] == "CREATED")


def reserve(
    role: str,
    settings: WorkerSettings,
    wait_seconds: float,
    log: Callable[[str], None],
    check_time: Callable[[], None],
) -> Placement:
    """Reserve a role's resources, each bundle on another node if the cluster has that many.

    wait_seconds: for resources that no node has; for those in use it waits without limit. Raises StageFailed with the
    missing resources.
    """
    reported, lacking_since = -math.inf, math.inf

    def look() -> None:
        """Report the wait; raises StageFailed if the cluster has lacked the resources for too long."""
        import ray

        nonlocal reported, lacking_since
        check_time()
        now, bundle = time.monotonic(), settings.bundle()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        fits = sum(min(int(n["Resources"].get(name, 0) // amount) for name, amount in bundle.items()) for n in nodes)
        lacking = settings.tpu is not None or fits < settings.hosts
        lacking_since = min(lacking_since, now) if lacking else math.inf
        needs = f"a TPU slice {settings.tpu}" if settings.tpu else _shown(bundle)
        needs = f"{settings.hosts} hosts with {needs} each" if settings.hosts > 1 else needs
        needs += f"; nodes: {', '.join(map(_shown_node, nodes))}"
        if now - lacking_since >= wait_seconds:
            raise StageFailed(
                f"role {role} needs {needs}. No such resources within {wait_seconds:g} s (workers.wait_seconds): start "
                f"nodes that have them, or change workers.{role}"
            )
        if now - reported >= REPORT_SECONDS:
            reported = now
            which = "the cluster does not have" if lacking else "others use"
            gcs = ray.get_runtime_context().gcs_address
            join = f"; `ray start --address={gcs}` on a host adds it" if lacking else ""
            log(f"role {role} waits for resources that {which}: {needs}{join}")

    placement = _reserve_slice(settings, role, look) if settings.tpu is not None else _reserve_bundles(settings)
    try:
        while not placement.group.wait(WAIT_SECONDS):
            look()
    except BaseException:
        placement.release()
        raise
    return placement


def _reserve_bundles(settings: WorkerSettings) -> Placement:
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles = [settings.bundle()] * settings.hosts
    group = placement_group(bundles, strategy="SPREAD")
    return Placement(group, bundles, functools.partial(remove_placement_group, group))


def _reserve_slice(settings: WorkerSettings, role: str, look: Callable[[], None]) -> Placement:
    from ray.util.tpu import slice_placement_group

    version, _, topology = str(settings.tpu).partition(":")
    while True:
        try:
            found = slice_placement_group(
                topology,
                version,
                resources_per_bundle=settings.bundle(),
                strategy="STRICT_SPREAD",
                head_reservation_timeout_s=SLICE_SECONDS,
            )
            return Placement(found.placement_group, [dict(found.bundle_resources)] * found.num_bundles, found.shutdown)
        except ValueError as e:
            raise StageFailed(f"workers.{role}.tpu: {e}") from e
        except (TimeoutError, RuntimeError):
            look()


def _shown(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) + "}"


def _shown_node(node: Mapping[str, Any]) -> str:
    """Return name, address and resources of a node, without the resources that Ray adds."""
    hidden = ("memory", "object_store_memory")
    own = {n: a for n, a in sorted(node["Resources"].items()) if n not in hidden and not n.startswith("node:")}
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) {_shown(own)}"
