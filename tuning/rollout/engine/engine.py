"""Continuous batching with the trainer's own model code: when a completion ends, its slot takes the next one.

The life of a sample (`Run`) and of the slot that it gets:

                       +-> leader ----- prefill, in chunks -----+
    submit -> waiting -+                                        +-> decoding -> ended -> held prefix
                       +-> follower -- copy of the leader's ----+      |                  (slot is free)
                                       cache, once it is done          +-- `steps` tokens a run, then the host looks

Samples of one prompt: one of them leads and prefills it, the others follow. A slot that is free still
holds the tokens of its last run; a later prompt that begins with them starts after them (`longest_prefix`).

`step` ends cancelled runs, seats waiting runs, prefills, and decodes. Invariants:

- Each sample of each request ends exactly once, in an `Update` with its completion, also if it is cancelled.
- Its random numbers depend on seed, counter, number of the sample and number of the token (R15): never on the slot, the
  other rows, or how prompts were divided into chunks.
- `Slot.held` lists only tokens with keys and values in the cache. The newest token of a completion is not in it:
  decoding feeds it next.
- Shapes come from two short ladders (`pool`) and the sizes of chunks. No setting of a request is part of a shape, so
  no request compiles anything.

The weights are in the layout of decoding, on the engine's devices. Programs compile in threads before they are needed;
JAX keeps the compiled program for the later call.
"""

from __future__ import annotations

import collections
import functools
import gc
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rlhf.tuning.cpu.kernels import Kernels, build, has_compiler
from rlhf.tuning.mesh import under
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import abstract_decoder, decoder_graph
from rlhf.tuning.models.lora import refuse_experts
from rlhf.tuning.models.matmul import factor_type
from rlhf.tuning.precision import in_real, without_float64
from rlhf.tuning.rollout.engine import programs
from rlhf.tuning.rollout.engine.batches import Batches
from rlhf.tuning.rollout.engine.cache import KV, experts_of
from rlhf.tuning.rollout.engine.cpu import attention, products
from rlhf.tuning.rollout.engine.decoders import Graph, Quantization, lay_out
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.placement import Place, put_weights
from rlhf.tuning.rollout.engine.pool import Pool
from rlhf.tuning.rollout.engine.rows import Decoded
from rlhf.tuning.rollout.engine.scores import Scores, prompt_scores
from rlhf.tuning.rollout.engine.slots import Run, Slot, pack, row_arrays
from rlhf.tuning.rollout.requests import Request, Update

_log = logging.getLogger(__name__)


def start(lowered: Callable[[], Any]) -> threading.Thread:
    """Starts a thread that compiles what `lowered` returns. Join it before the call, which else compiles too."""
    # Of now, as JAX keeps the program under them: its own context managers reach one thread alone, and the process may
    # go on to other settings.
    exact: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    def compile_it() -> None:
        try:
            with jax.enable_x64(exact), jax.default_matmul_precision(precision):
                lowered().compile()
        except Exception as error:
            # The call that needs the program meets it too.
            _log.warning("a program did not compile ahead, and does so where it is called: %r", error)

    # No daemon: an exit waits for it. Python ends daemons by an exception that XLA does not bear: the process aborts.
    thread = threading.Thread(target=compile_it, name="compile", daemon=False)
    thread.start()
    return thread


