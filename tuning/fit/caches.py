"""The cache of an engine from shapes alone, in slots or in pages: its bytes, the sequences that it holds at once, and
what the programs over it hold beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from tuning.cpu.kernels import Kernels
from tuning.fit.liveness import Held, held
from tuning.fit.places import bytes_of, local
from tuning.models.config import DecoderConfig
from tuning.models.decoder import decoder_graph
from tuning.rollout.engine import cache as slot_cache
from tuning.rollout.engine import programs
from tuning.rollout.engine.ahead import abstract_weights
from tuning.rollout.engine.cache import KV
from tuning.rollout.engine.limits import Limits
from tuning.rollout.engine.paged import attention
from tuning.rollout.engine.paged import programs as paged_programs
from tuning.rollout.engine.paged.engine import rows_of
from tuning.rollout.engine.paged.pool import PagedPool
from tuning.rollout.engine.placement import cache_shardings
from tuning.rollout.engine.pool import GRAIN, Pool
from tuning.rollout.engine.rows import blank_rows
from tuning.rollout.engine.slots import Slot, pack, row_arrays
from tuning.target import target_platform


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine of one replica."""

    model: DecoderConfig
    limits: Limits
    kv: KV
    dtype: str
    mesh: Any
    """An abstract mesh of the replica's devices."""
    layout: dict[str, Any]
    """Of its weights, as `abstract_weights` takes it."""

    @property
    def tensor(self) -> int:
        """Devices that its heads are cut over."""
        return int(self.mesh.shape["tensor"])

    @property
    def place(self) -> Any:
        """As a pool takes it."""
        return None if self.tensor == 1 else self.mesh

    @property
    def on_one(self) -> DecoderConfig:
        """The part of the model that one of its devices has, with logits of the whole vocabulary: sampling has them."""
        return dataclasses.replace(local(self.model, self.tensor), vocab_size=self.model.vocab_size)

    @property
    def kernel(self) -> attention.Kernel | None:
        """What attends over pages."""
        return attention.kernel_for(target_platform(), self.model, self.kv, self.dtype, self.tensor)

    def weights(self, model: DecoderConfig) -> tuple[Any, Any]:
        """(graph, shapes) of a model's weights as decoding reads them."""
        return abstract_weights(decoder_graph(model), model, **self.layout)


@dataclasses.dataclass(frozen=True)
class Cached:
    """The cache of a replica."""

    sequences: int
    """As long as they may be, at once."""
    capacity: int
    """Tokens of a sequence."""
    held: int
    """Bytes a device."""
    token: float
    """Bytes a device of a token in all layers."""
    programs: tuple[Held, ...]
    """What a run of decoding, and a step that feeds prompts, hold beside it."""


