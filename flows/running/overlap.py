"""Runs a graph as a graph: a stage begins as soon as what it reads is made and its worker is free."""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import dataclasses
import functools
import queue
from collections.abc import Callable, Collection

from rlhf.flows.graph.build import Node
from rlhf.flows.running.gating import Agenda, agendas
from rlhf.flows.running.session import Session

LOOK_SECONDS = 1.0
"""Between two looks, however quiet it is."""
Ended = Callable[[], None]
Begin = Callable[[Node, Callable[[], None]], Ended]
"""(a node, what to call when it has ended) -> what raises the error that it has ended with, if any. It begins a node in
another thread; what to call may be called there."""


def run_overlapped(session: Session, chosen: Collection[str] | None, begin: Begin) -> None:
    """Makes the nodes (`rlhf.flows.running.gating.stages_of`), as many beside each other as there are workers.

    After an error nothing more is begun; what is at work may finish, and the first error is raised. What is raised in
    this thread, as Ctrl-C is, ends what is at work within seconds.
    """
    session.chosen = chosen
    for agenda in agendas(session, chosen):
        _Overlapped(session, agenda, begin).run()


@dataclasses.dataclass
class _AtWork:
    """A stage that was begun."""

    node: Node
    begun: bool = False
    ended: bool = False
    refused: bool = False
    """Whether it could not be begun."""
    result: Ended | None = None
    """None while it is being begun."""

    def refuse(self, error: BaseException) -> None:
        """It never was at work: its error is that of a stage, and what else is at work may end."""
        self.result, self.refused, self.ended = functools.partial(_fail, error), True, True


class _Overlapped:
    """One agenda, being worked off.

    What has begun or ended is a mark and no message: Ctrl-C may come between any two lines, and nothing that is at work
    may be lost by it. A node is begun in a thread, since signals strike the main thread alone: it has begun or never
    will once the agenda is over. Neither locks nor threads of `threading` are used here: their own lines are Python's,
    and Ctrl-C between two of these leaves a lock held, or becomes another error.
    """

    def __init__(self, session: Session, agenda: Agenda, begin: Begin):
        self._session, self._agenda, self._begin = session, agenda, begin
        self._at_work: dict[str, _AtWork] = {}
        """What each worker makes, by the worker's name."""
        self._changed = queue.SimpleQueue[None]()
        """Something, after each mark."""
        self._over = False
        """Whether nothing more may be begun."""

    def run(self) -> None:
        first: Exception | None = None
        try:
            self._begin_what_can()
            while self._at_work:
                error = self._wait()
                if error is not None and not isinstance(error, Exception):
                    raise error
                if first is None and error is None:
                    self._begin_what_can()
                elif first is None and self._at_work:
                    others = " and ".join(at.node.name for at in self._at_work.values())
                    self._session.reporter.line(f"{error}\n  nothing more is begun; what is at work may end: {others}")
                elif error is not None and first is not None:
                    self._session.reporter.line(str(error))
                first = first or error
        except BaseException:
            self._session.stop()
            self._over = True
            self._until(lambda: all(at.ended for at in self._at_work.values() if at.begun))
            raise
        if first is not None:
            raise first

    def _begin_what_can(self) -> None:
        begun = {at.node.name for at in self._at_work.values()}
        for node in self._agenda.ready():
            worker = self._session.crew.of(node)
            if node.name in begun or worker in self._at_work:
                continue
            begun.add(node.name)
            # There before it is at work.
            at = self._at_work[worker] = _AtWork(node)
            self._begin_in_a_thread(at)
            if at.refused or len(self._at_work) == len(self._session.crew.names):
                return

    def _begin_in_a_thread(self, at: _AtWork) -> None:
        context = contextvars.copy_context()
        try:
            _thread.start_new_thread(context.run, (self._begin_one, at))
        except RuntimeError as e:  # no thread is to be had
            at.refuse(e)
        self._until(lambda: at.result is not None)

    def _begin_one(self, at: _AtWork) -> None:
        # In this order: who has set `_over` looks whether it has begun.
        at.begun = True
        if self._over:
            self._end(at)
            return
        try:
            at.result = self._begin(at.node, functools.partial(self._end, at))
        except BaseException as e:
            at.refuse(e)
        self._changed.put(None)

    def _end(self, at: _AtWork) -> None:
        at.ended = True
        self._changed.put(None)

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            # A signal that comes just before the wait is noticed behind it.
            with contextlib.suppress(queue.Empty):
                self._changed.get(timeout=LOOK_SECONDS)

    def _wait(self) -> BaseException | None:
        """Waits for a stage that is at work; what it has ended with."""
        self._until(lambda: any(at.ended for at in self._at_work.values()))
        ended = [(name, at) for name, at in self._at_work.items() if at.ended]
        # Nothing more is begun after an error, also where a stage has ended meanwhile.
        worker, at = min(ended, key=lambda item: not item[1].refused)
        del self._at_work[worker]
        assert at.result is not None
        try:
            at.result()
            self._agenda.made(at.node)
        except BaseException as e:
            return e
        return None


def _fail(error: BaseException) -> None:
    raise error
