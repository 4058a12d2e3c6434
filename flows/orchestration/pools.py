"""Workers of a run in other work pools of its Prefect server: a flow run of `rlhf-worker` is one.

What it makes is asked for through a mailbox in the store (`stages.worker.mailbox`); Prefect starts it, shows it, and
tells when it has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, WorkPoolFilter, WorkPoolFilterName
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from flows.recipe.model import Recipe, RecipeError
from flows.recipe.workers import WorkerSettings
from stages.store.artifacts import Store
from stages.worker import mailbox
from stages.worker.client import CodeChanged, StageFailed, StageOutage, WorkerDied
from stages.worker.mailbox import Mailbox
from stages.worker.protocol import Changed, Done, Failed, Log, Lost, Report, Request, parse_event

FLOW = "rlhf-worker"
LOOK_SECONDS = 5.0
"""How often Prefect is asked what has become of a worker that is silent."""
WAIT_SECONDS = 15.0
"""After so long without a worker it is told what is waited for."""
LEAVE_SECONDS = 30.0
"""For a worker to leave at the end of a run."""


def check_pools(recipe: Recipe) -> None:
    """Raises RecipeError for a pool that the Prefect server does not have, or that no deployment of `rlhf-worker` is
    in, or that takes fewer flow runs at a time than this run has workers in it."""
    settings = {} if recipe.workers is None else recipe.workers.named
    pools = {work: s.pool for work, s in settings.items() if s.pool is not None}
    with get_client(sync_client=True) as client:
        for work, pool in pools.items():
            try:
                found = client.read_work_pool(pool)
            except ObjectNotFound:
                raise RecipeError(
                    f"workers.{work}.pool: the Prefect server {client.api_url} has no work pool {pool}; "
                    "`prefect work-pool ls` lists them"
                ) from None
            deployment_of(client, work, pool)
            sharing = sum(other == pool for other in pools.values())
            if found.concurrency_limit is not None and found.concurrency_limit < sharing:
                raise RecipeError(
                    f"workers.{work}.pool: pool {pool} runs {found.concurrency_limit} at a time, and this recipe has "
                    f"{sharing} workers in it, each of which stays until the run ends"
                )


def deployment_of(client: Any, work: str, pool: str) -> Any:
    """The deployment of `rlhf-worker` in a pool. Raises RecipeError where there is none, or are several."""
    found = client.read_deployments(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW])),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
    )
    named = [deployment for deployment in found if deployment.name == pool] if len(found) > 1 else found
    if len(named) == 1:
        return named[0]
    if found:
        names = ", ".join(sorted(deployment.name for deployment in found))
        raise RecipeError(
            f"workers.{work}.pool: pool {pool} has several deployments of {FLOW} ({names}); call one {pool}"
        )
    raise RecipeError(
        f"workers.{work}.pool: pool {pool} has no deployment of {FLOW}; in the project's folder of its hosts: "
        f"`prefect deploy flows/worker.py:rlhf_worker --name {pool} --pool {pool}`"
    )


@dataclasses.dataclass
class _FlowRun:
    """A worker that was asked for."""

    id: Any
    name: str
    box: Mailbox
    asked: float
    """By `time.monotonic`."""
    host: str = ""
    """Empty until it has said so."""
    looked: float = 0.0
    told: bool = False
    ended: str = ""
    """What Prefect says of its end."""


class PoolWorker:
    """A worker in a pool, of the form of `stages.worker.client.Worker`: asked for by the first request, it stays until
    the run ends."""

    def __init__(self, recipe: Recipe, run: str, work: str, settings: WorkerSettings, log: Path):
        """work: the worker's name in the recipe. log: the file of its output on its own host."""
        assert settings.pool is not None
        self.log, self.starts = log, 0
        self._store, self._run, self._work, self._pool = Store(recipe.store), run, work, settings.pool
        self._limits = [recipe.limits.stall_seconds, recipe.limits.stage_seconds]
        assert recipe.workers is not None
        self._silence = recipe.workers.silence_seconds
        self._at: _FlowRun | None = None

    def run(
        self, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Runs one stage and returns its manifest; as `Worker.run`, with the same errors."""
        try:
            at = self._at or self._start()
            store = self._store.root if self._store.is_local else request.store
            elsewhere = dataclasses.replace(request, store=store, elsewhere=True)
            at.box.send(json.dumps({"request": dataclasses.asdict(elsewhere), "limits": self._limits}))
            while True:
                check_time()
                line = at.box.receive(1.0)
                if line is None:
                    self._look(at, request, on_event)
                    continue
                message = json.loads(line)
                if "hello" in message:
                    self._welcome(at, message["hello"], on_event)
                    continue
                match parse_event(line):
                    case Done(manifest):
                        return manifest
                    case Failed(error, _, outage):
                        raise (StageOutage if outage else StageFailed)(f"{error}\n  on {at.host} (pool {self._pool})")
                    case Changed(what):
                        raise CodeChanged(what)
                    case Lost(what):
                        # The process of its stages: the next request starts another on that host.
                        raise _Resumed(f"on {at.host} (pool {self._pool}): {what}")
                    case report:
                        assert isinstance(report, Report)
                        on_event(report)
        except (StageFailed, _Resumed):
            raise
        except BaseException:
            self._cancel()
            raise

    def _start(self) -> _FlowRun:
        """Asks Prefect for a flow run in the pool. Raises StageOutage where the server cannot be asked."""
        place = ("runs", self._run, "mail", f"{self._work}-{uuid.uuid4().hex[:12]}")
        box = Mailbox(self._store, place, mailbox.RUN)
        box.start()
        try:
            with get_client(sync_client=True) as client:
                deployment = deployment_of(client, self._work, self._pool)
            store = self._store.root if self._store.is_local else self._store.url
            parameters: dict[str, Any] = {"store": store, "run": self._run, "mail": place[-1], "log": self.log.name}
            parameters["silence"] = self._silence
            name = f"{self._run} {self._work}".replace("{", "").replace("}", "")
            run: Any = run_deployment(deployment.id, parameters=parameters, flow_run_name=name, timeout=0)
        except RecipeError:
            box.close()
            raise
        except Exception as e:
            box.close()
            box.remove()
            raise StageOutage(f"Prefect could not be asked for a worker in pool {self._pool}: {e}") from e
        self.starts += 1
        self._at = _FlowRun(run.id, run.name, box, time.monotonic())
        return self._at

    def _welcome(self, at: _FlowRun, hello: Mapping[str, Any], on_event: Callable[[Report], None]) -> None:
        at.host = hello["host"]
        waited = time.monotonic() - at.asked
        on_event(
            Log(f"a worker of pool {self._pool} is at work on {at.host} ({hello['device']}), after {waited:.0f} s")
        )

    def _look(self, at: _FlowRun, request: Request, on_event: Callable[[Report], None]) -> None:
        """Where nothing comes: what has become of the worker. Raises WorkerDied where it has ended, or cannot be
        heard."""
        if at.ended:
            # What it had still to say has had the time to arrive.
            self._died(at, request, f"has ended ({at.ended})")
        if at.host and at.box.silent > self._silence:
            what = f"has been silent for {self._silence:g} s (`workers.silence_seconds`), and was cancelled"
            self._died(at, request, what)
        now = time.monotonic()
        if now - at.looked < LOOK_SECONDS:
            return
        at.looked = now
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(at.id).state
        except ObjectNotFound:
            at.ended = "Prefect has no such flow run any more"
            return
        except Exception:
            # The mailbox tells whether it lives.
            return
        if state is not None and state.is_final():
            time.sleep(2 * mailbox.POLL_SECONDS)
            at.ended = f"{state.name}: {state.message}" if state.message else str(state.name)
        elif state is not None and state.is_scheduled() and not at.told and now - at.asked > WAIT_SECONDS:
            at.told = True
            on_event(
                Log(
                    f"waits for a worker of pool {self._pool}: flow run {at.name!r} is {state.name}; "
                    f"`prefect worker start --pool {self._pool}` on one of its hosts takes it"
                )
            )

    def _died(self, at: _FlowRun, request: Request, what: str) -> NoReturn:
        host = f" on {at.host}" if at.host else ""
        raise WorkerDied(
            f"the worker of pool {self._pool}{host} (flow run {at.name!r}) {what} in stage {request.stage}\n"
            "  finished stages, shards and checkpoints are kept; the same command goes on from there"
        )

    def _cancel(self) -> None:
        """Ends the worker without waiting: its pool ends the process, and the closed mailbox tells it too."""
        at, self._at = self._at, None
        if at is None:
            return
        at.box.leave()
        # Whoever cannot be told hears no beat of this run.
        with contextlib.suppress(Exception), get_client(sync_client=True) as client:
            client.set_flow_run_state(at.id, Cancelling())

    def leave(self) -> None:
        """Has the worker leave; `finish` waits for that."""
        if self._at is not None:
            self._at.box.leave(LEAVE_SECONDS)

    def finish(self, goes_on: bool = False) -> None:
        """Ends the worker."""
        at = self._at
        if at is None:
            return
        if at.host and at.box.close(LEAVE_SECONDS):
            self._at = None
            at.box.remove()
            return
        self._cancel()


class _Resumed(WorkerDied):
    """A worker's process has died on a host that is there."""
