"""The workers of a run on a Ray cluster.

A role with workers on a cluster holds a placement group with one bundle, and one actor (`stages.worker.ray_actor`), on
each of its hosts. Actors are not detached: Ray ends them with the process of the run, and their worker processes end with
them. An actor or node that is lost is a worker that died: the stage is tried again, by new actors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flows.recipe.model import Recipe, RecipeError
from flows.recipe.workers import WorkerSettings
from flows.running.code_package import write_package
from flows.running.placement import place
from stages.store.artifacts import Store
from stages.worker import host_compat
from stages.worker.client import CodeChanged, StageFailed, WorkerDied
from stages.worker.devices import device_kind
from stages.worker.protocol import Done, Log, Report, Request
from tuning import multihost

AUTH_MODE = "RAY_AUTH_MODE"
ADDRESS, RUNTIME_ENV = "RLHF_CLUSTER", "RLHF_CLUSTER_RUNTIME_ENV"
"""Variables by which workers spread requests over the cluster (`tuning.parallel`)."""
LOOPBACK = ("127.", "::1", "localhost")
WAIT_SECONDS = 1.0
CALL_SECONDS = 60.0
"""For an actor that lives to answer a short call."""
STOP_SECONDS = 8.0
"""For an actor to end a stage, or its worker."""


class Cluster:
    """The connection of a run to its cluster."""

    def __init__(self, recipe: Recipe, run: str):
        """Connects. Raises RecipeError, with the remedy, where that fails."""
        assert recipe.workers is not None and recipe.workers.cluster is not None
        self.address, self.recipe, self.run = recipe.workers.cluster, recipe, run
        self.store = Store(recipe.store)
        self._folder = tempfile.TemporaryDirectory(prefix="rlhf-cluster-")
        # Ray compares versions of itself and of Python. Its default would be decided by whether a token is there.
        if not self.address.startswith(LOOPBACK):
            os.environ.setdefault(AUTH_MODE, "token")
        try:
            import ray
        except ImportError:
            raise RecipeError("workers.cluster needs Ray: pip install 'rlhf-pipeline[ray]'") from None
        with _own_signal_handlers():
            try:
                ray.init(
                    self.address,
                    namespace=run,
                    runtime_env={"working_dir": str(self._package())},
                    log_to_driver=False,
                    configure_logging=False,
                )
            except Exception as e:
                raise RecipeError(_not_connected(self.address, e)) from e
        self.gcs = str(ray.get_runtime_context().gcs_address)

    def _package(self) -> Path:
        path = Path(self._folder.name) / "code.zip"
        try:
            write_package(path, Path.cwd())
        except ValueError as e:
            raise RecipeError(f"workers.cluster: {e}") from e
        return path

    def runtime_env(self) -> dict[str, Any]:
        """Ray's `runtime_env` with the code as it is now, which a fresh worker loads."""
        # The public way is `ray.init`, once a run.
        from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

        return upload_working_dir_if_needed({"working_dir": str(self._package())}, include_gitignore=False)

    def variables(self, runtime_env: dict[str, Any]) -> dict[str, str]:
        """The environment of workers that spread requests over the cluster."""
        return {ADDRESS: self.gcs, RUNTIME_ENV: json.dumps(runtime_env)}

    def has(self, role: str) -> bool:
        """Whether a role's workers run on the cluster."""
        assert self.recipe.workers is not None
        return self.recipe.workers.on_cluster(role)

    def workers(self, role: str, settings: WorkerSettings, log: Path) -> RoleWorkers:
        """The workers of a role, which its first stage starts."""
        return RoleWorkers(self, role, settings, log)

    def close(self) -> None:
        """Disconnects: Ray ends what is left of the run's actors."""
        import ray

        with _own_signal_handlers(), contextlib.suppress(Exception):
            ray.shutdown()
        self._folder.cleanup()


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keeps the handlers of SIGTERM and SIGINT, which Ray replaces, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _not_connected(address: str, error: Exception) -> str:
    from ray.exceptions import AuthenticationError

    if isinstance(error, AuthenticationError):
        return (
            f"workers.cluster: {address} was not reached with token authentication ({error}). Generate a token once "
            "(`ray get-auth-token --generate`), copy it to ~/.ray/auth_token or RAY_AUTH_TOKEN of every host, and start "
            "Ray there with RAY_AUTH_MODE=token"
        )
    return (
        f"workers.cluster: no connection to Ray at {address} ({type(error).__name__}: {error}). The run's own host has to "
        "be a node of the cluster: `ray status` shows it, `ray start --address=HOST:PORT` joins it"
    )


