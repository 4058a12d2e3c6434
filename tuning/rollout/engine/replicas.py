r"""Engines side by side, one in each place of a mesh, that take requests from one queue.

    submit -> queue by prompt --deal--> engine 0 (device 0)          --> updates
                               \------> engine 1 (device 1) ...

A run is dealt when a slot is free for it, to the engine with the fewest. No slot is empty while a run waits, so an
engine decodes at most the longest run beyond its even share (Graham, 1969). Runs of one prompt go to one engine, which
prefills it once, for as long as the others have prompts of their own to begin.

One loop drives all. It begins a step of each engine that has work, which JAX computes in the background, then waits for
the one begun first; while the host reads its tokens the other devices compute. What is dealt where follows from the
requests and their completions, never from which device was faster: a batch is sampled in the same way each time.
Threads, which would take results as they come, could not promise that, and Python runs one of them at a time anyway.
Only where several engines begin at once do threads do it, since each compiles its programs for its own device.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rlhf.tuning.axes import Axes
from rlhf.tuning.mesh import make_mesh
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.precision import without_float64
from rlhf.tuning.rollout.engine.batches import Batches
from rlhf.tuning.rollout.engine.cache import KV
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.paged.engine import PagedEngine, runs_paged
from rlhf.tuning.rollout.engine.placement import Place, own_places, part_of, places_of, put_weights
from rlhf.tuning.rollout.engine.sampling import request_keys
from rlhf.tuning.rollout.engine.scores import Scores
from rlhf.tuning.rollout.requests import Completion, Request, Update

Name = tuple[int, int]
"""A sample: number of its request, and its own."""


class StepFailed(RuntimeError):
    """The step of one engine has raised: its requests have ended. Those of the others go on."""

    def __init__(self, cause: Exception, numbers: frozenset[int]):
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.numbers = numbers


@dataclasses.dataclass(eq=False)
class _Queued:
    """A run that has not been dealt."""

    name: Name
    request: Request
    key: np.ndarray
    """Key data [2]."""


class Replicas(Batches):
    """Generates with one policy at a time, on every replica of a mesh. Not thread-safe: see `live`.

    A sample depends on its seed, place and number (R15), and so not on the number of replicas, up to the rounding of
    what is computed beside it.
    """

    def __init__(
        self, config: DecoderConfig, dtype: str = "float32", limits: Limits | None = None, *, mesh: Mesh, **options: Any
    ):
        """`mesh` as of `placement.sampling_mesh`, of which each process of a group has the engines on its own devices,
        with requests of its own. The other arguments are of each `Engine`; slots and memory too."""
        self.config, self.mesh = config, mesh
        self._places = own_places(mesh)
        self._engines = [engine_at(place, config, dtype, limits, **options) for place in self._places]
        self._groups: dict[bytes, collections.deque[_Queued]] = {}
        """By prompt, its token ids in four bytes each, in the order of arrival; none is empty."""
        self._owner: dict[bytes, int] = {}
        """The engine that has begun a prompt of which runs are queued."""
        self._dealt: list[dict[int, Name]] = [{} for _ in self._engines]
        """Of each engine, its own number of a request to the sample."""
        self._kept: dict[int, tuple[int, int]] = {}
        """Requests with `keep`: the engine, and its own number."""
        self._begun: collections.deque[int] = collections.deque()
        self._ended: list[Update] = []
        self._submitted = 0
        self._failing: set[int] = set()
        """Engines whose last step has raised."""
        self._out: set[int] = set()
        """Engines of which two in a row have: they are dealt nothing more."""
        self._threads = concurrent.futures.ThreadPoolExecutor(len(self._engines), "replica")

    def engines(self) -> list[tuple[Engine, Place]]:
        """The engines, each with its place."""
        return list(zip(self._engines, self._places, strict=True))

    @without_float64
    def load(self, params: nnx.State) -> None:
        """As `Engine.load`, once for all: weights are moved between devices alone, and each engine has one copy."""
        own = self.engines()
        for engine, _ in own:
            engine.weights.drop()
        graph, state = own[0][0].weights.laid_out(params)
        state = put_weights(state, self.mesh)
        for engine, place in own:
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
        """As `Engine.prepare` in a place: nothing."""

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
        return not (self._groups or self._ended or self._begun) and all(engine.idle for engine in self._engines)

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

    def submit(self, request: Request, keys: np.ndarray | None = None) -> int:
        """As `Engine.submit`. A request `after` another goes to the engine that keeps the slot."""
        # By the engine with the least memory: any of them may get a run.
        min(self._engines, key=lambda engine: engine.context).check(request)
        if keys is None:
            keys = next(request_keys([request]))
        self._submitted += 1
        number = self._submitted
        if request.after is not None and request.after in self._kept:
            engine, before = self._kept.pop(request.after)
            self._give(engine, _Queued((number, 0), dataclasses.replace(request, after=before), keys[0]))
            return number
        # Without a slot that is kept for it, it is a request like others.
        one = dataclasses.replace(request, samples=1, after=None)
        queued = [_Queued((number, sample), one, keys[sample]) for sample in range(request.samples)]
        prompt = np.asarray(request.prompt, np.int32).tobytes()
        self._groups.setdefault(prompt, collections.deque()).extend(queued)
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
        """Slots of `context` tokens, of all engines together. Raises RefusedRequest where there is memory for none."""
        return sum(engine.slots_for(context) for engine in self._engines)

    def abandon(self) -> None:
        """Drops every request and all that slots hold; weights stay."""
        for engine in self._engines:
            engine.abandon()
        self._groups.clear()
        self._owner.clear()
        self._kept.clear()
        for dealt in self._dealt:
            dealt.clear()
        self._begun.clear()
        self._ended.clear()

    def cancel(self, number: int) -> None:
        """Ends a request in a next step; the tokens so far become a completion with stop `cancelled`."""
        queued = self._take_out({number})
        self._ended += [Update(*one.name, [], [], Completion([], [], "cancelled")) for one in queued]
        for engine, own in self._where({number}):
            self._engines[engine].cancel(own)

    def step(self) -> list[Update]:
        """Deals runs, begins a step of each engine that has work, and returns the updates of the one begun first.

        Raises StepFailed where that one raises.
        """
        if len(self._out) == len(self._engines):
            raise RuntimeError("the steps of every engine have failed")
        self._deal()
        self._begin([i for i, engine in enumerate(self._engines) if i not in self._begun and not engine.idle])
        found = self._finished(self._begun.popleft()) if self._begun else []
        # Taken once nothing can raise: what a failing step has taken would be told to nobody.
        updates, self._ended = self._ended, []
        return updates + found

    def _finished(self, i: int) -> list[Update]:
        """The updates of the step that an engine has begun, by the names of the samples. Raises StepFailed."""
        try:
            found = self._engines[i].finish()
        except Exception as error:
            raise self._failed(i, error) from error
        self._failing.discard(i)
        updates = []
        for update in found:
            number, sample = self._dealt[i][update.number]
            if update.completion is not None:
                del self._dealt[i][update.number]
            updates.append(dataclasses.replace(update, number=number, sample=sample))
        return updates

    def _begin(self, numbers: list[int]) -> None:
        crowded = bool(self._groups)
        # The first error is raised when all have begun, or failed to.
        begun = [self._threads.submit(self._engines[i].begin, crowded) for i in numbers[1:]]
        try:
            if numbers:
                begun.insert(0, _called(self._engines[numbers[0]].begin, crowded))
        finally:
            # Also where this thread is interrupted: whoever catches that must find no engine at work.
            concurrent.futures.wait(begun)
        errors = [(i, future.exception()) for i, future in zip(numbers, begun, strict=True)]
        self._begun += [i for i, error in errors if error is None]
        for i, error in errors:
            if isinstance(error, Exception):
                raise self._failed(i, error) from error

    def _deal(self) -> None:
        """Gives queued runs to engines that have room, one by one to the one with the fewest."""
        if not self._groups:
            return
        rooms, loads = [engine.room for engine in self._engines], [engine.runs for engine in self._engines]
        while self._groups:
            able = [i for i, room in enumerate(rooms) if room > 0 and i not in self._out]
            if not able:
                return
            i = min(able, key=loads.__getitem__)
            prompt = self._next_for(i)
            self._owner.setdefault(prompt, i)
            group = self._groups[prompt]
            self._give(i, group.popleft())
            if not group:
                del self._groups[prompt], self._owner[prompt]
            rooms[i] -= 1
            loads[i] += 1

    def _next_for(self, engine: int) -> bytes:
        """The prompt whose run an engine takes: of those that it has begun, else one that is new, else the first."""
        mine = next((p for p, owner in self._owner.items() if owner == engine), None)
        if mine is not None:
            return mine
        # Owned groups are in front: they began first, and there is one an engine at most but for what was cut short.
        return next((p for p in self._groups if p not in self._owner), next(iter(self._groups)))

    def _give(self, engine: int, queued: _Queued) -> None:
        own = self._engines[engine].submit(queued.request, queued.key[None])
        self._dealt[engine][own] = queued.name
        if queued.request.keep:
            self._kept[queued.name[0]] = engine, own

    def _where(self, numbers: Collection[int]) -> list[tuple[int, int]]:
        """(engine, its own number) of each run of these requests that has been dealt."""
        names = ((i, own, name) for i, dealt in enumerate(self._dealt) for own, name in dealt.items())
        return [(i, own) for i, own, (number, _) in names if number in numbers]

    def _take_out(self, numbers: Collection[int]) -> list[_Queued]:
        """The queued runs of these requests, which are queued no longer."""
        taken = [one for group in self._groups.values() for one in group if one.name[0] in numbers]
        if taken:
            left = {p: [one for one in group if one.name[0] not in numbers] for p, group in self._groups.items()}
            self._groups = {p: collections.deque(group) for p, group in left.items() if group}
            self._owner = {p: owner for p, owner in self._owner.items() if p in self._groups}
        return taken

    def _failed(self, engine: int, error: Exception) -> StepFailed:
        """Ends the requests that have a run on an engine which has failed, wherever their other runs are."""
        numbers = frozenset(number for number, _ in self._dealt[engine].values())
        (self._out if engine in self._failing else self._failing).add(engine)
        self._engines[engine].abandon()
        self._dealt[engine].clear()
        self._kept = {number: where for number, where in self._kept.items() if where[0] != engine}
        self._take_out(numbers)
        self._forget(numbers)
        return StepFailed(error, numbers)

    def _forget(self, numbers: Collection[int]) -> None:
        """Drops the runs of these requests from the engines, without a word."""
        for i, own in self._where(numbers):
            self._engines[i].drop(own)
            del self._dealt[i][own]

    def _open(self, requests: Sequence[Request]) -> None:
        for engine in self._engines:
            engine._open(requests)

    def _close(self, numbers: Iterable[int]) -> None:
        mine = set(numbers)
        self._take_out(mine)
        self._forget(mine)
        self._begun.clear()
        for engine in self._engines:
            engine._close(())
        self._ended = [update for update in self._ended if update.number not in mine]


def _called(function: Callable[..., None], *arguments: Any) -> concurrent.futures.Future[None]:
    """The outcome of a call in this thread."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    try:
        function(*arguments)
        future.set_result(None)
    except Exception as error:
        future.set_exception(error)
    return future


