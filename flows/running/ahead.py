"""Rollouts are scored while others of their round are sampled: by the worker `score`, where no stage has it.

What it makes lies in a work folder that is named by the rewards and by the rollouts' key; the score stage begins with
it. Nothing depends on it but time: of its errors a line is told, and the stage meets what has caused them.
"""

from __future__ import annotations

import contextlib
import contextvars
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flows.graph.build import Node
from flows.graph.keying import Codes, key_parts
from flows.keeping import AHEAD
from flows.running.limits import RunTooLong
from flows.running.turns import CHECK_SECONDS, TELL_SECONDS
from stages.score.settings import Config
from stages.store.artifacts import Artifact
from stages.store.keys import digest
from stages.store.work import WorkFolder
from stages.worker.protocol import Log, Report, Request

if TYPE_CHECKING:
    from flows.running.session import Session

SCORE, ROLLOUTS = "score", "rollouts"
"""The stage, which has its worker's name, and its input."""
TURN_SECONDS = 0.5
END_SECONDS = 20.0
"""For a thread whose worker was killed."""


class Ahead:
    """What a run scores ahead."""

    def __init__(self, session: Session, check_time: Callable[[], None], before: Mapping[str, Mapping[str, Any]]):
        """check_time: what it raises ends what is at work, as `Worker.run` says. before: entries of the run's last
        try, by node."""
        self._session, self._check_time, self._before = session, check_time, before
        self._filling: list[_Filling] = []
        self._over = False
        """Whether nothing more is begun."""

    def folder(self, node: Node, parts: Mapping[str, Any], inputs: Mapping[str, Artifact]) -> str | None:
        """The key of the work folder of what was scored ahead of a node; None where nothing is.

        parts: of the node's key. inputs: artifacts by node; none for one that is taken from another run.
        """
        if not inputs or not self._is_beside(node):
            return None
        rollouts = inputs[node.inputs[ROLLOUTS].node]
        return self._named(node, parts, (rollouts.stage, rollouts.key))

    def drop(self, node: Node, parts: Mapping[str, Any], inputs: Mapping[str, Artifact]) -> None:
        """Removes what was scored ahead of a node that needs none of it."""
        if (key := self.folder(node, parts, inputs)) is not None:
            shutil.rmtree(WorkFolder(self._session.store, SCORE, key).path, ignore_errors=True)

    def noted(self, node: Node, entry: dict[str, Any]) -> dict[str, Any]:
        """The record's entry of a node, which gets what an earlier try has scored ahead of it."""
        before = self._before.get(node.name, {})
        if AHEAD in before and before["key"] == entry["key"]:
            entry[AHEAD] = before[AHEAD]
        return entry

    @contextlib.contextmanager
    def of(self, node: Node, entry: dict[str, Any]) -> Iterator[None]:
        """Within it finished shards of a node, where it is one that samples, are scored; the record's entry of it gets
        what becomes of that, which a collection keeps."""
        filling = self._begun(node, entry)
        try:
            yield
        finally:
            if filling is not None:
                filling.over.set()

    def _begun(self, node: Node, entry: dict[str, Any]) -> _Filling | None:
        """What scores shards of a node that begins; None where nothing does, or it cannot be begun."""
        session = self._session
        try:
            request = None if self._over else self._request(node, entry["key"])
            if request is None:
                return None
            # Another stage's thread may be writing the record.
            with session._lock:
                entry[AHEAD] = [request.node, request.key]
                session.save()
            filling = _Filling(session, request, self._check_time)
            filling.start()
        except Exception as e:
            session.reporter.line(f"{node.name}: nothing is scored ahead ({type(e).__name__}: {e})")
            return None
        self._filling = [*(one for one in self._filling if one.is_at_work), filling]
        if self._over:
            filling.over.set()
        return filling

    def begin_no_more(self) -> None:
        """Has no more calls begun; those under way come to their end."""
        self._over = True
        for filling in self._filling:
            filling.over.set()

    def end(self, at_once: bool) -> None:
        """Ends what is at work: `at_once`, or when calls under way have come to their end, which cost what they cost.
        Each has its own limit; Ctrl-C, and the end of the run's time, end the wait."""
        self.begin_no_more()
        try:
            with contextlib.suppress(KeyboardInterrupt, RunTooLong):
                for filling in () if at_once else self._filling:
                    filling.wait()
        finally:
            for filling in self._filling:
                filling.end()

    def _is_beside(self, node: Node) -> bool:
        """Whether a node scores what is sampled in shards, both by workers of this host."""
        crew = self._session.crew
        if node.stage != SCORE or crew.of(node) != SCORE:
            return False
        sampled = self._session.nodes[node.inputs[ROLLOUTS].node]
        here = crew.of(sampled) != SCORE and not crew.is_elsewhere(node) and not crew.is_elsewhere(sampled)
        return here and getattr(sampled.config, "environment", None) is None

    def _request(self, node: Node, key: str) -> Request | None:
        """What the worker is asked for while a node is made; None where that is nothing."""
        session = self._session
        readers = [n for n in session.nodes.values() if n.stage == SCORE and n.inputs[ROLLOUTS].node == node.name]
        # Rollouts that are forced, or made again, may be those that there were, with scores that are there.
        if not readers or node.name in session.force or readers[0].name in session.made:
            return None
        if not self._is_beside(readers[0]):
            return None
        # Here and not above: it loads Arrow.
        from stages.score.ahead import rewards_ahead

        reader = readers[0]
        left_out = session.chosen is not None and reader.name not in session.chosen
        assert isinstance(reader.config, Config)
        if left_out or reader.taken or reader.shared or not rewards_ahead(reader.config):
            return None
        codes: Codes = {}
        try:
            parts = key_parts(reader, {}, codes, partial=True)
        except (ValueError, SyntaxError, OSError):
            # A file was edited: the stage says it.
            return None
        (code,) = codes.values()
        return Request(
            stage=reader.stage,
            key=self._named(reader, parts, (node.stage, key)),
            # Functions compute on no device.
            key_parts=parts | {"device": ""},
            config=reader.config.model_dump(mode="json"),
            inputs={},
            seed=reader.seed,
            store=session.recipe.store,
            run=session.name,
            node=reader.name,
            files=code.files,
            sampled=(node.stage, key),
        )

    def _named(self, node: Node, parts: Mapping[str, Any], sampled: tuple[str, str]) -> str:
        """The key of a folder: the rewards with their settings, code and sources, and the key of the rollouts."""
        # A forced stage begins with nothing of other runs.
        forced = self._session.name if node.name in self._session.force else ""
        return digest({**parts, "inputs": {}, "device": "", "sampled": list(sampled), "forced": forced})


