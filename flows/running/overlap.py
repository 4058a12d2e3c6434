"""Runs a graph as a graph: a stage begins as soon as what it reads is made and its worker is free."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection

from flows.graph.build import Node
from flows.running.gating import Agenda, agendas
from flows.running.session import Session

Ended = Callable[[], None]
Begin = Callable[[Node, Callable[[], None]], Ended]
"""(a node, what to call when it has ended) -> what raises the error that it has ended with, if any. It begins a node in
another thread; what to call may be called there."""


def run_overlapped(session: Session, chosen: Collection[str] | None, begin: Begin) -> None:
    """Makes the nodes (`flows.running.gating.stages_of`), as many beside each other as there are workers.

    After an error nothing more is begun; what is at work may finish, and the first error is raised. What is raised in
    this thread, as Ctrl-C is, ends what is at work within seconds.
    """
    for agenda in agendas(session, chosen):
        _Overlapped(session, agenda, begin).run()


class _Overlapped:
    """One agenda, being worked off."""

    def __init__(self, session: Session, agenda: Agenda, begin: Begin):
        self._session, self._agenda, self._begin = session, agenda, begin
        self._at_work: dict[str, tuple[Node, Ended]] = {}
        """What each worker makes, by the worker's name."""
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Names of workers whose stage has ended."""

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
                    others = " and ".join(node.name for node, _ in self._at_work.values())
                    self._session.reporter.line(f"{error}\n  nothing more is begun; what is at work may end: {others}")
                elif error is not None and first is not None:
                    self._session.reporter.line(str(error))
                first = first or error
        except BaseException:
            self._session.stop()
            while self._at_work:
                self._wait()
            raise
        if first is not None:
            raise first

    def _begin_what_can(self) -> None:
        begun = {node.name for node, _ in self._at_work.values()}
        for node in self._agenda.ready():
            worker = self._session.crew.of(node)
            if node.name in begun or worker in self._at_work:
                continue
            begun.add(node.name)
            self._at_work[worker] = node, self._begin(node, lambda worker=worker: self._ended.put(worker))  # type: ignore[misc]
            if len(self._at_work) == len(self._session.crew.names):
                return

    def _wait(self) -> BaseException | None:
        """Waits for a stage that is at work; what it has ended with."""
        node, result = self._at_work.pop(self._ended.get())
        try:
            result()
            self._agenda.made(node)
        except BaseException as e:
            return e
        return None