class ClusterWorker:
    """A worker on one host of the cluster; its interface is that of `stages.worker.client.Worker`."""

    def __init__(self, actor: Any, about: dict[str, Any], log: Path, cluster: Cluster):
        self.log, self.starts, self._actor, self._about, self._cluster = log, 1, actor, about, cluster
        self._number = self._read = 0

    @property
    def shown(self) -> str:
        """The host, for messages."""
        return f"{self._about['host']} ({self._about['address']})"

    @property
    def pid(self) -> int | None:
        """The process of the actor, on its host."""
        return int(self._about["pid"])

    def run(
        self, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Runs one stage and returns its manifest; as `Worker.run`, with the same errors."""
        import ray

        store = self._cluster.store
        sent = dataclasses.replace(request, store=store.root if store.is_local else request.store, elsewhere=True)
        self._number += 1
        read = 0
        try:
            self._call(self._actor.begin.remote(self._number, sent), check_time)
            while True:
                events, text = self._call(self._actor.poll.remote(read, self._read), check_time)
                self._copy(text)
                read += len(events)
                for event in events:
                    match event:
                        case Done(manifest):
                            return manifest
                        case StageFailed() | WorkerDied():
                            raise self._with_place(event)
                        case report:
                            on_event(report)
        except ray.exceptions.RayError as e:
            raise WorkerDied(self._obituary(request, e)) from e
        except (StageFailed, WorkerDied):
            raise
        except BaseException as e:
            if not isinstance(e, KeyboardInterrupt):
                # Its log gets the stacks.
                with contextlib.suppress(Exception):
                    ray.get(self._actor.stop.remote(), timeout=STOP_SECONDS)
                    self._copy(ray.get(self._actor.poll.remote(read, self._read), timeout=STOP_SECONDS)[1])
            self.kill()
            raise

    def _call(self, call: Any, check_time: Callable[[], None]) -> Any:
        import ray

        while not ray.wait([call], timeout=WAIT_SECONDS)[0]:
            check_time()
        check_time()
        return ray.get(call)

    def _copy(self, text: bytes) -> None:
        """Appends a part of the host's log to the run's own copy."""
        if text:
            self._read += len(text)
            with self.log.open("ab") as log:
                log.write(text)

    def _with_place(self, error: Exception) -> Exception:
        text = str(error).replace(self._about["log"], str(self.log))
        return type(error)(f"{text}\n  on node {self.shown}")

    def _obituary(self, request: Request, error: Exception) -> str:
        import ray

        alive = False
        with contextlib.suppress(Exception):
            alive = any(node["NodeID"] == self._about["node"] and node["Alive"] for node in ray.nodes())
        cause = (
            f"its actor ended ({str(error).strip().splitlines()[0]})"
            if alive
            else f"the node left the cluster; `ray start --address={self._cluster.gcs}` on it joins it again"
        )
        return (
            f"the worker on node {self.shown} was lost in stage {request.stage}: {cause}\n"
            f"  finished stages, shards and checkpoints are kept; the same command resumes\n  log: {self.log}"
        )

    def kill(self) -> None:
        """Ends the actor and its worker at once."""
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self._actor)

    def leave(self) -> Any:
        """Starts the end of the worker."""
        with contextlib.suppress(Exception):
            return self._actor.close.remote()

    def close(self) -> None:
        """Ends the worker, then the actor."""
        import ray

        with contextlib.suppress(Exception):
            ray.get(self.leave(), timeout=STOP_SECONDS)
        self.kill()


class RoleWorkers:
    """The workers of a role: started by its first stage, and started anew after one of them was lost."""

    elsewhere = True
    """Whether they run on other hosts."""

    def __init__(self, cluster: Cluster, role: str, settings: WorkerSettings, log: Path):
        self.log, self.starts = log, 0
        self._cluster, self._role, self._settings = cluster, role, settings
        self._workers: list[ClusterWorker] = []
        self._release: Callable[[], None] = _nothing

    def run(
        self, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Runs one stage and returns its manifest; as `Worker.run`, with the same errors."""
        if not self._workers:
            tell: Callable[[str], None] = lambda line: on_event(Log(line))  # noqa: E731
            self._workers, self._release = start_workers(
                self._cluster, self._role, self._settings, self.log, tell, check_time
            )
            self.starts += 1
        try:
            return self._workers[0].run(request, on_event, check_time)
        except BaseException as e:
            if not isinstance(e, StageFailed) or isinstance(e, CodeChanged):
                self.kill()
            raise

    def kill(self) -> None:
        """Ends the workers at once, and gives their resources back."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        release, self._release = self._release, _nothing
        with contextlib.suppress(Exception):
            release()

    def leave(self) -> None:
        """Starts the end of the workers."""
        for worker in self._workers:
            worker.leave()

    def finish(self, goes_on: bool = False) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.close()
        self.kill()


def _nothing() -> None:
    pass


def start_workers(
    cluster: Cluster,
    role: str,
    settings: WorkerSettings,
    log: Path,
    tell: Callable[[str], None],
    check_time: Callable[[], None],
) -> tuple[list[ClusterWorker], Callable[[], None]]:
    """Reserves a role's resources and starts an actor on each of its hosts; the function that releases them again.

    Raises StageFailed where the cluster does not have the resources, or a node differs from the run's host.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from stages.worker.ray_actor import HostWorker

    kind = settings.device or device_kind()
    # A folder of the same name on a node may be another one: the run's own is in the store alone.
    record = cluster.store.join("runs", cluster.run)
    limits = (cluster.recipe.limits.stall_seconds, cluster.recipe.limits.stage_seconds)
    assert cluster.recipe.workers is not None
    placement = place(role, settings, cluster.recipe.workers.wait_seconds, tell, check_time)
    try:
        runtime_env = cluster.runtime_env()
        actors = [
            ray.remote(HostWorker)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, number),
                runtime_env=runtime_env,
                max_concurrency=4,
                max_restarts=0,
                max_task_retries=-1,
            )
            .remote(f"{cluster.run}-{role}-{number}", limits)
            for number, bundle in enumerate(placement.bundles)
        ]
        try:
            about = _all([actor.describe.remote(kind, record) for actor in actors], check_time)
            # A TPU numbers its hosts, and JAX numbers processes as the TPU does.
            actors, about = _in_order(actors, about)
            _check(cluster, role, settings, kind, about)
            port = ray.get(actors[0].free_port.remote(about[0]["address"]), timeout=CALL_SECONDS)
            address = f"{about[0]['address']}:{port}"
            for number, actor in enumerate(actors):
                group = multihost.variables(address, len(actors), number) if len(actors) > 1 else {}
                ray.get(actor.set_environment.remote(group | cluster.variables(runtime_env)), timeout=CALL_SECONDS)
        except BaseException:
            for actor in actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor)
            raise
    except ray.exceptions.RayError as e:
        placement.release()
        raise WorkerDied(f"the workers of role {role} did not start on the cluster: {e}") from e
    except BaseException:
        placement.release()
        raise
    workers = []
    for number, (actor, one) in enumerate(zip(actors, about, strict=True)):
        own = log if number == 0 else log.with_name(f"{log.stem}-{number}{log.suffix}")
        own.parent.mkdir(parents=True, exist_ok=True)
        workers.append(ClusterWorker(actor, one, own, cluster))
    tell(f"role {role} runs on {', '.join(worker.shown for worker in workers)}")
    return workers, placement.release


