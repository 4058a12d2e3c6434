"""One run: derives the key of each node, asks the store, sends misses to a worker, and keeps the record.

The Prefect flow (`rlhf.flows.pipeline`) and the plain runner both drive it. `InputCheck` checks that the
inputs of a stage have the bytes that were committed; `Saver` writes the record.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from rlhf.flows.graph.build import Node, build, in_order
from rlhf.flows.graph.keying import key_now
from rlhf.flows.graph.policy_refs import Standing, promoted_by, standing_of
from rlhf.flows.graph.reuse import Records, check_point, taken_artifact
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.records import log_of
from rlhf.flows.report.console import ConsoleReporter
from rlhf.flows.report.formats import duration
from rlhf.flows.running.crew import crews_of, log_of_worker
from rlhf.flows.running.naming import before, entries_of, free_name
from rlhf.flows.running.recipe_warnings import of_data
from rlhf.flows.running.sharing import SHARING
from rlhf.stages.contract.source_archive import keep
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import Artifact, ArtifactError, Store
from rlhf.stages.store.damage import set_aside
from rlhf.stages.store.disk import disk_fault
from rlhf.stages.store.keys import published, without_userinfo
from rlhf.stages.store.leases import clear, lease, this_process
from rlhf.stages.store.reserve import keep_room, with_room
from rlhf.stages.store.runs import Recorder
from rlhf.stages.store.work import WorkFolder
from rlhf.stages.worker.client import CodeChanged, StageFailed, WorkerDied
from rlhf.stages.worker.protocol import Heartbeat, Log, Progress, Report, Request

SAVE_SECONDS = 2.0
"""A changed record is written within this time; a garbage collection waits longer (`rlhf.stages.store.collect`)."""
SIGN_SECONDS = 60.0
"""An unchanged record is written this often, as a sign of life for other hosts."""


def now() -> str:
    """Return the time in ISO 8601, in UTC, with milliseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


class Saver:
    """Writes a record that several threads change; a thread writes it while all of them wait for something."""

    def __init__(self, store: Store, record: dict[str, Any], lock: threading.RLock):
        """lock: of the record."""
        self._record, self._lock = record, lock
        self._recorder = Recorder(store, record["name"])
        self._saved, self._is_new = 0.0, False
        self._ended = threading.Event()
        threading.Thread(target=self._keep_saved, daemon=True).start()

    def save(self, soon: bool = False) -> None:
        """Write the record.

        soon: a record that was written in the last `SAVE_SECONDS` is written after them.
        """
        with self._lock:
            self._is_new = True
            if soon and time.monotonic() - self._saved < SAVE_SECONDS:
                return
            self._saved = time.monotonic()
            self._record["saved"] = now()
            self._recorder.write(self._record)
            self._is_new = False

    def end(self) -> None:
        """Leave all further saves to the caller."""
        self._ended.set()

    def _keep_saved(self) -> None:
        while not self._ended.wait(SAVE_SECONDS):
            # The next save repeats a failed one.
            with self._lock, contextlib.suppress(Exception):
                due = self._is_new or time.monotonic() - self._saved > SIGN_SECONDS
                if due and not self._ended.is_set():
                    self.save()


class InputCheck:
    """The artifacts that a run has checked. A disk may change bytes and keep the size; bytes from a remote store are
    checked on arrival."""

    def __init__(self, store: Store, log: Callable[[str], None], check_time: Callable[[], None]):
        """check_time: called each second by a thread that waits for another thread's check; it may raise."""
        self._store, self._log, self._check_time = store, log, check_time
        self.checked: set[str] = set()
        """Digests of artifacts whose bytes are right."""
        self._lock = threading.Lock()
        self._checks = defaultdict[str, threading.RLock](threading.RLock)
        """By digest. While a thread recomputes an artifact it waits only for checks of that artifact's inputs, so two
        threads never wait for each other."""

    def ensure(
        self, name: str, artifact: Artifact, made: Callable[[], Mapping[str, Artifact]], recompute: Callable[[], object]
    ) -> None:
        """Recompute the artifact of a node if it is damaged, with a warning.

        made: the current artifacts of nodes; if the node's is another one, another thread has recomputed it.
        """
        if not self._store.is_local or artifact.digest in self.checked:
            return
        with self._lock:
            check = self._checks[artifact.digest]
        while not check.acquire(timeout=1.0):
            self._check_time()
        try:
            if artifact.digest in self.checked or made()[name].digest != artifact.digest:
                return
            if fault := self._store.verify(artifact):
                moved = set_aside(self._store, artifact.stage, artifact.key, self._log, self._check_time)
                self._log(f"! {name}: {moved or fault}; computed again")
                recompute()
                # An artifact that another run has recorded is not computed again.
                if moved is None and (fault := self._store.verify(made()[name])):
                    raise ArtifactError(f"{name}: {made()[name].url} is damaged ({fault})")
            self.checked.add(artifact.digest)
        finally:
            check.release()


