"""One run: derives the key of each node, asks the store, sends misses to the worker, keeps the record.

The Prefect flow (`rlhf.flows.pipeline`) and the plain runner both drive it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Protocol

from rlhf.flows.graph.build import Node, build, in_order, with_inputs
from rlhf.flows.graph.keying import key_of
from rlhf.flows.graph.policy_refs import Standing, promoted_by, standing_of
from rlhf.flows.graph.reuse import Records, check_point, taken_artifact
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.records import log_of
from rlhf.flows.running.checks import as_it_is
from rlhf.flows.running.crew import Crew
from rlhf.flows.running.input_check import Whole
from rlhf.flows.running.limits import RunLimit
from rlhf.flows.running.naming import before, entries_of, free_name
from rlhf.flows.running.recipe_warnings import of_data
from rlhf.flows.running.record_writer import Saver, now
from rlhf.stages.contract.source_archive import keep
from rlhf.stages.store import runs
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.disk import disk_fault
from rlhf.stages.store.keys import published, without_userinfo
from rlhf.stages.store.leases import lease, this_process
from rlhf.stages.store.work import WorkFolder
from rlhf.stages.worker.client import CodeChanged, StageFailed, WorkerDied
from rlhf.stages.worker.protocol import Heartbeat, Log, Progress, Report, Request

EDITS = 3
"""How often a stage is made again because its code was edited while it ran."""
LOG_BYTES = 1 << 24
"""The end of the worker's log that a remote store gets."""


class Reporter(Protocol):
    """Receives the progress of a run, from a thread for each stage that is at work."""

    def stage_started(self, node: Node) -> None: ...
    def progress(self, node: Node, event: Progress) -> None: ...
    def compiling(self, node: Node) -> None: ...
    def line(self, text: str) -> None: ...
    def stage_ended(self, node: Node, state: str, manifest: dict[str, Any], seconds: float) -> None: ...
    def run_ended(self) -> None: ...


