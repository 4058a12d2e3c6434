r"""Engines side by side, one in each place of a mesh, that take requests from one queue.

    submit -> queue by prompt --deal--> engine 0 (device 0)          --> updates
                               \------> engine 1 (device 1) ...

A run is dealt when a slot is free for it, to the engine with the fewest. No slot is empty while a run waits, so an
engine decodes at most the longest run beyond its even share (Graham, 1969). Runs of one prompt go to one engine, which
prefills it once, while the others have other prompts to begin.

Each engine makes its steps in a thread of its own, from the first program to the tokens on the host: JAX's client of
GPUs runs a program in the thread that calls it, and a loop whose length the device decides blocks that thread until
its end (XLA's `while_thunk.cc`). One loop drives all: it begins a step of each engine that has work, then waits for the
one begun first. Dealing depends on requests and completions, never on which device was faster: a batch is sampled in
the same way each time. A call that comes during an engine's step follows at its end.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from flax import nnx
from jax.sharding import Mesh

from rlhf.tuning.axes import Axes
from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.mesh import make_mesh
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.precision import without_float64
from rlhf.tuning.rollout.engine.batches import Batches
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.paged.attention import kernel_for
from rlhf.tuning.rollout.engine.paged.engine import PagedEngine
from rlhf.tuning.rollout.engine.placement import Place, own_places, part_of, places_of, put_weights
from rlhf.tuning.rollout.engine.scores import Scores
from rlhf.tuning.rollout.requests import Completion, Request, Update


class _Queued(NamedTuple):
    """A run that has not been dealt."""

    number: int
    """Of its request."""
    request: Request
    sample: int


Group: TypeAlias = collections.deque[_Queued]
"""Runs of one prompt, which one engine should get."""


class Replica:
    """An engine with its thread. One thread calls the methods, and uses the engine itself while `step` is None."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.group: Group = collections.deque()
        """The rest of the group that it has begun."""
        self.dealt: dict[int, int] = {}
        """The engine's own number of a run to the number of the request."""
        self.kept: dict[int, int] = {}
        """Number of a request with `keep` to the engine's own number."""
        self.runs = 0
        """Runs that the engine has, or gets at the end of its step."""
        self.failures = 0
        """Steps in a row that have failed."""
        self.step: concurrent.futures.Future[list[Update]] | None = None
        """The step that the engine makes, or has made."""
        self.room = 0
        """Further runs that it could take, as of its last step."""
        self._calls: list[Callable[[], None]] = []

    def begin(self, crowded: bool) -> None:
        """Begin a step. crowded: as in `Engine.begin`."""

        made = concurrent.futures.Future[list[Update]]()

        def step() -> None:
            try:
                self.engine.begin(crowded)
                made.set_result(self.engine.finish())
            except BaseException as error:
                made.set_exception(error)

        # Before the start, which an interrupt may follow at once.
        self.step = made
        # An executor's thread would be waited for at the end of the process, also if a device hangs.
        threading.Thread(target=step, name="replica", daemon=True).start()

    def wait(self) -> None:
        """Wait until the engine is at no step; the updates stay here."""
        if self.step is not None:
            concurrent.futures.wait([self.step])

    def finish(self) -> list[Update]:
        """Wait for the step; return its updates with the numbers of the requests. Raises the error of the step."""
        self.wait()
        step, self.step = self.step, None
        updates = []
        self.failures += 1
        with contextlib.ExitStack() as after:
            after.callback(self._count)
            calls, self._calls = self._calls, []
            # In the order of the calls, all of them, also after an error.
            for call in reversed(calls):
                after.callback(call)
            for update in step.result() if step is not None else []:
                number = self.dealt[update.number] if update.completion is None else self.dealt.pop(update.number)
                updates.append(dataclasses.replace(update, number=number))
            self.failures = 0
        return updates

    def _count(self) -> None:
        self.runs = len(self.dealt)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function that uses the engine: now, or at the end of its step."""
        if self.step is None:
            function()
        else:
            self._calls.append(function)

    def give(self, run: _Queued) -> None:
        """Give the engine a run."""

        def submit() -> None:
            request = run.request
            if request.after is not None:
                request = dataclasses.replace(request, after=self.kept.pop(request.after))
            own = self.engine.submit(request, run.sample)
            self.dealt[own] = run.number
            if request.keep:
                self.kept[run.number] = own

        # A run after another has a slot.
        self.room -= run.request.after is None
        self.runs += 1
        self.call(submit)

    def cancel(self, number: int) -> None:
        """End a request in the engine's next step."""

        def cancel() -> None:
            for own, of in self.dealt.items():
                if of == number:
                    self.engine.cancel(own)

        self.call(cancel)

    def release(self, number: int) -> None:
        """Give up the slot that is kept for a request."""
        self.call(lambda: self.engine.release(self.kept.pop(number)))

    def close(self, numbers: Collection[int]) -> None:
        """End these requests; the engine is at no step."""
        mine = [own for own, number in self.dealt.items() if number in numbers]
        self.engine._close(mine)
        for own in mine:
            del self.dealt[own]
        self.runs = len(self.dealt)

    def abandon(self) -> None:
        """Drop every request, also those of the step, and all that slots hold."""
        self.wait()
        self.step, self.runs = None, 0
        self.engine.abandon()
        held: Any
        for held in (self.group, self.dealt, self.kept, self._calls):
            held.clear()