class _Filling:
    """A thread that has a worker score ahead, whenever no stage wants it, until the rollouts are there."""

    def __init__(self, session: Session, request: Request, check_time: Callable[[], None]):
        self._worker, self._turn = session.crew.here(SCORE)
        self._tell, self._request, self._check_time = session.reporter.line, request, check_time
        self._told = set[str]()
        self.over, self._ended = threading.Event(), threading.Event()
        # Lines are shown in the log of the task that samples.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="score-ahead", daemon=True)

    @property
    def is_at_work(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Waits for its end, which a line tells where that lasts. Raises what `check_time` does."""
        began, told = time.monotonic(), False
        while self._thread.is_alive():
            self._check_time()
            if not told and time.monotonic() - began >= TELL_SECONDS:
                told = True
                self._tell(f"{self._request.node}: the run ends after calls that were begun ahead; Ctrl-C ends them")
            self._thread.join(CHECK_SECONDS)

    def end(self) -> None:
        """Ends it at once, and its worker where that is at work for it."""
        self._ended.set()
        self.over.set()
        self._thread.join(END_SECONDS)

    def _work(self) -> None:
        try:
            while not self.over.is_set():
                with self._turn.between(TURN_SECONDS) as free:
                    # It may have waited for its turn until they were there.
                    if not free or self.over.is_set():
                        continue
                    if self._worker.run(self._request, self._on_event, self._check, self._enough)["whole"]:
                        return
        except (KeyboardInterrupt, RunTooLong):
            # The run's end, which others tell.
            pass
        except Exception as e:
            told = str(e).partition("\n")[0]
            self._tell(f"{self._request.node}: no more is scored ahead ({told}); the stage does what is left")

    def _enough(self) -> bool:
        return self.over.is_set() or self._turn.is_wanted

    def _check(self) -> None:
        if self._ended.is_set():
            raise KeyboardInterrupt
        self._check_time()

    def _on_event(self, event: Report) -> None:
        # A worker that is asked once more may say the same.
        if isinstance(event, Log) and event.line not in self._told:
            self._told.add(event.line)
            self._tell(f"{self._request.node}: {event.line}")
