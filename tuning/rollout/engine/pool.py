"""The slots of an engine with their memory: how many there are, how long they are, and which run gets which.

Numbers of slots and of cached tokens come from two short ladders, so that few shapes are ever compiled: slots 1, 4, 8,
16, ... up to the limit; tokens half, a quarter, ... of the longest. With `Limits.few` they have three and two rungs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.rollout.engine import cache as kv_cache
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.placement import Place, free_bytes, make_at, put_cache
from rlhf.tuning.rollout.engine.slots import Run, Slot, longest_prefix
from rlhf.tuning.rollout.requests import RefusedRequest, Request
from rlhf.tuning.shapes import bucket

GRAIN = 32
"""The largest capacity of a slot is a multiple of this number of tokens."""
WORTH_SHRINKING = 2
"""Runs of decoding that must be left before empty slots are given up: moving the others costs about one."""


def cache_room(config: DecoderConfig, free: int, limits: Limits, parts: int, held: int = 0) -> int:
    """Bytes for keys and values, if each of `parts` devices has `free` bytes, and `held` are in the cache already."""
    # Heads that the devices do not divide evenly are on each of them.
    devices = parts if config.num_kv_heads % parts == 0 else 1
    room = int(limits.cache_share * free) * devices + held
    # Only its first four bits, so that a little more free memory in a later round does not change shapes.
    unit = 1 << max(0, room.bit_length() - 4)
    return room // unit * unit


class Pool:
    """Slots and their caches."""

    def __init__(self, config: DecoderConfig, limits: Limits, kv: kv_cache.KV, place: Place, *, rolled: bool):
        """`rolled` as in `cache.make`."""
        self.slots: list[Slot] = []
        self.cache: list[kv_cache.Stack] = []
        """Keys and values of all slots."""
        self._config, self._limits, self._kv, self._place, self._rolled = config, limits, kv, place, rolled
        self._context = min(limits.context, self.widest)
        self._copies: list[tuple[int, int]] = []
        self.generation = 0
        self._clock = 0

    @property
    def capacity(self) -> int:
        """Tokens that each slot can hold now."""
        return kv_cache.capacity_of(self.cache) if self.slots else 0

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that are held now."""
        return sum(x.nbytes for x in jax.tree.leaves(self.cache))

    @functools.cached_property
    def widest(self) -> int:
        """The longest context that model, limits and memory let a slot have."""
        tokens = self._limits.cache_bytes // kv_cache.token_bytes(self._config, self._kv)
        # A run of decoding writes up to `steps` tokens after the last one that counts.
        longest = self._limits.context or self._config.max_positions
        return min(longest, self._config.max_positions, tokens // GRAIN * GRAIN - self._limits.steps)

    def fit(self, weights: Any) -> None:
        """Takes the share `cache_share` of the memory that the first weights leave, on devices that report it."""
        if not self._limits.cache_share or self.generation:
            return
        # Temporaries of their layout are gone then.
        jax.block_until_ready(jax.tree.leaves(weights))
        free = free_bytes(self._place)
        if free is None:
            return
        parts = self._place.shape.get("tensor", 1) if isinstance(self._place, Mesh) else 1
        room = cache_room(self._config, free, self._limits, parts, self.bytes)
        self._limits = dataclasses.replace(self._limits, cache_bytes=room)
        self.__dict__.pop("widest", None)
        self._context = min(self._limits.context, self.widest)

    @property
    def room(self) -> int:
        """Runs that could be seated now, of the longest context so far."""
        return self._affordable_slots(self._context) - self.taken

    @property
    def size(self) -> str:
        """The most slots, tokens of each and bytes of all, in words."""
        context = self._context or self.widest
        slots = self._affordable_slots(context)
        room = slots * self.slot_bytes(context)
        return f"up to {slots} slots of {context} tokens, {room / 2**20:,.1f} MiB of keys and values"

    @property
    def live(self) -> int:
        """Slots with a run."""
        return sum(s.run is not None for s in self.slots)

    @property
    def taken(self) -> int:
        """Slots with a run, or kept for one."""
        return sum(s.taken for s in self.slots)

    def most(self, context: int) -> int:
        """Largest number of slots of `context` tokens. Raises RefusedRequest if there is memory for none."""
        self._check_memory("a slot", context)
        return self._affordable_slots(context)

    def rows_for(self, runs: int) -> int:
        """Number of slots that the pool makes for `runs` runs of the longest context: 1, 4, 8, 16, ..., or all.

        A step of few rows is bound by reading the weights, so 2 rows cost what 4 do; with many rows the time grows with
        their number.
        """
        most = self._affordable_slots(self._context)
        if self._limits.few:
            return next((n for n in self._limits.rows(most) if n >= runs), most)
        ladder = [n for n in (1, *(2**i for i in range(2, most.bit_length()))) if n < most]
        return next((n for n in ladder if n >= runs), most)

    def release(self, number: int) -> None:
        """Frees the slot that is kept for an ended request, if there is one."""
        for slot in self.slots:
            if slot.kept == number:
                slot.kept = None

    def leave(self, slot: Slot, keep: bool = True) -> Run:
        """Ends the run of a slot. The slot is free then, unless `keep` is set and the request has `keep`."""
        run = slot.run
        assert run is not None
        self._clock += 1
        slot.run, slot.left_at = None, self._clock
        slot.kept = run.number if keep and run.request.keep else None
        return run

    def remove(self, numbers: Collection[int]) -> list[Run]:
        """Ends the runs of these requests that have slots."""
        leaving = [s for s in self.slots if s.run and s.run.number in numbers]
        for slot in self.slots:
            # A follower prefills by itself when its leader leaves.
            if slot.run and slot.run.leader in leaving:
                slot.run.leader = None
        return [self.leave(slot, keep=False) for slot in leaving]

    def check(self, request: Request) -> None:
        """Raises RefusedRequest, with the request's name, if it exceeds the model's positions or this memory."""
        who = f"request {request.name or request.counter}"
        total = request.total_tokens
        size = f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones exceed"
        if total > self._config.max_positions:
            raise RefusedRequest(
                f"{who}: {size} the model's {self._config.max_positions} positions; shorten the prompt or max_tokens"
            )
        if self._limits.context and total > self._limits.context:
            raise RefusedRequest(f"{who}: {size} this engine's {self._limits.context} tokens of context")
        self._check_memory(who, total)
        ids, vocabulary = np.asarray(request.prompt), self._config.vocab_size
        unknown = np.flatnonzero((ids < 0) | (ids >= vocabulary))
        if len(unknown):
            raise RefusedRequest(f"{who}: token {request.prompt[unknown[0]]} is not one of the model's {vocabulary}")

    def _check_memory(self, who: str, tokens: int) -> None:
        if self._affordable_slots(tokens) == 0:
            each = self.slot_bytes(tokens)
            raise RefusedRequest(
                f"{who}: keys and values of {tokens} tokens take {each / 2**20:.1f} MiB, the cache may have "
                f"{self._limits.cache_bytes / 2**20:.1f} MiB; give it more, a smaller type, or a shorter request"
            )

    def widen(self, requests: Sequence[Request]) -> None:
        """Raises the longest context to that of these requests. Raises RefusedRequest (see `check`)."""
        for request in requests:
            self.check(request)
        longest = max((r.total_tokens for r in requests), default=0)
        if not self._limits.context and longest > self._context:
            self._context = self._bucket(longest)

    def admit(self, waiting: collections.deque[Run]) -> None:
        """Seats as many waiting runs as there are slots for, in order. Slots are resized for them."""
        if not self.taken and not waiting:
            return
        # Runs that continue in a kept slot are first in the queue, and need no further one.
        kept = {s.kept for s in self.slots if s.kept is not None}
        own = sum(run.request.after in kept for run in waiting) if kept else 0
        fitting = self._fitting(waiting)
        rows = self.rows_for(self.taken + len(waiting) - own)
        left = max((s.run.left for s in self.slots if s.run), default=0)
        if rows < len(self.slots) and self.taken and left <= WORTH_SHRINKING * self._limits.steps:
            rows = len(self.slots)
        entering = list(itertools.islice(fitting, own + max(0, rows - self.taken)))
        lengths = [len(s.held) for s in self.slots if s.taken] + [len(r.request.prompt) for r in entering]
        self.resize(max(rows, self.taken), max(lengths) + self._limits.steps)
        for run in entering:
            waiting.popleft()
            self._seat(run)
        self._copy()

    def _fitting(self, waiting: Sequence[Run]) -> Iterator[Run]:
        """The first of the waiting runs, up to one that exceeds the longest context so far.

        That one waits for all runs under way to end: longer slots for all of them may exceed the memory.
        """
        if waiting and not self.live and waiting[0].request.total_tokens > self._context:
            # Requests that come one by one do not say how long later ones are.
            self._context = self.widest
        return itertools.takewhile(lambda run: run.request.total_tokens <= self._context, waiting)

    def resize(self, rows: int, needed: int) -> None:
        """Changes to `rows` slots, of the smallest capacity that holds `needed` tokens.

        Slots with a run, or kept for one, stay; of the free ones those that were left last, for the prefixes that they
        hold.
        """
        capacity = next(s for s in self._capacities(self._context) if s >= needed)
        if not self.slots:
            self.slots = [Slot() for _ in range(rows)]
            self.cache = make_at(self._place, lambda: self.empty(rows, capacity))
            return
        if self.taken:
            # Never shorter under a run: it would soon need the longer one again.
            capacity = max(capacity, self.capacity)
        if (rows, capacity) == (len(self.slots), self.capacity):
            return
        order = sorted(range(len(self.slots)), key=lambda i: (not self.slots[i].taken, -self.slots[i].left_at))
        kept = order[:rows]
        fresh = rows - len(kept)
        # A new slot starts as a copy of slot 0: nothing of it counts as held.
        numbers = [*kept, *[0] * fresh]
        kv_cache.resize(self.cache, numbers, capacity)
        self.cache = put_cache(self.cache, self._place)
        self.slots = [self.slots[i] for i in kept] + [Slot() for _ in range(fresh)]
        for slot in self.slots:
            del slot.held[capacity:]

    def reserve(self, requests: Sequence[Request]) -> None:
        """Makes slots for these requests if there are none yet, so that shapes are known. Raises RefusedRequest."""
        self.widen(requests)
        if not self.slots:
            rows = self.rows_for(sum(r.samples for r in requests))
            self.resize(rows, max(len(r.prompt) for r in requests) + self._limits.steps)

    def release_followers(self) -> None:
        """Copies each finished prefill to the slots that were waiting for the same prompt."""
        for slot in self.slots:
            if slot.run and slot.run.leader and slot.run.leader.decoding:
                leader, slot.run.leader = slot.run.leader, None
                self._take_over(slot, leader, slot.run.prefill_tokens)
        self._copy()

    def clear(self) -> None:
        """Empties every slot. No run may be seated."""
        self.slots = [Slot() for _ in self.slots]

    def abandon(self) -> None:
        """Gives up all slots with their runs and memory, which a program that failed may have left invalid."""
        self.slots, self.cache, self._copies = [], [], []

    def capacity_for(self, tokens: int) -> int:
        """The smallest capacity of a slot that holds `tokens` tokens."""
        longest = max(self._context, self._bucket(tokens) if tokens > self._context else 0)
        return next(s for s in self._capacities(longest) if s >= tokens)

    def scratch(self, tokens: int) -> list[kv_cache.Stack]:
        """An empty cache of one slot, which is not part of the pool."""
        scratch: list[kv_cache.Stack] = make_at(self._place, lambda: self.empty(1, self.capacity_for(tokens)))
        return scratch

    def forget(self) -> None:
        """Begins a generation of weights: from now on no run takes over a cache of earlier ones.

        Runs in progress keep what they have cached.
        """
        self.generation += 1
        for slot in self.slots:
            if slot.run is None:
                slot.held.clear()
            elif not slot.held:
                # A follower prefills its prompt itself: its leader has begun with the last weights.
                slot.run.leader, slot.generation = None, self.generation

    def empty(self, rows: int, capacity: int) -> list[kv_cache.Stack]:
        """An empty cache of `rows` slots."""
        return kv_cache.make(self._config, rows, capacity, self._kv, rolled=self._rolled)

    def slot_bytes(self, context: int) -> int:
        """Bytes of a slot for `context` tokens."""
        return kv_cache.token_bytes(self._config, self._kv) * self._capacities(context)[-1]

    def _bucket(self, tokens: int) -> int:
        """The context for requests of `tokens` tokens: few lengths mean few programs."""
        return min(bucket(tokens, 64), self.widest)

    def _affordable_slots(self, context: int) -> int:
        return int(min(self._limits.slots, self._limits.cache_bytes // self.slot_bytes(context)))

    def _capacities(self, context: int) -> list[int]:
        """Possible capacities of a slot, ascending: each half of the next, none under 128 unless it is the only one."""
        sizes = [-(-(context + self._limits.steps) // GRAIN) * GRAIN]
        while sizes[0] // 2 >= 128 and not (self._limits.few and len(sizes) == 2):
            sizes.insert(0, -(-sizes[0] // 2 // 16) * 16)
        return sizes

    def _seat(self, run: Run) -> None:
        """Gives `run` a free slot: the one with the prefix that it takes over, else the one that was left first.

        The first sample of a prompt becomes its leader, which prefills; the others follow it, unless a slot already
        holds the whole prompt.
        """
        current = [s for s in self.slots if s.generation == self.generation]
        leader = next((s for s in current if s.prefilling and s.run and s.run.request.same_prompt(run.request)), None)
        own = next((s for s in self.slots if s.kept is not None and s.kept == run.request.after), None)
        if own is not None:
            # It holds the beginning of this prompt: a turn of an episode needs no search over all slots.
            leader, current = None, [s for s in current if s is own]
        source, common = longest_prefix(current, run)
        free = [s for s in self.slots if not s.taken]
        slot = own or min(free, key=lambda s: (s is not source, s.left_at))
        slot.kept = None
        slot.run, slot.generation = run, self.generation
        if leader is not None and common < run.prefill_tokens:
            # Nothing counts as held until the cache of the leader is copied.
            run.leader = leader
            slot.held = []
        else:
            self._take_over(slot, source, common)

    def _copy(self) -> None:
        """Makes the copies that `_take_over` has noted, in one call."""
        if self._copies:
            # A slot is the target of one copy at most, so a row a slot is enough.
            pairs = np.zeros((len(self.slots), 2), np.int32)
            pairs[: len(self._copies)] = self._copies
            self.cache = kv_cache.clone(self.cache, pairs, np.int32(len(self._copies)))
            self._copies.clear()

    def _take_over(self, slot: Slot, source: Slot | None, common: int) -> None:
        """Gives `slot` the first `common` tokens that `source` holds; without a source it is empty."""
        if source is None:
            slot.held = []
            return
        if source is not slot:
            self._copies.append((self.slots.index(source), self.slots.index(slot)))
        slot.held = source.held[:common]