class Replicas(Batches):
    """Generates with one policy at a time, on every replica of a mesh. Not thread-safe: see `live`.

    A sample depends on its seed, place and number (R15), and so not on the number of replicas, up to the rounding of
    other rows of its batch.
    """

    def __init__(
        self, config: DecoderConfig, dtype: str = "float32", limits: Limits | None = None, *, mesh: Mesh, **options: Any
    ):
        """`mesh` as of `placement.sampling_mesh`, of which each process of a group has the engines on its own devices,
        with its own requests. The other arguments are those of each `Engine`, slots and memory too."""
        self.config, self.mesh = config, mesh
        self._places = own_places(mesh)
        self.replicas = [Replica(engine_at(place, config, dtype, limits, **options)) for place in self._places]
        self._queue: collections.deque[Group] = collections.deque()
        """Groups of which no run has been dealt, in the order of arrival."""
        self._kept: dict[int, Replica] = {}
        """Requests with `keep`."""
        self._begun: collections.deque[Replica] = collections.deque()
        self._ended: list[Update] = []
        self._submitted = 0

    @property
    def engines(self) -> list[Engine]:
        """The engine of each place."""
        return [replica.engine for replica in self.replicas]

    @without_float64
    def load(self, params: nnx.State) -> None:
        """As `Engine.load`, once for all: weights are moved between devices alone, and each engine has one copy."""
        for replica in self.replicas:
            replica.wait()
        for engine in self.engines:
            engine.weights.drop()
        graph, state = self.engines[0].weights.laid_out(params)
        state = put_weights(state, self.mesh)
        for engine, place in zip(self.engines, self._places, strict=True):
            engine.use(graph, part_of(state, place))

    @property
    def weights_dtype(self) -> str:
        """As `Engine.weights_dtype`."""
        return self.engines[0].weights_dtype

    @property
    def loading_mesh(self) -> Mesh:
        """A mesh for the parameters of `load`: each device holds a part."""
        tensor = self.mesh.shape["tensor"]
        return make_mesh(Axes(1, -1, tensor), list(self.mesh.devices.flat))

    def prepare(self, requests: Sequence[Request]) -> None:
        """Nothing, as `Engine.prepare` in a place."""

    @property
    def programs(self) -> list[str]:
        """Names and shapes of the programs that the engines have used."""
        return sorted({name for engine in self.engines for name in engine.programs})

    @property
    def context(self) -> int:
        """Tokens of the longest prompt with its completion that is taken one by one."""
        return min(engine.context for engine in self.engines)

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self._waiting or self._ended or self._begun) and all(engine.idle for engine in self.engines)

    @property
    def broken(self) -> bool:
        return any(replica.failures > 1 for replica in self.replicas)

    @property
    def _waiting(self) -> bool:
        return bool(self._queue) or any(replica.group for replica in self.replicas)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that are held now, of all engines."""
        return sum(engine.cache_bytes for engine in self.engines)

    @property
    def steps(self) -> list[int]:
        """Decoding steps of each engine so far."""
        return [engine.steps for engine in self.engines]

    @property
    def size(self) -> str:
        """As `Engine.size`, with the number of replicas."""
        return f"{len(self.replicas)} replicas, each with {self.engines[0].size}"

    def submit(self, request: Request) -> int:
        """As `Engine.submit`. A request `after` another goes to the engine that keeps the slot."""
        # By the engine with the least memory: any of them may get a run.
        min(self.engines, key=lambda engine: engine.context).check(request)
        self._submitted += 1
        number = self._submitted
        if request.after is not None and request.after in self._kept:
            self._give(self._kept.pop(request.after), _Queued(number, request, 0))
            return number
        # Without a slot that is kept for it, it is a request like others.
        request = dataclasses.replace(request, after=None)
        if not self._queue or not self._queue[-1][0].request.same_prompt(request):
            self._queue.append(collections.deque())
        self._queue[-1].extend(_Queued(number, request, sample) for sample in range(request.samples))
        return number

    def score(self, prompt: Sequence[int]) -> Scores:
        """As `Engine.score`, on the engine with the fewest runs, after its step."""
        replica = min(self.replicas, key=lambda replica: replica.runs)
        replica.wait()
        return replica.engine.score(prompt)

    def release(self, number: int) -> None:
        """Gives up the slot that is kept for an ended request (`Request.keep`); for others it does nothing."""
        if number in self._kept:
            self._kept.pop(number).release(number)

    def slots_for(self, context: int) -> int:
        """Slots of `context` tokens, of all engines together. Raises RefusedRequest if there is memory for none."""
        return sum(engine.slots_for(context) for engine in self.engines)

    def abandon(self) -> None:
        """Drops every request and all that slots hold; weights stay."""
        for replica in self.replicas:
            replica.abandon()
        held: Any
        for held in (self._queue, self._kept, self._begun, self._ended):
            held.clear()

    def cancel(self, number: int) -> None:
        """Ends a request in a next step; the tokens so far become a completion with stop `cancelled`."""
        cancelled = Completion([], [], "cancelled")
        self._ended += [Update(number, run.sample, [], [], cancelled) for run in self._unqueue({number})]
        for replica in self.replicas:
            replica.cancel(number)

    def step(self) -> list[Update]:
        """Deals runs, begins a step of each engine that has work, and returns the updates of the one begun first."""
        self._deal()
        for replica in self.replicas:
            if replica.step is None and not replica.engine.idle:
                replica.begin(self._waiting)
                self._begun.append(replica)
        updates = []
        if self._begun:
            # Before it leaves the list: after an interrupt the engine is still at work.
            self._begun[0].wait()
            updates = self._begun.popleft().finish()
        ended, self._ended = self._ended, []
        return ended + updates

    def _deal(self) -> None:
        """Gives queued runs to engines that have room, one by one to the one with the fewest."""
        if not self._waiting:
            return
        for replica in self.replicas:
            if replica.step is None:
                replica.room = replica.engine.room
        while self._waiting and (able := [replica for replica in self.replicas if replica.room > 0]):
            replica = min(able, key=lambda replica: replica.runs)
            if not replica.group and self._queue:
                replica.group = self._queue.popleft()
            # Without a new prompt it helps with another engine's.
            group = replica.group or max((other.group for other in self.replicas), key=len)
            self._give(replica, group.popleft())

    def _give(self, replica: Replica, run: _Queued) -> None:
        replica.give(run)
        if run.request.keep:
            self._kept[run.number] = replica

    def _unqueue(self, numbers: Collection[int]) -> list[_Queued]:
        """Takes the runs of these requests out of the queue."""
        taken = []
        for group in (*self._queue, *(replica.group for replica in self.replicas)):
            mine = [run for run in group if run.number in numbers]
            for run in mine:
                group.remove(run)
            taken += mine
        self._queue = collections.deque(filter(None, self._queue))
        return taken

    def _open(self, requests: Sequence[Request]) -> None:
        for engine in self.engines:
            engine._open(requests)

    def _close(self, numbers: Collection[int]) -> None:
        self._unqueue(numbers)
        for replica in self.replicas:
            replica.wait()
        for replica in self.replicas:
            # The error of a step has been raised, or is that of requests which end here.
            with contextlib.suppress(Exception):
                self._ended += replica.finish()
            replica.close(numbers)
        self._begun.clear()
        self._ended = [update for update in self._ended if update.number not in numbers]


def engine_at(
    place: Place,
    config: DecoderConfig,
    dtype: str = "float32",
    limits: Limits | None = None,
    *,
    cache: Literal["auto", "slots", "paged"] = "auto",
    **options: Any,
) -> Engine:
    """The engine of one place. cache: whether keys and values are in slots of equal length or in pages; auto: in pages
    if a kernel supports the model."""
    if cache == "auto":
        kv = options.get("kv_cache_dtype", "auto")
        parts = place.shape["tensor"] if isinstance(place, Mesh) else 1
        kernel = kernel_for(target_platform(), config, dtype if kv == "auto" else kv, dtype, parts)
        cache = "slots" if kernel is None else "paged"
    return (PagedEngine if cache == "paged" else Engine)(config, dtype, limits, place=place, **options)


def engine_over(
    mesh: Mesh | None, config: DecoderConfig, dtype: str = "float32", limits: Limits | None = None, **options: Any
) -> Engine | Replicas:
    """The engine of a mesh of `placement.sampling_mesh`: `Replicas` of several, else `engine_at`."""
    places: list[Place] = [None] if mesh is None else places_of(mesh)
    if mesh is None or (len(places) == 1 and jax.process_count() == 1):
        return engine_at(places[0], config, dtype, limits, **options)
    return Replicas(config, dtype, limits, mesh=mesh, **options)