class Weights:
    """One policy's weights at a time."""

    def __init__(
        self, config: DecoderConfig, place: Place, *, rolled: bool, quantization: Quantization, dtype: str
    ) -> None:
        """Arguments as of `Engine`; `rolled` as of `decoders.lay_out`."""
        self._config, self.quantized = config, quantization == "int8"
        self.place = place
        """Where they are."""
        self.dtype = dtype
        """Type of the matrices of layers, unless they are quantised."""
        self._graph = decoder_graph(config)
        # A joined kernel cannot be sharded over heads (see `lay_out`).
        join = not isinstance(place, Mesh)
        self._options: dict[str, Any] = {"join": join, "rolled": rolled, "quantization": quantization, "dtype": dtype}
        self._now: tuple[Graph, nnx.State] | None = None

    @property
    def now(self) -> tuple[Graph, nnx.State]:
        """Graph and state of the decoder. RuntimeError before the first weights, and after they were dropped."""
        if self._now is None:
            raise RuntimeError("the engine has no weights; call load(params) first")
        return self._now

    @functools.cached_property
    def shapes(self) -> tuple[Graph, nnx.State]:
        """The graph, and the state as shapes."""
        return abstract_weights(self._graph, self._config, **self._options)

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads."""
        return sum(x.nbytes for x in jax.tree.leaves(self._now))

    def laid_out(self, params: nnx.State) -> tuple[Graph, nnx.State]:
        """(graph, state) of parameters in the layout of decoding, on the devices of the parameters."""
        was = gc.isenabled()
        gc.disable()
        try:
            return lay_out(self._graph, in_real(params), **self._options)
        finally:
            # Cycles of references in flax's flattening would hold the arrays. Nothing grows old meanwhile, so only
            # young objects are searched: a process that has traced many programs has millions of older ones.
            gc.collect(1)
            if was:
                gc.enable()

    def load(self, params: nnx.State) -> None:
        """Lays parameters out, and moves them to the place."""
        # Dropped before the new weights are laid out: memory need not hold both.
        self.drop()
        graph, state = self.laid_out(params)
        if isinstance(self.place, Mesh):
            state = put_weights(state, self.place)
        elif self.place is not None:
            state = jax.device_put(state, self.place)
        self.use(graph, state)

    def use(self, graph: Graph, state: nnx.State) -> None:
        """As `load`, with weights that are laid out and in place."""
        self._now = graph, state

    def drop(self) -> None:
        """Gives them up, for memory."""
        self._now = None


def abstract_weights(graph: Graph, config: DecoderConfig, **options: Any) -> tuple[Graph, nnx.State]:
    """(graph, shapes) of `lay_out` with these options for a decoder's float32 parameters, which need not exist."""
    graphs: list[Graph] = []

    def state_of(params: nnx.State) -> nnx.State:
        laid_out, state = lay_out(graph, params, **options)
        # The graph is static: it cannot be a result of eval_shape.
        graphs.append(laid_out)
        return state

    shapes = jax.eval_shape(state_of, abstract_decoder(config)[1])
    return graphs[0], shapes