def least(engine: Engine, context: int, pages: bool) -> int:
    """Bytes of all devices for one sequence of `context` tokens."""
    if not pages:
        tokens = -(-(context + engine.limits.steps) // GRAIN) * GRAIN
        return slot_cache.token_bytes(engine.model, engine.kv) * tokens
    size = engine.limits.page_tokens
    # One more, which holds nothing of any sequence.
    return (-(-context // size) + 1) * attention.page_bytes(engine.model, size, engine.kv, engine.kernel)


def in_slots(engine: Engine, context: int, samples: int) -> Cached:
    """With a slot for each sequence. Raises RefusedRequest where the limits allow none of `context` tokens."""
    model, kv, rolled = engine.model, engine.kv, engine.layout["rolled"]
    pool = Pool(model, dataclasses.replace(engine.limits, context=context), kv, engine.place, rolled=rolled)
    slots, capacity = min(pool.most(context), pool.rows_for(samples)), pool.capacity_for(context)
    stacks = jax.eval_shape(lambda: slot_cache.make(model, slots, capacity, kv, rolled=rolled))
    size = bytes_of(stacks, cache_shardings(stacks, engine.mesh))
    return Cached(slots, capacity, size, size / (slots * capacity), over_slots(engine, slots, capacity))


def in_pages(engine: Engine, context: int, samples: int) -> Cached:
    """With pages for the tokens of all. Raises RefusedRequest where they hold no sequence of `context` tokens."""
    model, kv, size = engine.model, engine.kv, engine.limits.page_tokens
    limits = dataclasses.replace(engine.limits, context=context)
    pool = PagedPool(model, limits, kv, engine.place, kernel=engine.kernel)
    pages = jax.eval_shape(lambda: attention.make(model, pool.wanted, size, kv, engine.kernel))
    own = bytes_of(pages, cache_shardings(pages, engine.mesh))
    # Sequences are seated while their prompts have room: the widest batch is of more than fit at their full length.
    rows = rows_of(min(pool.most_seats, samples), pool.most_seats)
    over = over_pages(engine, pool.wanted, rows, pool.table_width)
    most = min(pool.most(context), samples)
    return Cached(most, pool.table_width * size, own, own / (pool.wanted * size), over)


def over_slots(engine: Engine, slots: int, capacity: int) -> tuple[Held, ...]:
    """A run of decoding and a chunk of prefill."""
    model, kv, limits = engine.on_one, engine.kv, engine.limits
    graph, state = engine.weights(model)
    stacks = jax.eval_shape(lambda: slot_cache.make(model, slots, capacity, kv, rolled=engine.layout["rolled"]))
    options: Any = {"kv": kv, "dtype": engine.dtype, "kernels": Kernels()}
    empty = [Slot() for _ in range(slots)]
    rows, most = row_arrays(empty, capacity, limits.steps), np.int32(limits.steps)
    given = programs.State(stacks, _seen(slots, model))
    decode = programs.decode.trace(
        graph, state, given, rows, np.int32(slots), most, steps=limits.steps, top=0, **options
    )
    piece, _, prefixed = pack(empty, limits.chunks[-1])
    prefill = programs.prefill.trace(graph, state, stacks, piece, prefixed=prefixed, **options)
    free = _donated(state, given)
    return held(decode.jaxpr, free=free), held(prefill.jaxpr, free=free)


def over_pages(engine: Engine, pages: int, rows: int, width: int) -> tuple[Held, ...]:
    """A run of decoding and a mixed step, with a batch of `rows` and tables of `width` pages."""
    model, limits, kernel = engine.on_one, engine.limits, engine.kernel
    graph, state = engine.weights(model)
    stacks = jax.eval_shape(lambda: attention.make(model, pages, limits.page_tokens, engine.kv, kernel))
    given = paged_programs.Paged(stacks, _seen(limits.slots, model))
    # A device's part has no mesh of its own.
    options: Any = {"top": 0, "dtype": engine.dtype, "kernel": kernel, "mesh": None}
    blank, each, table = blank_rows(rows), np.zeros(rows, np.int32), np.zeros((rows, width), np.int32)
    most = np.int32(limits.steps)
    decode = paged_programs.decode.trace(
        graph, state, given, table, blank, each, np.int32(rows), most, steps=limits.steps, **options
    )
    fed = np.zeros(limits.chunks[-1] + rows, np.int32)
    starts = np.zeros(rows + 1, np.int32)
    ragged = attention.Ragged(fed, each, table, starts, np.zeros(1, np.int32))
    mixed = paged_programs.mixed.trace(
        graph, state, given, paged_programs.Fed(fed, fed, ragged, each), blank, each, **options
    )
    free = _donated(state, given)
    return held(decode.jaxpr, free=free), held(mixed.jaxpr, free=free)


def _seen(count: int, model: DecoderConfig) -> Any:
    return jax.ShapeDtypeStruct((count, model.vocab_size), bool)


def _donated(state: Any, given: Any) -> range:
    """Numbers of the arguments behind the weights that the programs write in their place."""
    first = len(jax.tree.leaves(state))
    return range(first, first + len(jax.tree.leaves(given)))
