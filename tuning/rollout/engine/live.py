"""An engine that many callers share: its thread steps it, and requests are added, streamed and cancelled any time."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from flax import nnx

from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.replicas import Replicas, StepFailed
from tuning.rollout.engine.scores import Scores
from tuning.rollout.requests import Completion, Request, Update

CLOSING_SECONDS = 60.0


class EngineStopped(RuntimeError):
    """The engine has been closed, or a step has failed with this request under way; the cause is chained."""


class Stream:
    """The updates of one request. Iteration ends when the last of its samples has ended."""

    def __init__(self, live: Live, request: Request, number: int, notify: Callable[[], None] | None):
        self._live, self._notify = live, notify
        self.request, self.number = request, number
        self._updates: queue.SimpleQueue[Update | BaseException] = queue.SimpleQueue()
        # `_open` counts samples whose end the reader has not taken, `left` those whose end the engine has not
        # delivered.
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


class Live:
    """Runs an engine in a thread. The methods may be called from any thread."""

    def __init__(self, engine: Engine | Replicas):
        self._engine = engine
        self._streams: dict[int, Stream] = {}
        self._orders: collections.deque[Callable[[], Any]] = collections.deque()
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

        def order() -> Stream:
            number = self._engine.submit(request)
            stream = self._streams[number] = Stream(self, request, number, notify)
            return stream

        return self._ask(order)

    def score(self, prompt: Sequence[int]) -> Scores:
        """Log-probabilities of a prompt's own tokens (`Engine.score`). Raises as `submit` does."""
        scores: Scores = self._ask(lambda: self._engine.score(prompt))
        return scores

    def load(self, params: nnx.State) -> None:
        """Samples from other weights from the next step on; requests in progress go on with them."""
        self._ask(lambda: self._engine.load(params))

    def cancel(self, stream: Stream) -> None:
        """See `Stream.cancel`."""
        with self._wake:
            # Not through `_ask`, which waits for the engine: called from `notify`, in its thread, it would
            # never return.
            self._orders.append(lambda: self._engine.cancel(stream.number))
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
        """Has the thread end behind its step, without a wait; callers that wait raise EngineStopped in a second."""
        with self._wake:
            self._failure = self._failure or EngineStopped("closed")
            self._wake.notify()

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Ends the thread; open streams raise EngineStopped. One whose step hangs for longer than `seconds` is left."""
        self.stop()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._end_streams(self._failure or EngineStopped("closed"))

    def _ask(self, order: Callable[[], Any]) -> Any:
        """Runs `order` in the engine's thread between two steps; returns its result or raises its error."""
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def answered() -> None:
            try:
                answer.put((order(), None))
            except Exception as e:
                # An error of this call, not of the engine: the thread goes on.
                answer.put((None, e))

        with self._wake:
            if self._failure is not None:
                raise EngineStopped("the engine has stopped") from self._failure
            self._orders.append(answered)
            self._wake.notify()
        while True:
            try:
                # A step that fails, or hangs as the engine is closed, gives no answer: look for that once a second.
                value, error = answer.get(timeout=1.0)
                break
            except queue.Empty:
                if self._failure is not None or not self._thread.is_alive():
                    raise EngineStopped("the engine has stopped") from self._failure
        if error is not None:
            raise error
        return value

    def _loop(self) -> None:
        try:
            while True:
                with self._wake:
                    while not self._orders and self._engine.idle and self._failure is None:
                        self._wake.wait()
                    if self._failure is not None:
                        break
                    orders = [self._orders.popleft() for _ in range(len(self._orders))]
                # Without the lock: callers may add orders while a step runs.
                self._busy_since = time.monotonic()
                for order in orders:
                    order()
                if not self._engine.idle:
                    self._step()
                self._busy_since = None
        except BaseException as e:
            with self._wake:
                # Kept as the cause of every later EngineStopped.
                self._failure = e
        finally:
            self._end_streams(self._failure or EngineStopped("closed"))

    def _step(self) -> None:
        try:
            updates = self._engine.step()
        except StepFailed as e:
            self.failed_steps += 1
            # Of one replica: the requests of the others go on.
            self._end_streams(e, e.numbers)
            return
        except Exception as e:
            if not self._stepped:
                # The second one in a row, or the first of all: it is not the requests.
                raise
            self._stepped = False
            self.failed_steps += 1
            # It is not known whose fault it was: all requests under way end, and later ones are served.
            self._engine.abandon()
            self._end_streams(e)
            return
        self._stepped = True
        self._deliver(updates)

    def _end_streams(self, failure: BaseException, numbers: Collection[int] | None = None) -> None:
        for number in list(self._streams):
            if numbers is None or number in numbers:
                stream = self._streams.pop(number, None)
                if stream is not None:
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