class Engine(Batches):
    """Generates with one policy at a time. Not thread-safe: see `live`."""

    cpu_kernels = True

    def __init__(
        self,
        config: DecoderConfig,
        dtype: str = "float32",
        limits: Limits | None = None,
        *,
        kv_cache_dtype: KV | Literal["auto"] = "auto",
        quantization: Quantization = "none",
        top: int = 0,
        place: Place = None,
    ):
        """`dtype` is the type of computation (float64 samples in float32), `kv_cache_dtype` that of keys and values
        (auto: `dtype`). The `top` most probable tokens are recorded at each token. `place`: where weights and caches
        go; `Replicas` has an engine in each of several."""
        refuse_experts(config, quantize=quantization)
        dtype = "float32" if dtype == "float64" else dtype
        self.config, self._dtype, self._top, self._place = config, dtype, top, place
        self._kv = cast(KV, dtype if kv_cache_dtype == "auto" else kv_cache_dtype)
        self._limits = limits or Limits()
        self._cancelled: set[int] = set()
        self._programs_used: set[tuple[str, ...]] = set()
        self._compiling: list[threading.Thread] = []
        self._waiting: collections.deque[Run] = collections.deque()
        self._submitted = 0
        self.steps = 0
        """Decoding steps so far."""
        # `begin` leaves these to `finish`: updates, the result of decoding, which may still be computed, and the slot
        # of each of its rows.
        self._decoded: tuple[list[Update], Decoded[jax.Array] | None] | None = None
        self._under_way: Sequence[Slot | None] = []
        # Whether a first token is returned at once, for streams; `run` turns it off.
        self._stream_first = True
        by_c = self.cpu_kernels and not isinstance(place, Mesh)
        self._by_kernel = {
            "attention": by_c and attention.suits(self._kv, config.head_dim),
            "products": by_c and products.suits(dtype),
        }
        # Without the kernel a loop over stacked layers would copy each layer (`decoders`). The build runs later.
        rolled = self._by_kernel["products"] and has_compiler()
        self.weights = Weights(config, place, rolled=rolled, quantization=quantization, dtype=factor_type(dtype))
        """The weights that it samples from."""
        self._pool = self._make_pool(rolled)
        if any(self._by_kernel.values()):
            # Compiling the C sources takes seconds: it overlaps with the loading of weights.
            threading.Thread(target=lambda: self._kernels, name="build", daemon=True).start()

    def _make_pool(self, rolled: bool) -> Pool:
        return Pool(self.config, self._limits, self._kv, self._place, rolled=rolled)

    @without_float64
    def load(self, params: nnx.State) -> None:
        """Samples from these parameters from now on, runs in progress too. Compiles nothing new."""
        self.weights.load(params)
        self._begin_anew()

    def use(self, graph: Graph, state: nnx.State) -> None:
        """As `load`, with weights that are laid out and in place."""
        self.weights.use(graph, state)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pool.fit(self.weights.now[1])
        self._pool.forget()

    @property
    def weights_dtype(self) -> str:
        """Type of the matrices of layers; int8 if they are quantised."""
        return "int8" if self.weights.quantized else self.weights.dtype

    @property
    def loading_mesh(self) -> Mesh | None:
        """A mesh for the parameters of `load`; None for one device."""
        return self._place if isinstance(self._place, Mesh) else None

    @without_float64
    def prepare(self, requests: Sequence[Request]) -> None:
        """Starts to compile, in threads, the programs that requests like these use first, while weights are read.

        With a place it does nothing: the layout of weights over devices is known only once they are loaded.

        Raises RefusedRequest as `submit` does.
        """
        if self._place is not None:
            return
        self._pool.reserve(requests)
        slots = [Slot() for _ in self._pool.slots]
        chunk, _, prefixed = pack(slots, self._chunk_size(sum(len(r.prompt) - 1 for r in requests)))
        rows = row_arrays(slots, self._pool.capacity, self._limits.steps)
        arguments = *self.weights.shapes, jax.eval_shape(lambda: self._pool.cache)
        self._compiling = [
            start(program)
            for program in (
                # In the threads, since the options wait for the kernels to be built.
                lambda: programs.prefill.lower(*arguments, chunk, prefixed=prefixed, **self._program_options),
                lambda: programs.decode.lower(*arguments, rows, np.int32(1), np.int32(1), **self.decode_options),
            )
        ]

    @property
    def programs(self) -> list[str]:
        """Names and shapes of the programs that this engine has used."""
        return [" ".join(p) for p in sorted(self._programs_used)]

    @property
    def context(self) -> int:
        """Tokens of the longest prompt with its completion that this engine takes one by one."""
        return self._pool.widest

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and not self._pool.live

    @property
    def room(self) -> int:
        """Further runs that it could take."""
        return self._pool.room - sum(run.request.after is None for run in self._waiting)

    @property
    def runs(self) -> int:
        """Runs that it has, in slots or waiting for one."""
        return self._pool.live + len(self._waiting)

    @property
    def size(self) -> str:
        """Slots and memory, in words."""
        return self._pool.size

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that are held now."""
        return self._pool.bytes

    @without_float64
    def submit(self, request: Request, sample: int | None = None) -> int:
        """Queues all samples of a request, or one of them, and returns the request's number.

        Raises RefusedRequest, with the request's name, if it exceeds the model's positions or this engine's memory.
        """
        self.check(request)
        self._submitted += 1
        samples = range(request.samples) if sample is None else [sample]
        runs = [Run(self._submitted, s, request) for s in samples]
        if request.after is None:
            self._waiting.extend(runs)
        else:
            # It is next, since the slot that is kept for it waits too.
            self._waiting.extendleft(runs)
        return self._submitted

    def check(self, request: Request) -> None:
        """Raises RefusedRequest, with the request's name, if `submit` would."""
        self._pool.check(request)

    @without_float64
    def score(self, prompt: Sequence[int]) -> Scores:
        """Log-probabilities of a prompt's own tokens, with the `top` most probable ones. Raises RefusedRequest.

        They are computed apart from the requests in progress, which wait meanwhile.
        """
        self._pool.check(Request(prompt, 1))
        size = self._chunk_size(len(prompt) - 1)
        graph, weights = self._use("score", f"chunk={size}", f"prompt={self._pool.capacity_for(len(prompt))}")
        program = functools.partial(programs.score, graph, weights, top=self._top, **self._program_options)
        with self.tracing:
            return prompt_scores(prompt, self._pool.scratch(len(prompt)), size, program)

    def release(self, number: int) -> None:
        """Gives up the slot that is kept for an ended request (`Request.keep`); for others it does nothing."""
        self._pool.release(number)

    def slots_for(self, context: int) -> int:
        """Slots of `context` tokens that limits and memory allow: how many episodes can be under way.

        Raises RefusedRequest if there is memory for none.
        """
        return self._pool.most(context)

    def abandon(self) -> None:
        """Drops every request and all that slots hold, after a step that has raised; weights stay."""
        self._waiting.clear()
        self._cancelled.clear()
        self._decoded = None
        self._pool.abandon()

    def cancel(self, number: int) -> None:
        """Ends a request in the next step; the tokens so far become a completion with stop `cancelled`."""
        self._cancelled.add(number)

    @without_float64
    def step(self) -> list[Update]:
        """Seats waiting runs, prefills and decodes some tokens; returns one update for each sample that moved on."""
        self.begin()
        return self.finish()

    @without_float64
    def begin(self, crowded: bool = False) -> None:
        """The part of a step that gives the device its work, without waiting for it; `finish` must be next.

        crowded: whether runs wait for slots of this engine elsewhere.
        """
        updates, self._under_way = self._end_cancelled(), []
        self._pool.admit(self._waiting)
        self._decoded = updates, self._start(crowded)

    def _start(self, crowded: bool) -> Decoded[jax.Array] | None:
        """Starts the programs of a step; None if they decode nothing."""
        self._prefill()
        return self._decode(crowded)

    @without_float64
    def finish(self) -> list[Update]:
        """The rest of the step that was begun: waits for its tokens and returns the updates."""
        if self._decoded is None:
            return []
        (updates, decoded), self._decoded = self._decoded, None
        if decoded is None:
            return updates
        arrays = jax.tree.map(np.asarray, decoded)
        self.steps += int(arrays.made_R.max())
        tokens, logps, made, live = (
            x.tolist() for x in (arrays.tokens_RT, arrays.logps_RT, arrays.made_R, arrays.live_R)
        )
        ids, best = (arrays.top_ids_RTN.tolist(), arrays.top_logps_RTN.tolist()) if self._top else ((), ())
        top: list[list[tuple[int, float]]] = []
        for i, slot in enumerate(self._under_way):
            if slot is None or slot.run is None:
                continue
            count = made[i]
            if ids:
                pairs = zip(ids[i][:count], best[i][:count], strict=True)
                top = [list(zip(*pair, strict=True)) for pair in pairs]
            updates.append(self._advance(slot, tokens[i][:count], logps[i][:count], top, live[i]))
        return updates

    def _open(self, requests: Sequence[Request]) -> None:
        if self.idle:
            self._pool.clear()
        self._pool.widen(requests)
        self._stream_first = False

    def _close(self, numbers: Collection[int]) -> None:
        self._stream_first, self._decoded = True, None
        self._cancelled.update(numbers)
        self._end_cancelled()

    @functools.cached_property
    def _kernels(self) -> Kernels:
        if not any(self._by_kernel.values()):
            return Kernels()
        # A build is for one type of keys and values; without the attention kernel any will do.
        names = build(self._kv if self._by_kernel["attention"] else "float32")._asdict()
        return Kernels(**{name: names[name] for name, used in self._by_kernel.items() if used})

    def _use(self, name: str, *shape: str) -> tuple[Graph, nnx.State]:
        """(graph, weights) for a program of this shape."""
        while self._compiling:
            self._compiling.pop().join()
        self._programs_used.add((name, f"slots={len(self._pool.slots)}", f"tokens={self._pool.capacity}", *shape))
        return self.weights.now

    def _prefill(self) -> None:
        done = 0
        while any(s.run and not s.decoding for s in self._pool.slots):
            left = [s.run.prefill_tokens - len(s.held) for s in self._pool.slots if s.run and s.prefilling]
            self._prefill_chunk(self._chunk_size(sum(left)))
            self._pool.release_followers()
            done += 1
            if done == self._limits.prefill_chunks:
                return

    def _chunk_size(self, left: int) -> int:
        """The smallest chunk that holds `left` tokens, else the largest."""
        return next((n for n in self._limits.chunks if n >= left), self._limits.chunks[-1])

    def _prefill_chunk(self, size: int) -> None:
        chunk, pieces, prefixed = pack(self._pool.slots, size)
        if prefixed == "one" and self._by_kernel["attention"]:
            # The kernel takes any number in one program.
            prefixed = "many"
        start = {"none": "from the start", "one": "after a prefix", "many": "after prefixes"}[prefixed]
        graph, weights = self._use("prefill", f"chunk={size}", start)
        with self.tracing:
            self._pool.cache = programs.prefill(
                graph, weights, self._pool.cache, chunk, prefixed=prefixed, **self._program_options
            )
        for i, count in pieces:
            run = self._pool.slots[i].run
            assert run is not None
            at = len(self._pool.slots[i].held)
            self._pool.slots[i].held.extend(run.request.prompt[at : at + count])

    def _decode(self, crowded: bool) -> Decoded[jax.Array] | None:
        live = [s for s in self._pool.slots if s.decoding]
        if not live:
            return None
        steps = self._limits.steps
        self._pool.resize(len(self._pool.slots), max(len(s.held) for s in live) + steps)
        self._under_way = [s if s.decoding else None for s in self._pool.slots]
        # A stream gets its first token as soon as there is one, not after `steps` of them.
        first = self._stream_first and any(s.run and not s.run.tokens for s in live)
        graph, weights = self._use("decode")
        rows = row_arrays(self._pool.slots, self._pool.capacity, steps)
        wake, most = self._wake(len(live), crowded), np.int32(1 if first else steps)
        with self.tracing:
            self._pool.cache, decoded = programs.decode(
                graph, weights, self._pool.cache, rows, wake, most, **self.decode_options
            )
        return decoded

    def _wake(self, live: int, crowded: bool) -> np.int32:
        """How many of the live rows end before the host looks, until when they still cost time: 1/8 if runs wait for a
        slot, else 3/4, since a smaller number of slots may then do."""
        return np.int32(max(1, live // 8 if crowded or self._waiting else live - live // 4))

    @property
    def tracing(self) -> AbstractContextManager[Any]:
        """Within it programs are traced for the place: kernels of experts need its mesh (`experts.mixture`)."""
        return under(self.loading_mesh if self.config.num_experts else None)

    @property
    def _program_options(self) -> dict[str, Any]:
        return {"kv": self._kv, "dtype": self._dtype, "kernels": self._kernels}

    @property
    def decode_options(self) -> dict[str, Any]:
        """The static arguments of the decoding program."""
        return {"steps": self._limits.steps, "top": self._top, **self._program_options}

    def _advance(
        self, slot: Slot, tokens: list[int], logps: list[float], top: list[list[tuple[int, float]]], live: bool
    ) -> Update:
        """Adds a run of decoding to the run of a slot; frees the slot if its completion has ended."""
        run = slot.run
        assert run is not None
        before = len(run.tokens)
        stop = slot.advance(tokens, logps, top, live)
        if stop == "string":
            tokens, logps, top = run.tokens[before:], run.logps[before:], run.top[before:]
        if stop and run.request.routing and self.config.num_experts:
            # The last token has met no expert.
            run.routing = experts_of(self._pool.cache, self._pool.slots.index(slot), run.prefill_tokens)
        completion = self._pool.leave(slot).completion(stop) if stop else None
        return Update(run.number, run.sample, tokens, logps, completion, top)

    def _end_cancelled(self) -> list[Update]:
        if not self._cancelled:
            return []
        ended = self._remove(self._cancelled)
        self._cancelled.clear()
        return [Update(run.number, run.sample, [], [], run.completion("cancelled")) for run in ended]

    def _remove(self, numbers: Collection[int]) -> list[Run]:
        """Takes the runs of these requests out of the queue and out of slots."""
        removed = [run for run in self._waiting if run.number in numbers]
        for run in removed:
            self._waiting.remove(run)
            if run.request.after is not None:
                # The caller knows the newest number alone, and this run has not taken over the slot kept for it.
                self._pool.release(run.request.after)
        return removed + self._pool.remove(numbers)
