r"""Engines side by side, one in each place of a mesh, that take requests from one queue.

    submit -> queue by prompt --deal--> engine 0 (device 0)          --> updates
                               \------> engine 1 (device 1) ...

A run is dealt when a slot is free for it, to the engine with the fewest. No slot is empty while a run waits, so an
engine decodes at most the longest run beyond its even share (Graham, 1969). Runs of one prompt go to one engine, which
prefills it once, while the others have other prompts to begin.

One loop drives all. It begins a step of each engine that has work, which JAX computes in the background, then waits for
the one begun first; while the host reads its tokens the other devices compute. Dealing depends on
requests and completions, never on which device was faster: a batch is sampled in the same way each time.
Threads, which would take results as they come, could not promise that, and Python runs one of them at a time anyway.
Threads only begin the steps, since each engine compiles its programs for its own device.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Collection, Sequence
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
        self._engines = [engine_at(place, config, dtype, limits, **options) for place in self._places]
        self._queue: collections.deque[Group] = collections.deque()
        """Groups of which no run has been dealt, in the order of arrival."""
        self._groups: list[Group] = [collections.deque() for _ in self._engines]
        """The rest of the group that each engine has begun."""
        self._dealt: list[dict[int, int]] = [{} for _ in self._engines]
        """Of each engine, its own number of a run to the number of the request."""
        self._kept: dict[int, tuple[int, int]] = {}
        """Requests with `keep`: the engine, and its own number."""
        self._begun: collections.deque[int] = collections.deque()
        self._ended: list[Update] = []
        self._submitted = 0
        self._threads = concurrent.futures.ThreadPoolExecutor(len(self._engines), "replica")

    @without_float64
    def load(self, params: nnx.State) -> None:
        """As `Engine.load`, once for all: weights are moved between devices alone, and each engine has one copy."""
        for engine in self._engines:
            engine.weights.drop()
        graph, state = self._engines[0].weights.laid_out(params)
        state = put_weights(state, self.mesh)
        for engine, place in zip(self._engines, self._places, strict=True):
            engine.use(graph, part_of(state, place))

    @property
    def weights_dtype(self) -> str:
        """As `Engine.weights_dtype`."""
        return self._engines[0].weights_dtype

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
        return sorted({name for engine in self._engines for name in engine.programs})

    @property
    def context(self) -> int:
        """Tokens of the longest prompt with its completion that is taken one by one."""
        return min(engine.context for engine in self._engines)

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self._waiting or self._ended or self._begun) and all(engine.idle for engine in self._engines)

    @property
    def _waiting(self) -> bool:
        return bool(self._queue) or any(self._groups)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that are held now, of all engines."""
        return sum(engine.cache_bytes for engine in self._engines)

    @property
    def steps(self) -> list[int]:
        """Decoding steps of each engine so far."""
        return [engine.steps for engine in self._engines]

    @property
    def size(self) -> str:
        """As `Engine.size`, with the number of replicas."""
        return f"{len(self._engines)} replicas, each with {self._engines[0].size}"

    def submit(self, request: Request) -> int:
        """As `Engine.submit`. A request `after` another goes to the engine that keeps the slot."""
        # By the engine with the least memory: any of them may get a run.
        min(self._engines, key=lambda engine: engine.context).check(request)
        self._submitted += 1
        number = self._submitted
        if request.after is not None and request.after in self._kept:
            engine, before = self._kept.pop(request.after)
            self._give(engine, _Queued(number, dataclasses.replace(request, after=before), 0))
            return number
        # Without a slot that is kept for it, it is a request like others.
        request = dataclasses.replace(request, after=None)
        if not self._queue or not self._queue[-1][0].request.same_prompt(request):
            self._queue.append(collections.deque())
        self._queue[-1].extend(_Queued(number, request, sample) for sample in range(request.samples))
        return number

    def score(self, prompt: Sequence[int]) -> Scores:
        """As `Engine.score`, on the engine with the fewest runs."""
        return min(self._engines, key=lambda engine: engine.runs).score(prompt)

    def release(self, number: int) -> None:
        """Gives up the slot that is kept for an ended request (`Request.keep`); for others it does nothing."""
        if number in self._kept:
            engine, own = self._kept.pop(number)
            self._engines[engine].release(own)

    def slots_for(self, context: int) -> int:
        """Slots of `context` tokens, of all engines together. Raises RefusedRequest if there is memory for none."""
        return sum(engine.slots_for(context) for engine in self._engines)

    def abandon(self) -> None:
        """Drops every request and all that slots hold; weights stay."""
        for engine in self._engines:
            engine.abandon()
        held: Any
        for held in (self._queue, *self._groups, *self._dealt, self._kept, self._begun, self._ended):
            held.clear()

    def cancel(self, number: int) -> None:
        """Ends a request in a next step; the tokens so far become a completion with stop `cancelled`."""
        cancelled = Completion([], [], "cancelled")
        self._ended += [Update(number, run.sample, [], [], cancelled) for run in self._unqueue({number})]
        for engine, dealt in zip(self._engines, self._dealt, strict=True):
            for own, of in dealt.items():
                if of == number:
                    engine.cancel(own)

    def step(self) -> list[Update]:
        """Deals runs, begins a step of each engine that has work, and returns the updates of the one begun first."""
        self._deal()
        self._begin([i for i, engine in enumerate(self._engines) if i not in self._begun and not engine.idle])
        updates, self._ended = self._ended, []
        return updates + (self._finish(self._begun.popleft()) if self._begun else [])

    def _finish(self, i: int) -> list[Update]:
        """The updates of the step that an engine has begun, with the numbers of the requests."""
        updates, dealt = [], self._dealt[i]
        for update in self._engines[i].finish():
            number = dealt[update.number] if update.completion is None else dealt.pop(update.number)
            updates.append(dataclasses.replace(update, number=number))
        return updates

    def _begin(self, numbers: list[int]) -> None:
        begun = [self._threads.submit(self._engines[i].begin, self._waiting) for i in numbers]
        try:
            for future in begun:
                future.result()
        finally:
            # Also after an interrupt: the caller that catches it must find no engine at work.
            concurrent.futures.wait(begun)
        self._begun += numbers

    def _deal(self) -> None:
        """Gives queued runs to engines that have room, one by one to the one with the fewest."""
        if not self._waiting:
            return
        rooms, loads = [engine.room for engine in self._engines], [engine.runs for engine in self._engines]
        while self._waiting and (able := [i for i, room in enumerate(rooms) if room > 0]):
            i = min(able, key=loads.__getitem__)
            if not self._groups[i] and self._queue:
                self._groups[i] = self._queue.popleft()
            # Without a new prompt it helps with another engine's.
            group = self._groups[i] or max(self._groups, key=len)
            self._give(i, group.popleft())
            rooms[i] -= 1
            loads[i] += 1

    def _give(self, engine: int, run: _Queued) -> None:
        own = self._engines[engine].submit(run.request, run.sample)
        self._dealt[engine][own] = run.number
        if run.request.keep:
            self._kept[run.number] = engine, own

    def _unqueue(self, numbers: Collection[int]) -> list[_Queued]:
        """Takes the runs of these requests out of the queue."""
        taken = []
        for group in (*self._queue, *self._groups):
            mine = [run for run in group if run.number in numbers]
            for run in mine:
                group.remove(run)
            taken += mine
        self._queue = collections.deque(filter(None, self._queue))
        return taken

    def _open(self, requests: Sequence[Request]) -> None:
        for engine in self._engines:
            engine._open(requests)

    def _close(self, numbers: Collection[int]) -> None:
        self._unqueue(numbers)
        self._begun.clear()
        for engine, dealt in zip(self._engines, self._dealt, strict=True):
            mine = [own for own, number in dealt.items() if number in numbers]
            engine._close(mine)
            for own in mine:
                del dealt[own]
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
