"""The workers of a run: one for all stages, or one for each role of the recipe's `workers`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rlhf.flows.graph.build import Node
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.running.cluster import Cluster, shared_memory
from rlhf.flows.running.cluster_role import RoleWorkers
from rlhf.stages.contract.registry import stage
from rlhf.stages.worker.client import Worker
from rlhf.stages.worker.devices import confined, device_kind
from rlhf.stages.worker.group import ProcessGroup, local_group
from rlhf.stages.worker.protocol import Report, Request

"""The input that is the policy which a stage samples from, trains or exports."""
ONLY = ""
"""The name of the worker of a run that has a single one."""


class Crew:
    """Workers by name. Each makes one stage at a time, and starts with its first stage."""

    def __init__(self, recipe: Recipe, run: str, log: Path):
        """log: file of a worker's output; several workers have files next to it (`log_of_worker`).

        Raises RecipeError if the recipe's cluster cannot be reached.
        """
        workers = self._settings = recipe.workers
        limits = (recipe.limits.stall_seconds, recipe.limits.stage_seconds)
        shared = shared_memory(recipe)
        self._workers: dict[str, Worker | ProcessGroup] = {}
        self._cluster = Cluster(recipe, run) if workers is not None and workers.cluster else None
        if workers is None:
            self._workers[ONLY] = Worker(log, *limits, shared)
        for name, settings in workers.named.items() if workers is not None else ():
            path = log_of_worker(log, name)
            if self._cluster is not None and workers is not None and workers.on_cluster(name):
                self._workers[name] = RoleWorkers(self._cluster, name, settings, path)
                continue
            shares = settings.shares
            variables = [shared] if shares is None else [confined(share, device_kind()) | shared for share in shares]
            if settings.hosts > 1:
                self._workers[name] = local_group(settings.hosts, path, *limits, variables)
            else:
                self._workers[name] = Worker(path, *limits, variables[0])
        self._locks = {name: threading.Lock() for name in self._workers}

    @property
    def names(self) -> list[str]:
        """The names of the workers."""
        return list(self._workers)

    @property
    def starts(self) -> int:
        """The number of starts of workers."""
        return sum(worker.starts for worker in self._workers.values())

    @property
    def logs(self) -> list[Path]:
        """The files of their output; those of workers that did not start do not exist."""
        return [log for worker in self._workers.values() for log in worker.logs]

    def of(self, node: Node) -> str:
        """Return the name of the worker that makes a node."""
        return ONLY if self._settings is None else self._settings.of(stage(node.stage).work)

    def run(
        self, node: Node, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None]
    ) -> dict[str, Any]:
        """Have a node's worker make it, as soon as that is free; raises as `Worker.run` does."""
        name = self.of(node)
        # It is busy if a damaged input has to be recomputed while the worker makes another stage.
        while not self._locks[name].acquire(timeout=1.0):
            check_time()
        try:
            return self._workers[name].run(request, on_event, check_time)
        finally:
            self._locks[name].release()

    def finish(self) -> None:
        """End all workers; if several do not end well, the first error is raised."""
        # They leave concurrently.
        for worker in self._workers.values():
            worker.leave()
        with contextlib.ExitStack() as ends:
            if self._cluster is not None:
                ends.callback(self._cluster.close)
            for worker in self._workers.values():
                ends.callback(worker.close)


def log_of_worker(log: Path, name: str) -> Path:
    """Return the file of a worker's output: `log` itself if a run has a single worker."""
    return log if name == ONLY else log.with_name(f"{log.stem}-{name}{log.suffix}")


def check_workers(recipe: Recipe, nodes: Collection[Node]) -> None:
    """Raises RecipeError if this machine lacks the devices of the recipe's workers, or a worker those of its stages."""
    workers = recipe.workers
    if workers is None:
        return
    kind = device_kind()
    on_cpu = kind.startswith("cpu")
    here = {name: settings for name, settings in workers.named.items() if not workers.on_cluster(name)}
    for name, settings in here.items():
        at = f"workers.{name}.devices"
        if settings.devices is None and len(here) > 1 and not on_cpu:
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
            for share in (settings.devices and settings.shares) or ():
                confined(share, kind)
        except ValueError as e:
            raise RecipeError(f"{at}: {e}") from e
    for node in nodes if not on_cpu else ():
        name = workers.of(stage(node.stage).work)
        if workers.named[name].devices == [] and stage(node.stage).computes(node.config):
            raise RecipeError(
                f"workers.{name}.devices is [], and {node.name} computes on a device: list one, or remove "
                f"workers.{name}"
            )