EDITS = 3
"""Number of times that a stage is repeated because its code was edited while it ran."""
LOG_BYTES = 1 << 24
"""The end of the worker's log that a remote store gets."""
Begun = list[tuple[dict[str, Any], float]]
"""Entries of nodes that a thread has begun, with the time of that by `time.monotonic`."""


class RunTooLong(RuntimeError):
    """A run has taken longer than `limits.run_seconds`; finished stages are kept."""


class Session:
    """A run in progress. Several threads may each run a node."""

    def __init__(
        self,
        recipe: Recipe,
        reporter: ConsoleReporter,
        name: str | None = None,
        force: set[str] | None = None,
        standing: Standing | None = None,
    ):
        self.recipe = recipe
        self.store = Store(recipe.store)
        self.reporter = reporter
        self.name = name or free_name(self.store, recipe.name)
        self.log = log_of(self.store, self.name)
        self.sharing = SHARING.get()
        """Of the runs of a sweep."""
        self.command: dict[str, str] = {}
        """`command` for the audit log, if the user's command did not start this process."""
        self.force = force or set()
        self.made: dict[str, Artifact] = {}
        self.chosen: Collection[str] | None = None
        """Names of the nodes that the run makes; None: all."""
        self._taken: Records = {}
        self.inputs = InputCheck(self.store, self.line, self.check)
        self._began = time.monotonic()
        self._at: dict[str, str] = {}
        """The current stages by node, each with the reason that it waits."""
        self._stopped = threading.Event()
        self._ends = contextlib.ExitStack()
        self._lock = threading.RLock()
        """Of the record and of `made`."""
        # A generated name is free. Of two commands with one name, the second waits and sees the first one's record.
        try:
            with nullcontext() if name is None else lease(self.store, runs.FOLDER, name, self.line):
                self._begin(name, standing)
        except BaseException as e:
            if hasattr(self, "_saver"):
                # It would show signs of life of a run that has not begun.
                self._saver.end()
                # After a signal during the start: a record without an end would count as killed.
                if not isinstance(e, Exception):
                    self.record |= {"status": "interrupted", "ended": now()}
                    self.save()
            raise

    def _begin(self, name: str | None, standing: Standing | None) -> None:
        recipe = self.recipe
        unfinished = before(self.store, recipe, name) if name is not None else None
        # A resumed run starts from the same policy as before.
        self.standing = standing or standing_of(recipe, self.store, self.name if unfinished is not None else None)
        self.nodes = {n.name: n for n in build(recipe, self.standing)}
        self._places = {name: place for place, name in enumerate(self.nodes)}
        own = crews_of(recipe, self.name, 1)
        self._crews = self._ends.enter_context(own) if self.sharing is None else self.sharing.crews
        # Names of workers are the same in all.
        self.crew = self._crews[0]
        earlier = {} if unfinished is None else entries_of(self.store, self.name)
        # Nodes that an earlier try was forced to make, and has made.
        self._forced = {node for node, entry in earlier.items() if entry.get("forced") and "digest" in entry}
        self.record: dict[str, Any] = {
            "name": self.name,
            "recipe": published(recipe.model_dump(mode="json")),
            "given": published(recipe.model_dump(mode="json", exclude_unset=True)),
            "status": "running",
            "started": now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": this_process(),
            "log": str(log_of_worker(self.log, self.crew.names[0])),
            "tries": 1 + (unfinished or {"tries": 0}).get("tries", 1),
            "nodes": earlier,
        }
        if promoted := promoted_by(unfinished):
            self.record["promoted"] = promoted  # also of tries before the last one
        if self.standing != Standing():
            self.record["standing"] = self.standing.as_json()
        self._saver = Saver(self.store, self.record, self._lock)
        self.save()
        keep_room(self.store)

    @property
    def worker_starts(self) -> int:
        """The number of worker processes that made its stages."""
        return sum(run == self.name for crew in self._crews for run, *_ in list(crew.used))

    def line(self, text: str) -> None:
        """Report a line."""
        self.reporter.line(text)

    def save(self, soon: bool = False) -> None:
        """Write the record to the store (`Saver.save`)."""
        self._saver.save(soon)

    def stop(self) -> None:
        """Have every thread that runs a node end it as interrupted, within seconds."""
        self._stopped.set()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called, or its sweep stopped."""
        return self._stopped.is_set() or (self.sharing is not None and self.sharing.stopped.is_set())

    def rest(self, nodes: Collection[Node]) -> None:
        """Wait until the run may make one of these nodes, in a sweep. The time is none of the run's."""
        assert self.sharing is not None
        since = time.monotonic()

        def check() -> None:
            if self.is_stopped:
                raise KeyboardInterrupt

        try:
            self.sharing.rest(self.name, nodes, check)
        finally:
            self._began += time.monotonic() - since

    def check(self) -> None:
        """Raises KeyboardInterrupt if the run was stopped, RunTooLong if it has passed its time limit."""
        if self.is_stopped:
            raise KeyboardInterrupt
        seconds = self.recipe.limits.run_seconds
        if seconds is not None and time.monotonic() - self._began > seconds:
            at = " and ".join(node + waits for node, waits in list(self._at.items())) or "no stage yet"
            raise RunTooLong(
                f"run {self.name} took longer than its {duration(seconds)} (`limits.run_seconds`): it was at {at}. The "
                f"same command resumes (with --name {self.name} under this name), and --set limits.run_seconds=null "
                "removes the limit"
            )

    def decide(self, decision: dict[str, Any]) -> None:
        """Record the decision about the run's policy."""
        with self._lock:
            self.record["decision"] = decision
            self.save()

    def run_node(self, name: str, retries: int = 0) -> tuple[str, Artifact]:
        """Make or read the artifact of one node: (`hit` or `made`, artifact). Its inputs must have run before.

        A fresh worker repeats it if code was edited while it ran, under the key of the new code, and `retries` times if
        the worker dies. Raises RunTooLong after the run's time limit.
        """
        edits = deaths = 0
        while True:
            begun: Begun = []
            self._at[name] = ""
            try:
                self.check()
                return self._make_or_read(name, begun)
            except BaseException as e:
                # Nodes may also be waiting for another run or for an input that is recomputed.
                with self._lock:
                    for entry, began in begun:
                        if entry["state"] == "running":
                            entry |= _ended_by(e) | {"seconds": round(time.monotonic() - began, 2)}
                self._save_if_possible()
                if isinstance(e, CodeChanged) and (edits := edits + 1) <= EDITS:
                    self.line(f"{name}: {e}; a fresh worker makes it with the new code")
                elif isinstance(e, WorkerDied) and (deaths := deaths + 1) <= retries:
                    self.line(f"{name}: {e}\n  try {deaths + 1} of {retries + 1} with a fresh worker")
                else:
                    raise
            finally:
                self._at.pop(name, None)

    def _make_or_read(self, name: str, begun: Begun) -> tuple[str, Artifact]:
        """begun: receives the entry of each node that begins."""
        node = self.nodes[name]
        inputs: dict[str, Artifact] = {}
        if taken := taken_artifact(self.store, node, self._taken):
            # It has its own key, from the settings that it was made with.
            key, parts, files = taken.key, dict[str, Any](), dict[str, str]()
        else:
            # Of one moment: another thread may recompute a damaged input, with other content.
            inputs = {i.node: self.made[i.node] for i in node.inputs.values()}
            key, parts, files = key_now(node, inputs)
        forced = name in self.force - self._forced
        artifact = taken or (None if forced else self.store.get(node.stage, key))
        started = time.monotonic()
        entry: dict[str, Any] = {"stage": node.stage, "key": key, "started": now(), "state": "running"}
        entry |= {"forced": True} if name in self.force else {}
        begun.append((entry, started))
        with self._lock:
            self.record["nodes"] = in_order(self.record["nodes"], name, entry, self._places)
        state = "hit"
        if artifact is not None:
            self._tidy(node.stage, key)
        else:
            # On disk before the work begins: `rlhf show` reports a running stage, also after a kill, and a garbage
            # collection sees the run's artifacts, however long the check of inputs takes.
            self.save()
            if self._recompute_damaged(inputs, begun):
                return self._make_or_read(name, begun)
            self.reporter.stage_started(node)

            def waits(line: str) -> None:
                self._at[name] = f" ({line})"
                self.line(f"{name}: {line}")

            with lease(self.store, node.stage, key, waits, self.check) as token:
                # Another run that held the lease may have made it meanwhile.
                artifact = None if forced else self.store.get(node.stage, key, repair=True)
                if artifact is None:
                    state, artifact = "made", self._make(node, self._request(node, inputs, key, parts, files, token))
        check_point(node, artifact)
        seconds = time.monotonic() - started
        with self._lock:
            entry |= {"state": state, "digest": artifact.digest, "metrics": artifact.metrics}
            # The time of this run, and of the run that made the artifact.
            entry |= {"seconds": round(seconds, 2), "made_seconds": artifact.manifest["seconds"]}
            self.made = in_order(self.made, name, artifact, self._places)
        # With several workers it may take hours until the next stage begins, and is recorded.
        self.save(soon=self.recipe.workers is None)
        self.reporter.stage_ended(node, state, artifact.manifest, seconds)
        if node.stage in ("prepare", "fresh"):
            for warning in of_data(self.recipe, artifact.metrics):
                self.line(f"! {warning}")
        return state, artifact

    def _tidy(self, stage: str, key: str) -> None:
        """Remove the work on this host, and the lease, that a kill just after a commit has left."""
        work = WorkFolder(self.store, stage, key)
        if work.path.exists():
            work.drop()
        if not self.store.read_only:
            clear(self.store, stage, key)

    def _recompute_damaged(self, inputs: Mapping[str, Artifact], begun: Begun) -> bool:
        """Recompute damaged inputs of a node; return whether one has other content now."""
        for name, artifact in inputs.items():
            self.inputs.ensure(name, artifact, lambda: self.made, partial(self._make_or_read, name, begun))
        return any(self.made[name].digest != artifact.digest for name, artifact in inputs.items())

    def _request(
        self,
        node: Node,
        inputs: Mapping[str, Artifact],
        key: str,
        parts: dict[str, Any],
        files: dict[str, str],
        token: str,
    ) -> Request:
        return Request(
            stage=node.stage,
            key=key,
            key_parts=parts,
            config=node.config.model_dump(mode="json"),
            inputs={n: (a.stage, a.key, a.digest) for n, i in node.inputs.items() for a in [inputs[i.node]]},
            seed=node.seed,
            store=self.recipe.store,
            run=self.name,
            node=node.name,
            files=files,
            lease=token,
            # A retry within this run resumes its own partial work; another forced run starts from nothing.
            force=self.name if node.name in self.force else None,
        )

    def _make(self, node: Node, request: Request) -> Artifact:
        """Have a worker make the artifact."""

        def on_event(event: Report) -> None:
            match event:
                case Progress():
                    self.reporter.progress(node, event)
                case Log(line):
                    self.line(f"{node.name}: {line}")
                case Heartbeat():
                    self.reporter.compiling(node)

        crew = self.crew if self.sharing is None else self.sharing.crew_of(self.name)
        try:
            manifest = crew.run(node, request, on_event, self.check)
        except CodeChanged:
            raise
        except StageFailed as e:
            raise type(e)(f"{node.name}: {e}") from e
        with suppress(Exception):  # only `rlhf plan` reads it, and the artifact is committed
            keep(self.store, request.key_parts)
        self.inputs.checked.add(manifest["digest"])
        return Artifact(self.store, manifest)

    def finish(self, status: str) -> None:
        """End the workers and close the record; a remote store gets their logs."""
        try:
            self._ends.close()
        except Exception as e:
            # An open record would report a run at work.
            self.line(f"a worker of run {self.name} did not end well ({type(e).__name__}: {e})")
        finally:
            self._saver.end()
            self._store_log()
            self.record |= {"status": status, "ended": now(), "worker_starts": self.worker_starts}
            if status in ("failed", "interrupted"):
                self._save_if_possible()
            else:
                self.save()

    def _store_log(self) -> None:
        """Copy the logs to a remote store, so that `rlhf logs` finds them on any machine."""
        for path in self.log.parent.glob(f"{self.log.stem}*") if not self.store.is_local else ():
            try:
                with path.open("rb") as log:
                    log.seek(max(0, path.stat().st_size - LOG_BYTES))
                    self.store.write_bytes(log.read(LOG_BYTES), "runs", self.name, path.name)
            except Exception as e:
                # A log must not turn a finished run into a failed one.
                self.line(f"the worker's log stays on this machine ({type(e).__name__}: {e})")

    def _save_if_possible(self) -> None:
        """Write the record; a failure is reported, because it must not hide the error of the stage or the run."""
        try:
            with_room(self.store, self.save)
        except Exception as error:
            fault = disk_fault(error, self.store.scratch) or error
            self.line(f"the record of run {self.name} could not be written: {fault}")


def _ended_by(error: BaseException) -> dict[str, Any]:
    """Return the fields of a record's entry for a stage that an error has ended."""
    if not isinstance(error, Exception):
        return {"state": "interrupted"}
    return {"state": "failed", "error": without_userinfo(f"{type(error).__name__}: {error}")}
