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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from flows.orchestration.deployments import answering, deployment_of
from flows.recipe.model import Recipe, RecipeError
from flows.recipe.workers import TRAIN, WorkerSettings
from flows.running.limits import RunTooLong
from stages.store.artifacts import Store
from stages.worker import away, mailbox, sameness
from stages.worker.client import CodeChanged, StageFailed, StageOutage, WorkerDied
from stages.worker.mailbox import Mailbox, Replaced
from stages.worker.protocol import Changed, Done, Failed, Log, Lost, Report, Request, parse_event

LOOK_SECONDS, LATER_SECONDS = 5.0, 30.0
"""How often Prefect is asked what has become of a worker that says nothing, and after an answer that did not come."""
WAIT_SECONDS = 15.0
"""After so long without a worker it is told what is waited for."""
START_SECONDS = 1800.0
"""For a flow run that a host runs to say a word."""
TRIES, PAUSE_SECONDS = 7, 1.0
"""How often Prefect and the store are asked for a worker; pauses double: for about a minute."""
BEATS_SECONDS = 3 * mailbox.BEAT_SECONDS
"""Whoever has beaten since is there, whatever Prefect says of it."""
LEAVE_SECONDS = 30.0
"""For a worker to leave at the end of a run."""


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
    """When it was first seen to run on a host."""
    cut: bool = False
    """Whether it was told that the store cannot be read."""
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
        self._silence = recipe.workers.silence_seconds
        # What is not stored after each round is in the trainer's memory alone: it stays for the next one.
        keeps = work == TRAIN and recipe.rl is not None and recipe.rl.checkpoint_every > 1
        self._idle = None if keeps else recipe.workers.idle_seconds
        self._device = settings.device
        self._same = sameness.of_this_host()
        """As it was when the run began: what is edited later is in keys, where it is reached."""
        self._at: _FlowRun | None = None
        self._deployment: Any = None

    def run(
        self, request: Request, on_event: Callable[[Report], None], check_time: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Runs one stage and returns its manifest; as `Worker.run`, with the same errors."""
        store = self._store.root if self._store.is_local else request.store
        elsewhere = dataclasses.replace(request, store=store, elsewhere=True)
        asked = {
            "request": dataclasses.asdict(elsewhere),
            "limits": self._limits,
            "idle": self._idle,
            "same": self._same,
            "computes": bool(request.key_parts.get("device")),
            "other_kind": self._device is not None,
        }
        try:
            while True:
                # One that was there before may have gone while nothing was asked of it.
                before = self._at
                at = self._there(check_time)
                number = at.box.send(json.dumps(asked))
                try:
                    return self._answer(at, request, on_event, check_time)
                except _Left:
                    # The line may have arrived there; what leaves idle takes up nothing more.
                    pass
                except WorkerDied as e:
                    if isinstance(e, _Resumed) or at is not before or at.box.has_seen(number):
                        raise
                self._cancel()
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
    ) -> dict[str, Any]:
        """The manifest that a request ends with. Raises _Left where the worker leaves without taking it up."""
        while True:
            check_time()
            # Asked first: the last lines come with the word that they are.
            closed = at.box.closed
            try:
                line = at.box.receive(1.0)
            except Replaced as e:
                self._died(at, request, f"was replaced: {e}")
            if line is None:
                if closed:
                    self._died(at, request, "has left")
                self._look(at, request, on_event)
                continue
            message = json.loads(line)
            if "idle" in message:
                raise _Left
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
                except (RecipeError, RunTooLong):
                    raise
                except Exception as e:
                    if isinstance(e, ObjectNotFound):
                        # It was deployed anew.
                        self._deployment = None
                    if number == TRIES - 1:
                        raise
                    deadline = time.monotonic() + PAUSE_SECONDS * 2**number
                while time.monotonic() < deadline:
                    check_time()
                    time.sleep(0.5)
            raise AssertionError("unreachable")
        except BaseException as e:
            if box is not None:
                box.leave()
            if isinstance(e, RecipeError):
                raise StageFailed(str(e)) from e
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
        with answering() as client:
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
        for place in mailbox.close_others(self._store, self._run, self._work):
            flow_run = self._store.read_json(*place, "flow-run.json")
            deadline = time.monotonic() + LEAVE_SECONDS
            while not (left := mailbox.is_left(self._store, place) or self._set_cancelling(flow_run)):
                if time.monotonic() > deadline:
                    break
                check_time()
                time.sleep(2.0)
            if left:
                # One that is still there has to read that it is closed; what stays is collected.
                self._store.remove_folder(self._store.join(*place))

    def _look(self, at: _FlowRun, request: Request, on_event: Callable[[Report], None]) -> None:
        """Where nothing comes: what has become of the worker. Raises WorkerDied where it has ended, or cannot be
        heard."""
        if at.ended and at.box.silent + at.box.cut > BEATS_SECONDS:
            # What it had still to say has had the time to arrive.
            self._died(at, request, f"has ended ({at.ended})")
        if at.host and at.box.silent > self._silence:
            what = f"has been silent for {self._silence:g} s (`workers.silence_seconds`), and was cancelled"
            self._died(at, request, what)
        if at.box.cut > WAIT_SECONDS and not at.cut:
            at.cut = True
            on_event(Log(f"{self._store.shown} cannot be read ({at.box.fault}): the worker's answers have to wait"))
        if at.box.cut > away.CUT * self._silence:
            self._cancel()
            raise StageOutage(f"{self._store.shown} could not be read for {at.box.cut:.0f} s ({at.box.fault})")
        if not at.host and at.taken is not None and time.monotonic() - at.taken > START_SECONDS:
            self._died(at, request, f"has not begun within {START_SECONDS:g} s, and was cancelled")
        if time.monotonic() < at.look:
            return
        try:
            with answering() as client:
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
        elif not state.is_running():
            at.taken = None
        elif at.taken is None:
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
    def _set_cancelling(flow_run: Any) -> bool:
        """Has Prefect end a flow run; whether it has ended already. Who cannot be told hears no beat of this run."""
        if flow_run is None:
            return False
        try:
            with answering() as client:
                state = client.read_flow_run(flow_run).state
                if state is not None and state.is_final():
                    return True
                if state is None or not state.is_cancelling():
                    client.set_flow_run_state(flow_run, Cancelling())
        except ObjectNotFound:
            return True
        except Exception:
            pass
        return False

    def leave(self) -> None:
        """Has the worker leave; `finish` waits for that."""
        if self._at is not None:
            self._at.box.leave(LEAVE_SECONDS)

    @property
    def logs(self) -> list[Path]:
        return [self.log]

    def close(self) -> None:
        """Ends the worker."""
        at = self._at
        if at is None:
            return
        if at.host and at.box.silent < BEATS_SECONDS and at.box.close(LEAVE_SECONDS):
            self._at = None
            at.box.remove()
            return
        self._cancel()


class _Left(Exception):
    """A worker leaves, since nothing was asked of it for long, and takes up no request any more."""


class _Resumed(WorkerDied):
    """A worker's process has died on a host that is there."""
