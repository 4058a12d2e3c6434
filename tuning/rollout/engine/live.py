"""An engine that many callers share: its thread steps it, and requests are added, streamed and cancelled any time."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.replicas import Replicas
from rlhf.tuning.rollout.engine.scores import Scores
from rlhf.tuning.rollout.requests import Completion, Request, Update

CLOSING_SECONDS = 60.0


class EngineStopped(RuntimeError):
    """The engine has been closed, or a step has failed with this request under way; the cause is chained."""


class WeightsLost(EngineStopped):
    """The engine has dropped its weights and could not load others: it has none."""


class Stream:
    """The updates of one request. Iteration ends when the last of its samples has ended."""

    def __init__(self, live: Live, request: Request, number: int, notify: Callable[[], None] | None):
        self._live, self._notify = live, notify
        self.request, self.number = request, number
        self.generation = live.generation
        """Of the weights that it is sampled from."""
        self._updates: queue.SimpleQueue[Update | BaseException] = queue.SimpleQueue()
        # Samples that the reader has not seen end, and samples that the engine has not ended.
        self._open = self.left = request.samples

    def __iter__(self) -> Iterator[Update]:
        while self._open:
            yield self.next()

    def next(self, timeout: float | None = None) -> Update:
        """The next update. Raises queue.Empty after `timeout` seconds, EngineStopped if the engine has stopped."""
        update = self._updates.get(timeout=timeout)
        if isinstance(update, BaseException):
            raise EngineStopped(f"the engine has dropped this request: {update}") from update
        self._open -= update.completion is not None
        return update

    @property
    def ended(self) -> bool:
        """Whether all updates have been taken."""
        return self._open == 0

    def result(self) -> list[Completion]:
        """All samples, when the last has ended."""
        done = {u.sample: u.completion for u in self if u.completion}
        return [done[s] for s in range(self.request.samples)]

    def cancel(self) -> None:
        """Ends the request at the engine's next step; its samples end as `cancelled`."""
        self._live.cancel(self)

    def put(self, update: Update | BaseException) -> None:
        """Adds an update, or the error that ends the stream. Called by the engine's thread."""
        self._updates.put(update)
        if self._notify:
            self._notify()


@dataclasses.dataclass(eq=False)
class _Order:
    """A call that the engine's thread makes between two steps."""

    call: Callable[[], Any]
    begins: bool = False
    """Whether it begins a request: it waits while other weights are to come first."""
    swaps: bool = False
    """Whether it brings other weights: it waits until no request is under way."""
    answer: concurrent.futures.Future[Any] = dataclasses.field(default_factory=concurrent.futures.Future)

    def run(self) -> None:
        try:
            self.answer.set_result(self.call())
        except Exception as e:
            # An error of this call, not of the engine: the thread continues.
            self.answer.set_exception(e)