def _all(calls: list[Any], check_time: Callable[[], None]) -> list[Any]:
    import ray

    while len(ray.wait(calls, num_returns=len(calls), timeout=WAIT_SECONDS)[0]) < len(calls):
        check_time()
    found: list[Any] = ray.get(calls)
    return found


def _in_order(actors: list[Any], about: list[dict[str, Any]]) -> tuple[list[Any], list[dict[str, Any]]]:
    import ray

    numbers = {node["NodeID"]: int(node["Labels"].get("ray.io/tpu-worker-id", 0)) for node in ray.nodes()}
    pairs = sorted(zip(actors, about, strict=True), key=lambda pair: numbers.get(pair[1]["node"], 0))
    return [actor for actor, _ in pairs], [one for _, one in pairs]


def _check(cluster: Cluster, role: str, settings: WorkerSettings, kind: str, about: list[dict[str, Any]]) -> None:
    """Raises StageFailed for a node that would compute other bits than a key says, or is open to others."""
    own = settings.device is None
    wanted = host_compat.properties(kind) if own else about[0]["properties"]
    for one in about:
        shown = f"node {one['host']} ({one['address']}) of role {role}"
        if not one["token"] and not one["address"].startswith(LOOPBACK):
            raise StageFailed(
                f"{shown} runs Ray without token authentication, so that whoever reaches its ports runs code there: "
                f"start Ray on every host with {AUTH_MODE}=token"
            )
        if cluster.store.is_local and not one["store"]:
            raise StageFailed(
                f"{shown} has no folder {cluster.store.root}: the store has to be a folder that all hosts see, or a URL "
                "such as s3://BUCKET/PATH"
            )
        if (found := host_compat.difference(wanted, one["properties"], same_kind=True)) is not None:
            hint = f"; or name the kind of its devices in workers.{role}.device" if own else ""
            raise StageFailed(f"{shown} is refused: {found}{hint}")
