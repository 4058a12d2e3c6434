"""The workers of a run: one for all stages, or one for each role of the recipe's `workers`."""

from __future__ import annotations

import contextlib
import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from rlhf.flows.graph.build import Node
from rlhf.flows.recipe.model import Recipe, RecipeError
from rlhf.flows.recipe.workers import Workers
from rlhf.flows.running.cluster import Cluster
from rlhf.flows.running.cluster_role import RoleWorkers
from rlhf.stages.contract.registry import stage
from rlhf.stages.worker.client import Worker
from rlhf.stages.worker.devices import confined, device_kind
from rlhf.stages.worker.group import local_group
from rlhf.stages.worker.protocol import Report, Request

POLICY = "policy"
"""The input that is the policy which a stage samples from, trains or exports."""
ONLY = ""
"""The name of the worker of a run that has one."""


class Maker(Protocol):
    """A worker of this host (`rlhf.stages.worker.client.Worker`), or the workers of a role on a cluster."""

    log: Path
    starts: int
    elsewhere: bool

    @property
    def logs(self) -> list[Path]: ...

    def run(
        self, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None]
    ) -> dict[str, Any]: ...
    def leave(self) -> None: ...
    def close(self) -> None: ...


class Crew:
    """Workers by name. Each makes one stage at a time, and is started for its first."""

    def __init__(self, recipe: Recipe, run: str, log: Path):
        """log: file of a worker's output; those of several are next to it, with their names (`log_of_worker`).

        Raises RecipeError where the cluster that the recipe names cannot be reached.
        """
        self._settings = recipe.workers
        self._workers: dict[str, Maker] = {}
        self._cluster = Cluster(recipe, run) if recipe.workers is not None and recipe.workers.cluster else None
        self._shared: dict[str, str] = {}
        """Variables of the cluster, with the code as it is when a stage begins."""
        self._code: dict[str, dict[str, str]] = {}
        """The variables with which each worker of this host has begun its last stage."""
        limits = (recipe.limits.stall_seconds, recipe.limits.stage_seconds)
        for name, variables in _variables(recipe.workers).items():
            place = log_of_worker(log, name)
            own = [ChainMap(one, self._shared) for one in variables]
            settings = None if recipe.workers is None else recipe.workers.settings(name)
            if settings is None or recipe.workers is None:
                self._workers[name] = Worker(place, *limits, own[0])
            elif self._cluster is not None and recipe.workers.on_cluster(name):
                self._workers[name] = RoleWorkers(self._cluster, name, settings, place)
            elif settings.hosts > 1:
                self._workers[name] = local_group(settings.hosts, place, *limits, own)
            else:
                self._workers[name] = Worker(place, *limits, own[0])
        self._locks = {name: threading.Lock() for name in self._workers}

    @property
    def names(self) -> list[str]:
        """The names of the workers; `ONLY` alone where there is one."""
        return list(self._workers)

    @property
    def starts(self) -> int:
        """How often workers were started."""
        return sum(worker.starts for worker in self._workers.values())

    @property
    def logs(self) -> list[Path]:
        """The files of their output; those of workers that were not started do not exist."""
        return [log for worker in self._workers.values() for log in worker.logs]

    def of(self, node: Node) -> str:
        """The name of the worker that makes a node."""
        return worker_of(self._settings, node)

    def run(
        self, node: Node, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None]
    ) -> dict[str, Any]:
        """Have a node's worker make it, as soon as that is free; raises as `Worker.run` does."""
        name = self.of(node)
        # It is busy if a damaged input has to be recomputed while the worker makes another stage.
        while not self._locks[name].acquire(timeout=1.0):
            check_time()
        try:
            self._take_current_code(name)
            return self._workers[name].run(request, on_event, check_time)
        finally:
            self._locks[name].release()

    def _take_current_code(self, name: str) -> None:
        """Restart a worker of this host whose requests would run earlier code on the nodes of the cluster."""
        worker = self._workers[name]
        if self._cluster is None or worker.elsewhere:
            return
        current = self._current_code()
        if self._code.get(name, current) != current:
            worker.close()
        self._code[name] = current

    def _current_code(self) -> dict[str, str]:
        """The variables of the cluster for the code as it is now, which processes that start from now on get."""
        if self._cluster is not None:
            self._shared.update(self._cluster.variables(self._cluster.runtime_env()))
        return dict(self._shared)

    def is_elsewhere(self, node: Node) -> bool:
        """Whether a node's worker is on another host, or may be."""
        return self._workers[self.of(node)].elsewhere

    def here(self, name: str) -> Worker:
        """A worker of this host, with the variables for the code as it is now."""
        worker = self._workers[name]
        self._current_code()
        assert isinstance(worker, Worker)
        return worker

    def finish(self) -> None:
        """Ends the workers, all of them also where one does not end well, of which the first is raised."""
        if len(self._workers) > 1:
            # They leave beside each other.
            for worker in self._workers.values():
                worker.leave()
        with contextlib.ExitStack() as ends:
            if self._cluster is not None:
                ends.callback(self._cluster.close)
            for worker in self._workers.values():
                ends.callback(worker.close)