class Session:
    """A run in progress. Several threads may each run a node."""

    def __init__(
        self,
        recipe: Recipe,
        reporter: Reporter,
        name: str | None = None,
        force: set[str] | None = None,
        standing: Standing | None = None,
    ):
        self.recipe = recipe
        self.store = Store(recipe.store)
        self.reporter = reporter
        self.name = name or free_name(self.store, recipe.name)
        self.command: dict[str, str] = {}
        """`command`, for the store's trail, if this process was not started by the user's command."""
        # A generated name is free already. Of two commands with one name the second sees that the first has begun.
        try:
            with (
                nullcontext()
                if name is None
                else lease(self.store, runs.FOLDER, name, lambda line: self.reporter.line(line))
            ):
                self._begin(name, force, standing)
        except BaseException as e:
            # After a signal during the start: a record without an end would count as killed.
            if not isinstance(e, Exception) and hasattr(self, "_saver"):
                self.record |= {"status": "interrupted", "ended": now()}
                self.save()
            raise

    def _begin(self, name: str | None, force: set[str] | None, standing: Standing | None) -> None:
        recipe = self.recipe
        unfinished = before(self.store, recipe, name) if name is not None else None
        # A run that goes on starts from the policy that it started from.
        begun = self.name if unfinished is not None else None
        self.standing = standing if standing is not None else standing_of(recipe, self.store, begun)
        self._build()
        self.force = force or set()
        self.made: dict[str, Artifact] = {}
        self._taken: Records = {}
        self._whole = Whole(self.store, lambda line: self.reporter.line(line), self._check)
        log = log_of(self.store, self.name)
        self.limit = RunLimit(self.name, recipe.limits.run_seconds)
        self.crew = Crew(recipe, self.name, log)
        self.chosen: Collection[str] | None = None
        """Names of the nodes that the run makes; None: all."""
        self._stopped = threading.Event()
        self._lock = threading.RLock()
        """Of the record, and of what is made."""
        earlier = {} if unfinished is None else entries_of(self.store, self.name)
        # What an earlier try was forced to make, and has.
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
            "log": str(next(iter(self.crew.logs), log)),
            "tries": 1 + (unfinished or {"tries": 0}).get("tries", 1),
            "nodes": earlier,
        }
        if promoted := promoted_by(unfinished):
            self.record["promoted"] = promoted  # also of tries before the last one
        if self.standing != Standing():
            self.record["standing"] = self.standing.as_json()
        self._saver = Saver(self.store, self.record, self._lock)
        self.save()

    def _store_log(self) -> None:
        """Copies the logs to a remote store, so that `rlhf logs` has them on any machine."""
        for path in self.crew.logs if not self.store.is_local else ():
            try:
                with path.open("rb") as log:
                    log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
                    self.store.write_bytes(log.read(LOG_BYTES), "runs", self.name, path.name)
            except FileNotFoundError:
                # Of a worker that was not started.
                continue
            except Exception as e:
                # It stays here: a log must not turn a finished run into a failed one.
                self.reporter.line(f"the worker's log stays on this machine ({type(e).__name__}: {e})")

    def save(self, soon: bool = False) -> None:
        """Writes the record to the store (`Saver.save`)."""
        self._saver.save(soon)

    def stop(self) -> None:
        """Has every thread that runs a node end it as interrupted, within seconds."""
        self._stopped.set()

    def _check(self) -> None:
        """Raises RunTooLong where the run has had its time, KeyboardInterrupt where it was stopped."""
        if self._stopped.is_set():
            raise KeyboardInterrupt
        self.limit.check()

    def _build(self) -> None:
        self.nodes = {n.name: n for n in build(self.recipe, self.standing)}
        self._places = {name: place for place, name in enumerate(self.nodes)}

    def rebuild(self, standing: Standing) -> None:
        """Builds the graph for what the names stand for by now; what does not follow from that stays made."""
        before, self.standing = self.nodes, standing
        self._build()
        changed = {name for name, node in self.nodes.items() if node != before.get(name)}
        # An export waits for the decision and does not read it, and another entry of the name may stand for the same
        # policy: both are made again.
        behind = {name for name, node in self.nodes.items() if node.stage in ("export", "gate")}
        gone = self.made.keys() - self.nodes.keys()
        for name in gone | {n for n in self.made.keys() - gone if with_inputs(self.nodes, {n}) & (changed | behind)}:
            del self.made[name], self.record["nodes"][name]
        self.record["standing"] = standing.as_json()
        self.record.pop("decision", None)
        self.save()

    def decide(self, decision: dict[str, Any]) -> None:
        """Puts the decision about the run's policy into the record."""
        with self._lock:
            self.record["decision"] = decision
            self.save()

    def run_node(self, name: str) -> tuple[str, Artifact]:
        """Makes or reads the artifact of one node: (`hit` or `made`, artifact). Its inputs must have run before.

        Where code was edited meanwhile, a fresh worker makes it with the new code, under the key of that. Raises
        RunTooLong where the run has had its time.
        """
        begun: list[dict[str, Any]] = []
        try:
            self.limit.at(name)
            return self._made_with_code_as_it_is(name, begun)
        except BaseException as e:
            # Also where it waited for another run, or an input was made again.
            with self._lock:
                for entry in begun:
                    if entry["state"] == "running":
                        entry |= _ended_by(e)
            if self.recipe.workers is not None:
                # Others may be at work for hours yet.
                self._save_if_possible()
            raise
        finally:
            self.limit.left(name)

    def _made_with_code_as_it_is(self, name: str, begun: list[dict[str, Any]]) -> tuple[str, Artifact]:
        for _ in range(EDITS):
            try:
                return self._made_or_read(name, begun)
            except CodeChanged as e:
                self.reporter.line(f"{name}: {e}; a fresh worker makes it with the code as it is now")
        return self._made_or_read(name, begun)

    def _made_or_read(self, name: str, begun: list[dict[str, Any]]) -> tuple[str, Artifact]:
        """begun: gets the entry of each node that is begun."""
        node = self.nodes[name]
        taken = taken_artifact(self.store, node, self._taken)
        if taken is not None:
            # Its own key, from the settings that it was made with.
            key, parts, files, inputs = taken.key, dict[str, Any](), dict[str, str](), dict[str, Artifact]()
        else:
            # Of one moment: another thread may make a damaged one again, with other content.
            inputs = {i.node: self.made[i.node] for i in node.inputs.values()}
            files, parts = as_it_is(node, inputs)
            key = key_of(parts)
        forced = node.name in self.force - self._forced
        artifact = taken if taken is not None else None if forced else self.store.get(node.stage, key)
        started = time.monotonic()
        entry: dict[str, Any] = {"stage": node.stage, "key": key, "started": now(), "state": "running"}
        entry |= {"forced": True} if node.name in self.force else {}
        begun.append(entry)
        with self._lock:
            self.record["nodes"] = in_order(self.record["nodes"], name, entry, self._places)
        if artifact is not None:
            state = "hit"
            self._tidy(node.stage, key)
        else:
            # On disk before the work begins: `rlhf show` sees the stage as running, also after a kill, and a collection
            # what was found so far, however long the inputs are checked.
            self.save()
            if self._another_input(inputs, begun):
                return self._made_or_read(name, begun)
            self.reporter.stage_started(node)

            def waits(line: str) -> None:
                # The run's limit counts it too.
                self.limit.waits(name, line)
                self.reporter.line(line)

            with lease(self.store, node.stage, key, waits, self._check) as token:
                # Another run that held the lease before may have made it meanwhile.
                artifact = None if forced else self.store.get(node.stage, key, repair=True)
                state = "hit" if artifact is not None else "made"
                if artifact is None:
                    artifact = self._make(node, inputs, key, parts, files, token, entry)
        check_point(node, artifact)
        seconds = time.monotonic() - started
        # The last: what making took, here or in the run that did it.
        done = {"state": state, "digest": artifact.digest, "metrics": artifact.metrics, "seconds": round(seconds, 2)}
        with self._lock:
            entry |= done | {"made_seconds": artifact.manifest["seconds"]}
            self.made = in_order(self.made, name, artifact, self._places)
        # Beside others it may be hours until the next stage begins, and is recorded.
        self.save(soon=self.recipe.workers is None)
        self.reporter.stage_ended(node, state, artifact.manifest, seconds)
        if node.stage in ("prepare", "fresh"):
            for remark in of_data(self.recipe, artifact.metrics):
                self.reporter.line(f"! {remark}")
        return state, artifact

    def _tidy(self, stage: str, key: str) -> None:
        """Remove the work on this host that a kill just after a commit has left."""
        work = WorkFolder(self.store, stage, key)
        if work.path.exists():
            work.drop()

    def _another_input(self, inputs: Mapping[str, Artifact], begun: list[dict[str, Any]]) -> bool:
        """Makes damaged inputs of a node again; whether one has other content now."""
        for name, artifact in inputs.items():
            self._whole.ensure(name, artifact, lambda: self.made, partial(self._made_or_read, name, begun))
        return any(self.made[name].digest != artifact.digest for name, artifact in inputs.items())

    def _make(
        self,
        node: Node,
        inputs: Mapping[str, Artifact],
        key: str,
        parts: dict[str, Any],
        files: dict[str, str],
        token: str,
        entry: dict[str, Any],
    ) -> Artifact:
        """Has the worker make an artifact; a failure goes into the record's entry and is raised."""
        request = Request(
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

        def on_event(event: Report) -> None:
            match event:
                case Progress():
                    self.reporter.progress(node, event)
                case Log(line):
                    self.reporter.line(f"{node.name}: {line}")
                case Heartbeat():
                    self.reporter.compiling(node)

        started = time.monotonic()
        try:
            manifest = self.crew.run(node, request, on_event, self._check)
        except BaseException as e:
            with self._lock:
                entry |= _ended_by(e) | {"seconds": round(time.monotonic() - started, 2)}
            self._save_if_possible()
            if isinstance(e, StageFailed) and not isinstance(e, CodeChanged):
                raise type(e)(f"{node.name}: {e}") from e
            raise
        with suppress(Exception):  # it is for `rlhf plan` alone, and the artifact is committed
            keep(self.store, parts)
        self._whole.add(manifest["digest"])
        return Artifact(self.store, manifest)

    def run_with_retries(self, name: str) -> tuple[str, Artifact]:
        """`run_node`, tried again when the worker dies: a fresh worker resumes."""
        # A stage that raised an error would raise it again: only the death of a worker is retried.
        for attempt in range(self.recipe.retries + 1):
            try:
                return self.run_node(name)
            except WorkerDied as e:
                if attempt == self.recipe.retries:
                    raise
                self.reporter.line(f"{name}: {e}\n  try {attempt + 2} of {self.recipe.retries + 1} with a fresh worker")
        raise AssertionError("unreachable")

    def finish(self, status: str) -> None:
        """Ends the workers and closes the record; a remote store gets their logs."""
        try:
            self.crew.finish()
        except Exception as e:
            # A record that stays open would tell of a run at work.
            self.reporter.line(f"a worker of run {self.name} did not end well ({type(e).__name__}: {e})")
        finally:
            self._close(status)

    def _close(self, status: str) -> None:
        self._saver.end()
        self._store_log()
        self.record |= {"status": status, "ended": now(), "worker_starts": self.crew.starts}
        if status in ("failed", "interrupted"):
            self._save_if_possible()
        else:
            self.save()

    def _save_if_possible(self) -> None:
        """Writes the record where a failure to write it must not hide what has ended the stage or the run."""
        try:
            self.save()
        except Exception as error:
            found = disk_fault(error, self.store.scratch) or error
            self.reporter.line(f"the record of run {self.name} could not be written: {found}")


def _ended_by(error: BaseException) -> dict[str, Any]:
    """What the record says of a stage that an error has ended."""
    if not isinstance(error, Exception):
        return {"state": "interrupted"}
    return {"state": "failed", "error": without_userinfo(f"{type(error).__name__}: {error}")}
