"""Workers of a run in work pools of its Prefect server: a flow run of `rlhf-worker` is one.

What it makes is asked for through a mailbox in the store (`stages.worker.mailbox`); Prefect starts it, shows it, and
tells when it has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, WorkPoolFilter, WorkPoolFilterName
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling

from flows.recipe.model import Recipe, RecipeError
from flows.recipe.workers import WorkerSettings
from flows.running.limits import RunTooLong
from stages.store.artifacts import Store
from stages.store.keys import without_userinfo
from stages.worker import mailbox, sameness
from stages.worker.client import CodeChanged, StageFailed, StageOutage, WorkerDied
from stages.worker.mailbox import Mailbox, Replaced
from stages.worker.protocol import Changed, Done, Failed, Log, Lost, Report, Request, parse_event

FLOW = "rlhf-worker"
ASK_SECONDS = 5.0
"""For an answer of Prefect: the thread that waits for it hears nothing else."""
LOOK_SECONDS, LATER_SECONDS = 5.0, 30.0
"""How often Prefect is asked what has become of a worker that says nothing, and after an answer that did not come."""
WAIT_SECONDS = 15.0
"""After so long without a worker it is told what is waited for."""
START_SECONDS = 1800.0
"""For a flow run that a host has taken to begin: images are pulled, machines are bought."""
TRIES, PAUSE_SECONDS = 7, 1.0
"""How often Prefect and the store are asked for a worker; pauses double: for about a minute."""
BEATS_SECONDS = 3 * mailbox.BEAT_SECONDS
"""Whoever has beaten since is there, whatever Prefect says of it."""
LEAVE_SECONDS = 30.0
"""For a worker to leave at the end of a run."""


@contextlib.contextmanager
def _prefect() -> Iterator[Any]:
    """A client that asks once and waits for seconds; else Prefect's tries for minutes."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: ASK_SECONDS}),
        get_client(sync_client=True) as client,
    ):
        yield client


def check_pools(recipe: Recipe) -> None:
    """Raises RecipeError for a pool that the Prefect server does not have, or that no deployment of `rlhf-worker` is
    in, or that takes fewer flow runs at a time than this run has workers in it; and for a store whose address holds a
    password, which Prefect would show."""
    settings = {} if recipe.workers is None else recipe.workers.named
    pools = {work: s.pool for work, s in settings.items() if s.pool is not None}
    if pools and without_userinfo(recipe.store) != recipe.store:
        raise RecipeError(
            "store: its address holds a password or token, which workers in pools would get as a visible parameter; "
            "give it by the environment of each host"
        )
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
                    f"{sharing} workers in it"
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
            f"workers.{work}.pool: pool {pool} has several deployments of {FLOW} ({names}); call one of them {pool}"
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
    look: float = 0.0
    """When Prefect is asked next."""
    taken: float | None = None
    """When a host was first seen to have taken it."""
    told: str = ""
    """The state that was told of."""
    ended: str = ""
    """What Prefect says of its end."""


