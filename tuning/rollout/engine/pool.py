"""The slots of an engine with their memory: how many there are, how long, and what a new run finds in them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tuning.models.config import DecoderConfig
from tuning.rollout.engine import cache as kv_cache
from tuning.rollout.engine import programs
from tuning.rollout.engine.placement import put_cache
from tuning.rollout.engine.slots import Run, Slot, longest_prefix
from tuning.rollout.requests import RefusedRequest, Request
from tuning.shapes import bucket

GRAIN = 32
"""The most tokens that a slot can hold are a multiple of this."""
WORTH_SHRINKING = 2
"""Runs of steps that must be left before slots that stand empty are given up: moving the others costs about one."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """How large an engine is, and how it steps. Nothing here changes a sample."""

    slots: int = 256
    """Completions decoded side by side, at most."""
    context: int = 0
    """Tokens of the longest prompt with its completion; 0: those of the requests at hand, or the model's positions."""
    cache_bytes: int = 2**62
    """Memory for keys and values; fewer slots are used where it is too little for all. Where layers are in one stack
    (`layouts`), the keys or the values are there twice for as long as slots change in number or length."""
    steps: int = 16
    """Tokens a row between two looks of the host."""
    chunks: tuple[int, ...] = (64, 192, 320)
    """Sizes of prefill chunks, in tokens."""
    prefill_chunks: int = 0
    """Chunks between two runs of decoding, so that prompts do not hold up others' tokens; 0: as many as there are."""
    prefix_reuse: bool = True
    """Whether prompts take over what an earlier prompt left in a slot."""

    def __post_init__(self) -> None:
        for name in ("slots", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"Limits.{name} is {getattr(self, name)}; it is 1 or more")
        if not self.chunks or list(self.chunks) != sorted(set(self.chunks)) or self.chunks[0] < 1:
            raise ValueError(f"Limits.chunks is {self.chunks}; sizes rise, and are 1 or more")