def worker_of(workers: Workers | None, node: Node) -> str:
    """The name of the worker that makes a node: `ONLY` where one makes all."""
    return ONLY if workers is None else workers.of(stage(node.stage).work)


def log_of_worker(log: Path, name: str) -> Path:
    """The file of a worker's output: `log` itself where a run has one worker."""
    return log if name == ONLY else log.with_name(f"{log.stem}-{name}{log.suffix}")


def read_elsewhere(workers: Workers | None, nodes: Mapping[str, Node]) -> dict[str, set[str]]:
    """By node the nodes that load the policy which it makes, and are made by another worker; those that have none are
    left out."""
    found: dict[str, set[str]] = {}
    for node in nodes.values() if workers is not None else ():
        policy = node.inputs.get(POLICY)
        # A gate has one among its inputs too, and reads no weights.
        if policy is None or not stage(node.stage).computes(node.config):
            continue
        if worker_of(workers, nodes[policy.node]) != worker_of(workers, node):
            found.setdefault(policy.node, set()).add(node.name)
    return found


def check_workers(recipe: Recipe, nodes: Collection[Node]) -> None:
    """Raises RecipeError where this machine cannot have the recipe's workers, or one lacks devices for its stages."""
    workers = recipe.workers
    if workers is None:
        return
    kind = device_kind()
    for name, settings in workers.named.items():
        if workers.on_cluster(name):
            continue
        here = [n for n in workers.named if not workers.on_cluster(n)]
        if settings.devices is None and len(here) > 1 and not kind.startswith("cpu"):
            raise RecipeError(
                f"workers.{name}.devices: this machine has {kind}, and two workers cannot have all of them: say which "
                "this one has, such as [0, 1], or [] for none"
            )
        if settings.hosts > 1 and not settings.devices and not kind.startswith("cpu"):
            raise RecipeError(
                f"workers.{name}.devices: the {settings.hosts} processes of this worker share this machine's {kind}: "
                "list the devices that they divide, such as [0, 1]"
            )
        if settings.devices:
            try:
                for share in settings.shares or ():
                    confined(share, kind)
            except ValueError as e:
                raise RecipeError(f"workers.{name}.devices: {e}") from e
    if kind.startswith("cpu"):
        return
    for node in nodes:
        name = workers.of(stage(node.stage).work)
        if workers.named[name].devices == [] and stage(node.stage).computes(node.config):
            raise RecipeError(
                f"workers.{name}.devices is [], and {node.name} computes on one: give it a device, or leave "
                f"workers.{name} out"
            )


def _variables(workers: Workers | None) -> dict[str, list[dict[str, str]]]:
    """The variables of the environment of each worker's processes by its name; none for all of them together."""
    if workers is None:
        return {ONLY: [{}]}
    found: dict[str, list[dict[str, str]]] = {}
    for name, settings in workers.named.items():
        shares = settings.shares
        found[name] = [{}] if shares is None else [confined(share, device_kind()) for share in shares]
    return found