class PoolWorker:
    """A worker in a pool, of the form of `stages.worker.client.Worker`: asked for by the first request, it stays until
    the run ends, or nothing was asked of it for `workers.idle_seconds`."""

    elsewhere = True
    """Whether its log is on another host."""

    def __init__(self, recipe: Recipe, run: str, work: str, settings: WorkerSettings, log: Path):
        """work: the worker's name in the recipe. log: the file of its output on its own host."""
        assert settings.pool is not None and recipe.workers is not None
        self.log, self.starts = log, 0
        self._store, self._run, self._work, self._pool = Store(recipe.store), run, work, settings.pool
        self._limits = [recipe.limits.stall_seconds, recipe.limits.stage_seconds]
        self._silence, self._idle = recipe.workers.silence_seconds, recipe.workers.idle_seconds
        self._at: _FlowRun | None = None
        self._deployment: Any = None

    def run(
        self, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Runs one stage and returns its manifest; as `Worker.run`, with the same errors."""
        store = self._store.root if self._store.is_local else request.store
        elsewhere = dataclasses.replace(request, store=store, elsewhere=True)
        asked = {"request": dataclasses.asdict(elsewhere), "limits": self._limits, "same": sameness.of_this_host()}
        try:
            while True:
                at = self._there(check_time)
                at.box.send(json.dumps(asked))
                manifest = self._answer(at, request, on_event, check_time)
                if manifest is not None:
                    return manifest
                # It had left, with nothing to do, as it was asked: another one does it.
        except (StageFailed, _Resumed):
            raise
        except BaseException:
            self._cancel()
            raise

    def _there(self, check_time: Callable[[], None]) -> _FlowRun:
        """The worker that is there, or another where it has gone while nothing was asked of it."""
        at = self._at
        if at is not None and (at.box.closed or at.box.silent > self._silence):
            self._cancel()
            at = None
        return at or self._start(check_time)

    def _answer(
        self,
        at: _FlowRun,
        request: Request,
        on_event: Callable[[Report], None],
        check_time: Callable[[], None],
    ) -> dict[str, Any] | None:
        """The manifest that a request ends with; None where the worker has left without taking it up."""
        while True:
            check_time()
            try:
                line = at.box.receive(1.0)
            except Replaced as e:
                self._died(at, request, f"was replaced: {e}")
            if line is None:
                if at.box.closed:
                    self._died(at, request, "has left")
                self._look(at, request, on_event)
                continue
            message = json.loads(line)
            if "idle" in message:
                # It has left, and takes up nothing more.
                self._cancel()
                return None
            if "hello" in message:
                at.host = message["hello"]["host"]
                waited = time.monotonic() - at.asked
                on_event(Log(f"a worker of pool {self._pool} is at work on {at.host}, after {waited:.0f} s"))
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

    def _start(self, check_time: Callable[[], None]) -> _FlowRun:
        """Asks Prefect for a flow run in the pool. Raises StageOutage where it, or the store, cannot be asked."""
        token = uuid.uuid4().hex[:12]
        place = (mailbox.FOLDER, self._run, f"{self._work}-{token}")
        box: Mailbox | None = None
        try:
            for number in range(TRIES):
                try:
                    if box is None:
                        self._end_others(check_time)
                        begun = Mailbox(self._store, place, mailbox.RUN)
                        begun.start()
                        box = begun
                    return self._asked(box, place, token)
                except Exception as e:
                    if number == TRIES - 1 or isinstance(e, RunTooLong):
                        raise
                    deadline = time.monotonic() + PAUSE_SECONDS * 2**number
                while time.monotonic() < deadline:
                    check_time()
                    time.sleep(0.5)
            raise AssertionError("unreachable")
        except BaseException as e:
            if box is not None:
                box.leave()
            if isinstance(e, Exception) and not isinstance(e, RunTooLong):
                raise StageOutage(f"no worker could be asked for in pool {self._pool}: {e}") from e
            raise

    def _asked(self, box: Mailbox, place: tuple[str, ...], token: str) -> _FlowRun:
        parameters: dict[str, Any] = {
            "store": self._store.root if self._store.is_local else self._store.url,
            "run": self._run,
            "mail": place[-1],
            "log": self.log.with_name(f"{self.log.stem}.{token}{self.log.suffix}").name,
            "silence": self._silence,
            "idle": self._idle,
        }
        name = f"{self._run} {self._work}".replace("{", "").replace("}", "")
        with _prefect() as client:
            self._deployment = self._deployment or deployment_of(client, self._work, self._pool).id
            # One at most for a mailbox, however often Prefect is asked.
            run: Any = run_deployment(
                self._deployment, parameters=parameters, flow_run_name=name, timeout=0, idempotency_key=token
            )
        self._at = _FlowRun(run.id, run.name, box, time.monotonic())
        self.starts += 1
        with contextlib.suppress(Exception):
            # A later try of the run ends it by this where it cannot be heard.
            self._store.write_json(str(run.id), *place, "flow-run.json")
        return self._at

    def _end_others(self, check_time: Callable[[], None]) -> None:
        """Ends workers that an earlier try of the run has left: their devices are needed, and what they make is not."""
        places = mailbox.close_others(self._store, self._run, self._work)
        deadline = time.monotonic() + min(LEAVE_SECONDS, self._silence)
        for place in places:
            flow_run = self._store.read_json(*place, "flow-run.json")
            if flow_run is not None:
                self._set_cancelling(flow_run)
            while not mailbox.is_left(self._store, place) and time.monotonic() < deadline:
                check_time()
                time.sleep(1.0)
            self._store.remove_folder(self._store.join(*place))

    def _look(self, at: _FlowRun, request: Request, on_event: Callable[[Report], None]) -> None:
        """Where nothing comes: what has become of the worker. Raises WorkerDied where it has ended, or cannot be
        heard."""
        if at.ended and at.box.silent > BEATS_SECONDS:
            # What it had still to say has had the time to arrive.
            self._died(at, request, f"has ended ({at.ended})")
        if at.host and at.box.silent > self._silence:
            what = f"has been silent for {self._silence:g} s (`workers.silence_seconds`), and was cancelled"
            self._died(at, request, what)
        if not at.host and at.taken is not None and time.monotonic() - at.taken > START_SECONDS:
            self._died(at, request, f"has not begun within {START_SECONDS:g} s, and was cancelled")
        if time.monotonic() < at.look:
            return
        try:
            with _prefect() as client:
                state = client.read_flow_run(at.id).state
        except ObjectNotFound:
            at.ended = "Prefect has no such flow run any more"
        except Exception:
            # The mailbox tells whether it lives.
            at.look = time.monotonic() + LATER_SECONDS
            return
        else:
            self._note(at, state, on_event)
        at.look = time.monotonic() + LOOK_SECONDS

    def _note(self, at: _FlowRun, state: Any, on_event: Callable[[Report], None]) -> None:
        """What Prefect says of a worker."""
        if state is None:
            return
        now = time.monotonic()
        if state.is_final():
            at.ended = f"{state.name}: {state.message}" if state.message else str(state.name)
        elif not state.is_scheduled() and at.taken is None:
            at.taken = now
        if at.host or at.told == state.name or now - at.asked < WAIT_SECONDS or state.is_final():
            return
        at.told = str(state.name)
        what = (
            f"`prefect worker start --pool {self._pool}` on one of its hosts takes it, when it has a place"
            if state.is_scheduled()
            else "it is being started"
        )
        on_event(Log(f"waits for a worker of pool {self._pool}: flow run {at.name!r} is {state.name}; {what}"))

    def _died(self, at: _FlowRun, request: Request, what: str) -> NoReturn:
        host = f" on {at.host}" if at.host else ""
        raise WorkerDied(
            f"the worker of pool {self._pool}{host} (flow run {at.name!r}) {what} in stage {request.stage}\n"
            "  finished stages, shards and checkpoints are kept; the same command goes on from there"
        )

    def _cancel(self) -> None:
        """Ends the worker without waiting: its pool ends the process, and the closed mailbox tells it too."""
        at, self._at = self._at, None
        if at is not None:
            at.box.leave()
            self._set_cancelling(at.id)

    @staticmethod
    def _set_cancelling(flow_run: Any) -> None:
        # Whoever cannot be told hears no beat of this run.
        with contextlib.suppress(Exception), _prefect() as client:
            if not client.read_flow_run(flow_run).state.is_final():
                client.set_flow_run_state(flow_run, Cancelling())

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