def engine_at(
    place: Place,
    config: DecoderConfig,
    dtype: str = "float32",
    limits: Limits | None = None,
    *,
    cache: Literal["auto", "slots", "paged"] = "auto",
    kv_cache_dtype: KV | Literal["auto"] = "auto",
    **options: Any,
) -> Engine:
    """The engine of one place. cache: whether keys and values are in slots of equal length or in pages; auto: in pages
    where the kernel for TPUs takes the model."""
    parts = place.shape["tensor"] if isinstance(place, Mesh) else 1
    kind = PagedEngine if runs_paged(cache, config, dtype, kv_cache_dtype, parts) else Engine
    return kind(config, dtype, limits, place=place, kv_cache_dtype=kv_cache_dtype, **options)


def engine_over(
    mesh: Mesh | None, config: DecoderConfig, dtype: str = "float32", limits: Limits | None = None, **options: Any
) -> Engine | Replicas:
    """The engine of a mesh of `placement.sampling_mesh`: `Replicas` where there are several, else `engine_at`."""
    if mesh is None:
        return engine_at(None, config, dtype, limits, **options)
    places = places_of(mesh)
    if len(places) == 1 and jax.process_count() == 1:
        return engine_at(places[0], config, dtype, limits, **options)
    return Replicas(config, dtype, limits, mesh=mesh, **options)