class Pool:
    """Slots and caches. Shapes come from two short ladders, of slots and of cached tokens."""

    def __init__(self, config: DecoderConfig, limits: Limits, kv: kv_cache.KV, mesh: Mesh | None, *, rolled: bool):
        """`rolled` as in `cache.make`."""
        self.slots: list[Slot] = []
        self.state: programs.State = {"cache": [], "seen": jnp.zeros((0, config.vocab_size), bool)}
        self._config, self._limits, self._kv, self._mesh, self._rolled = config, limits, kv, mesh, rolled
        self._context = min(limits.context, self.widest)
        self._copies: list[tuple[int, int]] = []

    @property
    def capacity(self) -> int:
        """Tokens that each slot can hold now."""
        return kv_cache.capacity_of(self.state["cache"]) if self.slots else 0

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that are held now."""
        return sum(x.nbytes for x in jax.tree.leaves(self.state["cache"]))

    @functools.cached_property
    def widest(self) -> int:
        """The longest context that model, limits and memory let a slot have."""
        tokens = self._limits.cache_bytes // kv_cache.token_bytes(self._config, self._kv)
        longest = self._limits.context or self._config.max_positions
        return min(longest, self._config.max_positions, tokens // GRAIN * GRAIN - self._limits.steps)

    @property
    def live(self) -> int:
        """Slots with a run."""
        return sum(s.run is not None for s in self.slots)

    def check(self, request: Request) -> None:
        """Raises RefusedRequest, with the request's name, where it exceeds the model's positions or this memory."""
        who = f"request {request.name or request.counter}"
        whole = request.whole
        size = f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones exceed"
        if whole > self._config.max_positions:
            raise RefusedRequest(
                f"{who}: {size} the model's {self._config.max_positions} positions; shorten the prompt or max_tokens"
            )
        if self._limits.context and whole > self._limits.context:
            raise RefusedRequest(f"{who}: {size} this engine's {self._limits.context} tokens of context")
        if self._room(whole) == 0:
            each = self._slot_bytes(whole)
            raise RefusedRequest(
                f"{who}: keys and values of {whole} tokens take {each / 2**20:.1f} MiB, the cache may have "
                f"{self._limits.cache_bytes / 2**20:.1f} MiB; give it more, a smaller type, or a shorter request"
            )
        unknown = [t for t in request.prompt if not 0 <= t < self._config.vocab_size]
        if unknown:
            raise RefusedRequest(f"{who}: token {unknown[0]} is not one of the model's {self._config.vocab_size}")

    def widen(self, requests: Sequence[Request]) -> None:
        """Makes ready for requests longer than any before. Raises RefusedRequest (see `check`)."""
        for request in requests:
            self.check(request)
        longest = max((r.whole for r in requests), default=0)
        if not self._limits.context and longest > self._context:
            self._context = min(bucket(longest, 64), self.widest)

    def admit(self, waiting: Sequence[Run]) -> list[Run]:
        """Gives slots to the first of those that wait, resizing for them, and says which."""
        if not self.live and not waiting:
            return []
        longer = next((i for i, r in enumerate(waiting) if r.request.whole > self._context), None)
        if longer is not None and self.live:
            # Longer slots for all might be more than the memory: who needs one waits until those that run have ended.
            waiting = waiting[:longer]
        elif longer is not None:
            # An engine that gets requests one by one must be ready for any.
            self._context = self.widest
        rows = self._rows(self.live + len(waiting))
        left = max((s.run.left for s in self.slots if s.run), default=0)
        if rows < len(self.slots) and self.live and left <= WORTH_SHRINKING * self._limits.steps:
            rows = len(self.slots)
        entering = list(waiting[: max(0, rows - self.live)])
        lengths = [len(s.held) for s in self.slots if s.run] + [len(r.request.prompt) for r in entering]
        self.resize(max(rows, self.live), max(lengths) + self._limits.steps)
        for run in entering:
            self._seat(run)
        self._copy()
        return entering

    def resize(self, rows: int, needed: int) -> None:
        """The smallest slots that hold `needed` tokens each; runs stay, and of what is free the latest used."""
        capacity = self._capacity(needed)
        if not self.slots:
            self.slots = [Slot() for _ in range(rows)]
            cache = kv_cache.make(self._config, rows, capacity, self._kv, rolled=self._rolled)
            seen = jnp.zeros((rows, self._config.vocab_size), bool)
            self.state = {"cache": put_cache(cache, self._mesh), "seen": seen}
            return
        if self.live:
            capacity = max(capacity, self.capacity)
        if (rows, capacity) == (len(self.slots), self.capacity):
            return
        order = sorted(range(len(self.slots)), key=lambda i: (self.slots[i].run is None, -self.slots[i].used))
        kept = order[:rows]
        fresh = rows - len(kept)
        numbers = [*kept, *[0] * fresh]
        kv_cache.resize(self.state["cache"], numbers, capacity)
        seen = self.state["seen"][jnp.asarray(numbers)]
        self.state = {"cache": put_cache(self.state["cache"], self._mesh), "seen": seen}
        self.slots = [self.slots[i] for i in kept] + [Slot() for _ in range(fresh)]
        for slot in self.slots:
            del slot.held[capacity:]

    def reserve(self, requests: Sequence[Request]) -> None:
        """Makes the slots that these requests would be given, where there are none yet. Raises RefusedRequest."""
        self.widen(requests)
        if not self.slots:
            rows = self._rows(sum(r.samples for r in requests))
            self.resize(rows, max(len(r.prompt) for r in requests) + self._limits.steps)

    def prefilled(self) -> None:
        """Gives those who wait for another's prefill of their prompt a copy of it, where it is done."""
        for slot in self.slots:
            if slot.run and slot.run.leader and slot.run.leader.decoding:
                leader, slot.run.leader = slot.run.leader, None
                self._take_over(slot, leader, slot.run.prefilled)
        self._copy()

    def clear(self) -> None:
        """As if nothing had been before; nobody runs."""
        self.slots = [Slot() for _ in self.slots]

    def forget(self) -> None:
        """Forgets what free slots hold: it was made by other weights."""
        for slot in self.slots:
            if slot.run is None:
                slot.held.clear()

    def _slot_bytes(self, context: int) -> int:
        return kv_cache.token_bytes(self._config, self._kv) * self._capacities(context)[-1]

    def _room(self, context: int) -> int:
        return int(min(self._limits.slots, self._limits.cache_bytes // self._slot_bytes(context)))

    def _capacities(self, context: int) -> list[int]:
        """Cached tokens of a slot, from few to all: each half of the next, none under 128 unless it is the last."""
        sizes = [-(-(context + self._limits.steps) // GRAIN) * GRAIN]
        while sizes[0] // 2 >= 128:
            sizes.insert(0, -(-sizes[0] // 2 // 16) * 16)
        return sizes

    def _row_counts(self) -> list[int]:
        """Numbers of slots, from few to all: 1, 4, 8, 16, ..., and all.

        A step of few rows waits for the weights, whatever their number; of many, its time grows with them.
        """
        most = self._room(self._context)
        return [n for n in (1, *(2**i for i in range(2, most.bit_length()))) if n < most] + [most]

    def _rows(self, runs: int) -> int:
        counts = self._row_counts()
        return next((n for n in counts if n >= runs), counts[-1])

    def _capacity(self, needed: int) -> int:
        return next(s for s in self._capacities(self._context) if s >= needed)

    def _seat(self, run: Run) -> None:
        leaders = (s for s in self.slots if s.run and s.run.request is run.request and not s.decoding)
        leader = next((s for s in leaders if s.run and s.run.leader is None), None)
        source, common = longest_prefix(self.slots, run) if self._limits.prefix_reuse else (None, 0)
        free = [s for s in self.slots if s.run is None]
        slot = min(free, key=lambda s: (s is not source, s.used))
        slot.run = run
        if leader is not None and common < run.prefilled:
            run.leader = leader
            slot.held = []
        else:
            self._take_over(slot, source, common)
        if run.request.sampling.repetition_penalty != 1:
            row = np.zeros(self._config.vocab_size, bool)
            row[np.asarray(run.request.prompt)] = True
            self.state["seen"] = programs.mark(self.state["seen"], np.int32(self.slots.index(slot)), row)

    def _copy(self) -> None:
        if self._copies:
            # A slot is written by one copy at most.
            pairs = np.zeros((len(self.slots), 2), np.int32)
            pairs[: len(self._copies)] = self._copies
            self.state["cache"] = kv_cache.clone(self.state["cache"], pairs, np.int32(len(self._copies)))
            self._copies.clear()

    def _take_over(self, slot: Slot, source: Slot | None, common: int) -> None:
        """Gives `slot` the first `common` tokens of what `source` holds."""
        if source is None:
            slot.held = []
            return
        if source is not slot:
            self._copies.append((self.slots.index(source), self.slots.index(slot)))
        slot.held = source.held[:common]
