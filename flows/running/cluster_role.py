"""The workers of one role on a Ray cluster: an actor on each of its hosts, and the process group of their workers.

A role holds a placement group with one bundle for each host. Actors (`rlhf.stages.worker.ray_actor`) are not detached:
Ray ends them with the process of the run, and their worker processes end with them. A lost actor or node counts as a
dead worker: new actors repeat the stage.

`reserve` holds the resources of a role, and reports why the role waits for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf.flows.recipe.workers import WorkerSettings
from rlhf.flows.running.cluster import AUTH_MODE, LOOPBACK, Cluster
from rlhf.stages.worker import host_compat
from rlhf.stages.worker.client import RESUMES, StageFailed, WorkerDied, any_time
from rlhf.stages.worker.devices import device_kind
from rlhf.stages.worker.group import ProcessGroup, log_of_process
from rlhf.stages.worker.protocol import Done, Report, Request
from rlhf.tuning import multihost

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


STOP_SECONDS = 8.0
"""For an actor to end its worker."""


class ClusterWorker:
    """A worker on one host of the cluster: a member of a process group."""

    def __init__(self, cluster: Cluster, actor: Any, about: dict[str, Any], log: Path):
        """about: the description of the host by its actor. log: the run's copy of the worker's log."""
        self.log, self._cluster, self.actor, self.about = log, cluster, actor, about
        self._number = self._copied = 0
        self._leaving: Any = None

    @property
    def pid(self) -> int | None:
        """The process of the actor, on its host."""
        return int(self.about["pid"])

    @property
    def where(self) -> str:
        """The node, for messages."""
        return f"node {self.about['host']} ({self.about['address']}, {self.about['node'][:8]})"

    def run(
        self, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None] = any_time
    ) -> dict[str, Any]:
        """Run one stage and return its manifest; as `Worker.run`, with the same errors."""
        import ray

        store = self._cluster.store
        url = store.root if store.is_local else request.store
        # The worker has a log on its host, of which the run gets a copy.
        self.log, sent = Path(request.log), dataclasses.replace(request, store=url, elsewhere=True, log="")
        self._number += 1
        read = 0
        try:
            _answer(self.actor.begin.remote(self._number, sent), check_time)
            while True:
                events = self._poll(read, check_time)
                read += len(events)
                for event in events:
                    match event:
                        case Done(manifest):
                            return manifest
                        case Exception():
                            text = str(event).replace(self.about["log"], str(self.log))
                            raise type(event)(f"{text}\n  on {self.where}")
                        case report:
                            on_event(report)
        except ray.exceptions.RayError as e:
            raise WorkerDied(self._obituary(request, e)) from e

    def _poll(self, read: int, check_time: Callable[[], None] = any_time) -> list[Any]:
        """Return the next events, and append the log that came with them to the run's copy."""
        events, text = _answer(self.actor.poll.remote(self._number, read, self._copied), check_time)
        if text:
            self._copied += len(text)
            with self.log.open("ab") as log:
                log.write(text)
        return list(events)

    def _obituary(self, request: Request, error: Exception) -> str:
        import ray

        cause = f"its actor ended ({_cause(error)})"
        with contextlib.suppress(Exception):
            if not any(node["NodeID"] == self.about["node"] and node["Alive"] for node in ray.nodes()):
                cause = f"the node left the cluster; `ray start --address={self._cluster.gcs}` on it joins it again"
        return f"the worker on {self.where} was lost in stage {request.stage}: {cause}\n{RESUMES}\n  log: {self.log}"

    def write_stacks(self) -> None:
        """Has the worker write the stacks of its threads to its log."""
        import ray

        with contextlib.suppress(Exception):
            ray.get(self.actor.write_stacks.remote(), timeout=STOP_SECONDS)
            self._poll(0)

    def kill(self) -> None:
        """Ends the actor and its worker at once."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self.actor)

    def leave(self) -> None:
        """Starts the end of the worker."""
        with contextlib.suppress(Exception):
            self._leaving = self._leaving or self.actor.close.remote()

    def close(self) -> None:
        """Ends the worker, then the actor."""
        import ray

        self.leave()
        with contextlib.suppress(Exception):
            ray.wait([self._leaving], timeout=STOP_SECONDS)
        self.kill()


class RoleWorkers(ProcessGroup):
    """The workers of a role on the cluster: reserved and started for a stage, and again after a failure."""

    def __init__(self, cluster: Cluster, role: str, settings: WorkerSettings, log: Path):
        super().__init__(self._start_members, log, cluster.recipe.limits.stall_seconds)
        self._cluster, self._role, self._settings = cluster, role, settings
        self._placement: Placement | None = None

    def close(self) -> None:
        """End the workers, and return their resources to the cluster."""
        super().close()
        placement, self._placement = self._placement, None
        if placement is not None:
            with contextlib.suppress(Exception):
                placement.release()

    def _start_members(self, log: Callable[[str], None], check_time: Callable[[], None]) -> list[ClusterWorker]:
        import ray

        assert self._cluster.recipe.workers is not None
        wait_seconds = self._cluster.recipe.workers.wait_seconds
        placement = self._placement = reserve(self._role, self._settings, wait_seconds, log, check_time)
        actors: list[Any] = []
        rejoin = f"`ray start --address={self._cluster.gcs}` on a lost node joins it again"

        def check() -> None:
            check_time()
            # Ray would wait without a report until the cluster has another node for the actor.
            if not placement.is_whole():
                raise WorkerDied(f"a node of role {self._role} left the cluster while its workers started; {rejoin}")

        try:
            runtime_env = self._cluster.runtime_env()
            actors = self._actors(placement, runtime_env)
            members = self._described(actors, check)
            address = members[0].about["address"]
            port = _answer(members[0].actor.free_port.remote(address), check)
            for number, member in enumerate(members):
                group = multihost.variables(f"{address}:{port}", len(members), number) if len(members) > 1 else {}
                variables = group | self._cluster.variables(runtime_env)
                _answer(member.actor.set_environment.remote(variables), check)
        except BaseException as e:
            for actor in actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor)
            self.close()
            if isinstance(e, ray.exceptions.RayError):
                raise WorkerDied(f"the workers of role {self._role} did not start ({_cause(e)})\n  {rejoin}") from e
            raise
        log(f"role {self._role} runs on {', '.join(member.where for member in members)}")
        return members

    def _actors(self, placement: Placement, runtime_env: dict[str, Any]) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from rlhf.stages.worker.ray_actor import HostWorker

        host_worker = ray.remote(HostWorker)
        return [
            host_worker.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, number),
                runtime_env=runtime_env,
                # A poll waits while another call arrives.
                max_concurrency=4,
                max_restarts=0,
                max_task_retries=-1,
            ).remote(f"{self._cluster.run}-{self._role}", self._cluster.recipe.limits.stage_seconds)
            for number, bundle in enumerate(placement.bundles)
        ]

    def _described(self, actors: list[Any], check: Callable[[], None]) -> list[ClusterWorker]:
        """Return the members in the order of their processes, after checks of each host."""
        import ray

        kind = self._settings.device or device_kind()
        # Another folder may have the store's name on a node: only the run's store has the run's record.
        record = str(self.log.parent)
        found = [(actor, _answer(actor.describe.remote(kind, record), check)) for actor in actors]
        # A TPU numbers its hosts, and JAX numbers processes as the TPU does.
        numbers = {node["NodeID"]: int(node["Labels"].get("ray.io/tpu-worker-id", 0)) for node in ray.nodes()}
        found.sort(key=lambda one: numbers.get(one[1]["node"], 0))
        members = []
        for number, (actor, about) in enumerate(found):
            log = log_of_process(self.log, number)
            log.parent.mkdir(parents=True, exist_ok=True)
            members.append(ClusterWorker(self._cluster, actor, about, log))
        for member in members:
            self._check(member, found[0][1]["properties"], same_kind=True)
            self._check(member, host_compat.properties(device_kind()), same_kind=kind == device_kind())
        return members

    def _check(self, member: ClusterWorker, own: dict[str, str], same_kind: bool) -> None:
        """Raises StageFailed for a node that accepts commands without a token, or would compute other bits.

        own: properties of the host that it is compared with. same_kind: whether both have one kind of device.
        """
        about, role, store = member.about, self._role, self._cluster.store
        if not about["token"] and about["address"] not in LOOPBACK:
            raise StageFailed(
                f"{member.where} runs Ray without token authentication, so anybody who reaches its ports runs code "
                f"there: start Ray on every host with {AUTH_MODE}=token"
            )
        if store.is_local and not about["store"]:
            raise StageFailed(
                f"{member.where} of role {role} does not see the run in {store.root}: the store has to be a folder "
                "that all hosts share, or a URL such as s3://BUCKET/PATH"
            )
        if (found := host_compat.difference(own, about["properties"], same_kind)) is not None:
            hint = f", or set workers.{role}.device" if self._settings.device is None else ""
            raise StageFailed(f"{member.where} of role {role} is refused: {found}{hint}")


def _cause(error: Exception) -> str:
    """Return an error of Ray in one line: the last line of a traceback, else the first line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if any(line.startswith("Traceback") or "ray::" in line for line in lines) else 0].strip()


def _answer(call: Any, check_time: Callable[[], None]) -> Any:
    """Return the result of a call; `check_time` is called every second."""
    import ray

    while not ray.wait([call], timeout=WAIT_SECONDS)[0]:
        check_time()
    return ray.get(call)