class Live:
    """Runs an engine in a thread. The methods may be called from any thread."""

    def __init__(self, engine: Engine | Replicas):
        self._engine = engine
        self.generation = 0
        """How often `swap` has changed the weights."""
        self._streams: dict[int, Stream] = {}
        self._orders: collections.deque[_Order] = collections.deque()
        self._wake = threading.Condition()
        self._failure: BaseException | None = None
        self._stepped = False
        """Whether the last step succeeded."""
        self._busy_since: float | None = None
        self.failed_steps = 0
        """Steps that ended requests."""
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, notify: Callable[[], None] | None = None) -> Stream:
        """Queues a request; `notify` is called, in the engine's thread, for each new update of its stream.

        Raises RefusedRequest as `Engine.submit` does, and EngineStopped after the engine has stopped.
        """

        return self.submit_all([request], notify)[0]

    def submit_all(self, requests: Sequence[Request], notify: Callable[[], None] | None) -> list[Stream]:
        """As `submit`, all of them or none, and all with the same weights."""

        def order() -> list[Stream]:
            made: list[Stream] = []
            with contextlib.ExitStack() as undo:
                for request in requests:
                    number = self._engine.submit(request)
                    made.append(Stream(self, request, number, notify))
                    self._streams[number] = made[-1]
                    undo.callback(self._engine.cancel, number)
                undo.pop_all()
            return made

        streams: list[Stream] = self._ask(_Order(order, begins=True))
        return streams

    def score(self, prompt: Sequence[int]) -> tuple[Scores, int]:
        """Log-probabilities of a prompt's own tokens (`Engine.score`), and the generation of the weights.

        Raises as `submit` does.
        """
        scores: tuple[Scores, int] = self._ask(
            _Order(lambda: (self._engine.score(prompt), self.generation), begins=True)
        )
        return scores

    def swap(self, take: Callable[[Engine | Replicas, int], None]) -> int:
        """Has the engine take other weights between requests; returns their generation, which `take` gets too.

        Requests under way end on the old ones; those that come meanwhile wait, and get the new ones. Raises what `take`
        raises, and EngineStopped. The engine stops if `take` leaves it without weights (WeightsLost).
        """

        def order() -> int:
            try:
                take(self._engine, self.generation + 1)
            except WeightsLost as error:
                self._failure = error
                raise
            self.generation += 1
            return self.generation

        generation: int = self._ask(_Order(order, swaps=True))
        return generation

    def look(self, at: Callable[[Engine | Replicas, int], Any]) -> Any:
        """Calls `at` with the engine and the generation of its weights, between two steps; returns its result."""
        return self._ask(_Order(lambda: at(self._engine, self.generation)))

    def cancel(self, stream: Stream) -> None:
        """See `Stream.cancel`."""
        with self._wake:
            # Not through `_ask`, which waits for the engine: called from `notify`, in its thread, it would
            # never return.
            self._orders.append(_Order(lambda: self._engine.cancel(stream.number)))
            self._wake.notify()

    @property
    def failure(self) -> BaseException | None:
        """Why requests are not served any more; None while they are."""
        if self._failure is None and not self._thread.is_alive():
            return EngineStopped("its thread has ended")
        return self._failure

    @property
    def open(self) -> int:
        """Requests under way."""
        return len(self._streams)

    @property
    def step_seconds(self) -> float:
        """How long the step that the engine is in has taken; 0 between steps."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def stop(self) -> None:
        """Asks the thread to end after its step, without a wait; callers that wait raise EngineStopped in a second."""
        with self._wake:
            self._failure = self._failure or EngineStopped("closed")
            self._wake.notify()

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Ends the thread; open streams raise EngineStopped. Leaves the thread if its step hangs for `seconds`."""
        self.stop()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._end_streams(self._failure or EngineStopped("closed"))

    def _ask(self, order: _Order) -> Any:
        """Has the engine's thread run an order between two steps; returns its result or raises its error."""
        with self._wake:
            if self._failure is not None:
                raise EngineStopped("the engine has stopped") from self._failure
            self._orders.append(order)
            self._wake.notify()
        # A step that fails, or hangs as the engine is closed, gives no answer: look for that once a second.
        while not concurrent.futures.wait([order.answer], timeout=1.0).done:
            if self._failure is not None or not self._thread.is_alive():
                raise EngineStopped("the engine has stopped") from self._failure
        return order.answer.result()

    def _loop(self) -> None:
        try:
            while True:
                with self._wake:
                    while not self._orders and self._engine.idle and self._failure is None:
                        self._wake.wait()
                    if self._failure is not None:
                        break
                    orders = self._due()
                # Without the lock: callers may add orders while a step runs.
                self._busy_since = time.monotonic()
                for order in orders:
                    order.run()
                if not self._engine.idle:
                    self._step()
                self._busy_since = None
        except BaseException as e:
            with self._wake:
                # Kept as the cause of every later EngineStopped.
                self._failure = e
        finally:
            self._end_streams(self._failure or EngineStopped("closed"))

    def _due(self) -> list[_Order]:
        """Takes the orders that may run before the next step. Once other weights are to come nothing begins, and they
        come when no request is under way."""
        swap = next((order for order in self._orders if order.swaps), None)
        if swap is None:
            due = list(self._orders)
        elif self._engine.idle:
            due = [swap]
        else:
            due = [order for order in self._orders if not (order.begins or order.swaps)]
        self._orders = collections.deque(order for order in self._orders if order not in due)
        return due

    def _step(self) -> None:
        try:
            updates = self._engine.step()
        except Exception as e:
            if not self._stepped or self._engine.broken:
                # The second one in a row, or the first of all: it is not the requests.
                raise
            self._stepped = False
            self.failed_steps += 1
            # Any request may be at fault: all of those under way end, and later ones are served.
            self._engine.abandon()
            self._end_streams(e)
            return
        self._stepped = True
        self._deliver(updates)

    def _end_streams(self, failure: BaseException) -> None:
        for number in list(self._streams):
            if stream := self._streams.pop(number, None):
                stream.put(failure)

    def _deliver(self, updates: list[Update]) -> None:
        for update in updates:
            stream = self._streams.get(update.number)
            if stream is None:
                continue
            stream.put(update)
            if update.completion is not None:
                stream.left -= 1
                if stream.left == 0:
                    self._streams.pop(update.number, None)
