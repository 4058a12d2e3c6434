"""The workers of a run or a sweep: one for all stages, or one for each role of the recipe's `workers`."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from rlhf.flows.graph.build import Node
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.workers import Workers
from rlhf.flows.records import log_of
from rlhf.flows.running.cluster import Cluster, shared_memory
from rlhf.flows.running.cluster_role import RoleWorkers
from rlhf.stages.contract.registry import stage
from rlhf.stages.store.artifacts import Store
from rlhf.stages.worker.client import Worker
from rlhf.stages.worker.devices import confined, device_kind
from rlhf.stages.worker.group import ProcessGroup, local_group
from rlhf.stages.worker.protocol import Report, Request

ONLY = ""
"""The name of the worker of a run that has a single one."""


class Crew:
    """Workers by name. Each makes one stage at a time, and starts with its first stage."""

    def __init__(self, recipe: Recipe, name: str, cluster: Cluster | None = None):
        """name: of the run or sweep. cluster: that of the recipe."""
        workers = self._settings = recipe.workers
        self._store = Store(recipe.store)
        log = log_of(self._store, name)
        limits = (recipe.limits.stall_seconds, recipe.limits.stage_seconds)
        shared = shared_memory(recipe)
        self._workers: dict[str, Worker | ProcessGroup] = {}
        if workers is None:
            self._workers[ONLY] = Worker(log, *limits, shared)
        for role, settings in workers.named.items() if workers is not None else ():
            path = log_of_worker(log, role)
            if cluster is not None and workers is not None and workers.on_cluster(role):
                self._workers[role] = RoleWorkers(cluster, role, settings, path)
                continue
            shares = settings.shares
            variables = [shared] if shares is None else [confined(share, device_kind()) | shared for share in shares]
            if settings.hosts > 1:
                self._workers[role] = local_group(settings.hosts, path, *limits, variables)
            else:
                self._workers[role] = Worker(path, *limits, variables[0])
        self._locks = {name: threading.Lock() for name in self._workers}
        self.used = set[tuple[str, str, int]]()
        """Runs with the worker processes that made stages of them: names and numbers of starts."""

    @property
    def names(self) -> list[str]:
        """The names of the workers."""
        return list(self._workers)

    def of(self, node: Node) -> str:
        """Return the name of the worker that makes a node."""
        return ONLY if self._settings is None else self._settings.of(stage(node.stage).work)

    def run(
        self, node: Node, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None]
    ) -> dict[str, Any]:
        """Have a node's worker make it, as soon as that is free; raises as `Worker.run` does.

        The output goes to a file of the run, with one worker `worker.log`, else `worker-ROLE.log`.
        """
        name = self.of(node)
        log = log_of_worker(log_of(self._store, request.run), name)
        log.parent.mkdir(parents=True, exist_ok=True)
        request = dataclasses.replace(request, log=str(log))
        # It is busy if a damaged input has to be recomputed while the worker makes another stage.
        while not self._locks[name].acquire(timeout=1.0):
            check_time()
        worker = self._workers[name]
        try:
            return worker.run(request, on_event, check_time)
        finally:
            self.used.add((request.run, name, worker.starts))
            self._locks[name].release()

    def finish(self) -> None:
        """End all workers; if several do not end well, the first error is raised."""
        # They leave concurrently.
        for worker in self._workers.values():
            worker.leave()
        with contextlib.ExitStack() as ends:
            for worker in self._workers.values():
                ends.callback(worker.close)


@contextlib.contextmanager
def crews_of(recipe: Recipe, name: str, count: int) -> Iterator[list[Crew]]:
    """Give several crews of a recipe's workers, which divide the devices, and end them.

    name: of the run or sweep. Raises RecipeError if the recipe's cluster cannot be reached.
    """
    workers = recipe.workers
    with contextlib.ExitStack() as ends:
        cluster = None
        if workers is not None and workers.cluster:
            cluster = ends.enter_context(contextlib.closing(Cluster(recipe, name)))
        parts = [None] * count if workers is None else workers.divided(count)
        crews = [Crew(recipe.model_copy(update={"workers": part}), name, cluster) for part in parts]
        for crew in crews:
            ends.callback(crew.finish)
        yield crews


def log_of_worker(log: Path, name: str) -> Path:
    """Return the file of a worker's output: `log` itself if a run has a single worker."""
    return log if name == ONLY else log.with_name(f"{log.stem}-{name}{log.suffix}")


def check_workers(recipe: Recipe, nodes: Collection[Node], crews: int = 1) -> None:
    """Raises RecipeError if this machine lacks the devices of the recipe's workers, or a worker those of its stages.

    crews: number of workers of each role, which divide its devices.
    """
    workers = recipe.workers or (Workers() if crews > 1 else None)
    if workers is None:
        return
    kind = device_kind()
    on_cpu = kind.startswith("cpu")
    here = {name: settings for name, settings in workers.named.items() if not workers.on_cluster(name)}
    for name, settings in here.items():
        at = f"workers.{name}.devices"
        if settings.devices is None and len(here) * crews > 1 and not on_cpu:
            raise RecipeError(
                f"{at}: this machine has {kind}, and two workers cannot have all of them: list the devices of this "
                "worker, such as [0, 1], or [] for none"
            )
        if settings.hosts > 1 and not settings.devices and not on_cpu:
            raise RecipeError(
                f"{at}: the {settings.hosts} processes of this worker share this machine's {kind}: list the devices "
                "that they divide, such as [0, 1]"
            )
        try:
            parts, count = crews * settings.hosts, len(settings.devices or ())
            if count % parts:
                raise ValueError(f"{count} devices cannot be divided among {crews} workers (--workers)")
            for part in settings.divided(parts) if count else ():
                confined(part.devices or [], kind)
        except ValueError as e:
            raise RecipeError(f"{at}: {e}") from e
    for node in nodes if not on_cpu else ():
        name = workers.of(stage(node.stage).work)
        if workers.named[name].devices == [] and stage(node.stage).computes(node.config):
            raise RecipeError(
                f"workers.{name}.devices is [], and {node.name} computes on a device: list one, or remove "
                f"workers.{name}"
            )
