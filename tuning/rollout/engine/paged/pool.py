"""The sequences of an engine with pages: which are seated, the pages of each, and the next tokens of each.

Memory is by tokens that are held, not by the longest that could be. So it may run out while sequences grow: then
the one that was seated last gives its pages up, waits, and is fed its prompt and its tokens so far again. The one that
was seated first never does, and no request is accepted that exceeds the memory by itself, so one always continues.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection

import numpy as np

from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.rollout.engine.cache import KV, Stack
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.engine.paged.attention import Kernel, make, page_bytes
from rlhf.tuning.rollout.engine.paged.pages import BlockName, Pages, block_name
from rlhf.tuning.rollout.engine.placement import Place, make_at
from rlhf.tuning.rollout.engine.pool import Pool
from rlhf.tuning.rollout.engine.slots import Run, Slot

TABLE = 2**17
"""Most numbers of pages in a batch: the kernel holds them in the scalar memory of a TPU's core, which has 1 MiB."""


@dataclasses.dataclass(eq=False)
class Seat(Slot):
    """A sequence with pages."""

    pages: list[int] = dataclasses.field(default_factory=list)
    """For the tokens that it holds, and some that come next."""
    names: list[BlockName] = dataclasses.field(default_factory=list)
    """Of its full blocks."""
    row: int = 0
    """The row of its pages in the pool's table."""

    @property
    def pending(self) -> int:
        """Tokens of its prompt and completion that are not cached; the last one makes the next."""
        assert self.run is not None
        return len(self.run.request.prompt) + len(self.run.tokens) - len(self.held)

    def between(self, first: int, end: int) -> list[int]:
        """Tokens of its prompt and completion from place `first` to `end`."""
        assert self.run is not None
        prompt, tokens = self.run.request.prompt, self.run.tokens
        split = len(prompt)
        if first >= split:
            return tokens[first - split : end - split]
        return [*prompt[first:end], *tokens[max(0, first - split) : max(0, end - split)]]


class PagedPool(Pool):
    """Seats in the order in which they were given, and their pages."""

    def __init__(self, config: DecoderConfig, limits: Limits, kv: KV, place: Place, *, kernel: Kernel | None):
        self._kernel = kernel
        self._size = limits.page_tokens
        self._page_bytes = page_bytes(config, self._size, kv, kernel)
        super().__init__(config, limits, kv, place, rolled=False)
        self.seats: list[Seat] = []
        self.preempted: list[Run] = []
        """Runs that have lost their seats and wait again, for the engine to take."""
        self._pages = Pages(1)
        # The pages of each seat, and the rows that no seat has.
        self._table = np.zeros((0, 0), np.int32)
        self._rows: list[int] = []

    @property
    def capacity(self) -> int:
        """Tokens that all pages hold."""
        return (self._pages.count - 1) * self._size

    @functools.cached_property
    def widest(self) -> int:
        """The longest context that model, limits and memory let a sequence have."""
        longest = self._limits.context or self._config.max_positions
        return max(0, min(longest, self._config.max_positions, self._affordable_pages * self._size))

    @property
    def room(self) -> int:
        """Runs that could be seated now, half as long as the longest context so far."""
        if not self.seats:
            return self.most_seats
        half = max(1, self._pages_for(self._context or self.widest) // 2)
        return max(0, min(self.most_seats - len(self.seats), self._pages.available // half))

    @property
    def size(self) -> str:
        """The most sequences, and tokens and bytes of all, in words."""
        count = self.wanted
        held = count * self._page_bytes / 2**20
        return f"up to {self.most_seats} sequences in {count - 1} pages of {self._size} tokens, {held:,.1f} MiB"

    @property
    def live(self) -> int:
        """Seats."""
        return len(self.seats)

    @property
    def taken(self) -> int:
        """Seats. None is kept for an ended request: its cache is found by its blocks."""
        return len(self.seats)

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence."""
        return self._pages_for(self._context or self.widest)

    @property
    def wanted(self) -> int:
        """Pages that are made: for all seats at the longest context, or as many as memory allows."""
        return 1 + min(self._affordable_pages, self.most_seats * self.table_width)

    def leave(self, slot: Slot, keep: bool = True) -> Run:
        """Ends the run of a seat, which is given up. Its pages stay known by their blocks."""
        assert isinstance(slot, Seat) and slot.run is not None
        self.name_blocks(slot)
        self._pages.drop(slot.pages)
        self.seats.remove(slot)
        self._rows.append(slot.row)
        run, slot.run, slot.pages = slot.run, None, []
        return run

    def remove(self, numbers: Collection[int]) -> list[Run]:
        """Ends the runs of these requests that have seats."""
        return [self.leave(s) for s in list(self.seats) if s.run and s.run.number in numbers]

    def release(self, number: int) -> None:
        """Nothing: no seat is kept for an ended request."""

    def admit(self, waiting: collections.deque[Run]) -> None:
        """Seats waiting runs, in order, while there are seats and pages for their first tokens."""
        fitting = list(itertools.islice(self._fitting(waiting), max(0, self.most_seats - len(self.seats))))
        if not fitting:
            return
        self._name_all()
        if not self.seats:
            self._make_pages()
        self._widen_table()
        # Pages that seated prompts will still take.
        owed = sum(max(0, self._pages_for(len(s.held) + s.pending) - len(s.pages)) for s in self.seats)
        for run in fitting:
            seat = Seat(run, generation=self.generation, row=self._rows[-1])
            self.find_blocks(seat)
            # One more for its completion, and one for that of each other.
            owed += self._pages_for(run.prefill_tokens + 1) - len(seat.pages) + 1
            if self.seats and owed + len(self.seats) > self._pages.available:
                self._pages.drop(seat.pages)
                break
            self.seats.append(seat)
            self._rows.pop()
            waiting.popleft()

    def pieces(self, chunk: int) -> list[tuple[Seat, int]]:
        """Seats to feed in a mixed step, with the number of tokens of each; `chunk` of prompts at most.

        A seat waits if an earlier one computes its next block in this step.
        """
        self._name_all()
        computing: set[BlockName] = set()
        planned = []
        for seat in list(self.seats):
            if seat.run is None:
                # Preempted by an earlier one.
                continue
            if seat.pending > 1:
                self.find_blocks(seat)
            beginning = seat.pending > 1
            wanted, name = (min(seat.pending, chunk), self._next_name(seat)) if beginning else (1, None)
            if wanted == 0 or name in computing:
                continue
            count = min(wanted, self._reserve(seat, wanted))
            if count <= 0:
                continue
            chunk -= count if beginning else 0
            if name is not None:
                computing.add(name)
            planned.append((seat, count))
        return planned

    def decoding(self, steps: int) -> list[Seat]:
        """Seats with nothing of a prompt to feed, and pages for a run of `steps` or for the rest of theirs."""
        planned = []
        for seat in list(self.seats):
            if seat.run is None or seat.pending > 1:
                continue
            wanted = min(steps, seat.run.left)
            held = len(seat.pages) * self._size - len(seat.held)
            if held >= wanted or self._reserve(seat, wanted) >= wanted:
                planned.append(seat)
        return planned

    def table(self, seats: list[Seat], rows: int) -> np.ndarray:
        """The pages of these seats, [rows, pages of the longest sequence]. Entries past a seat's own are of no use."""
        table = np.zeros((rows, self.table_width), np.int32)
        table[: len(seats)] = self._table[[seat.row for seat in seats], : table.shape[1]]
        return table

    def _widen_table(self) -> None:
        """Makes room for the longest sequence and all seats."""
        rows, width = self._table.shape
        added = max(0, self.most_seats - rows), max(0, self.table_width - width)
        if any(added):
            self._rows += range(rows, rows + added[0])
            self._table = np.pad(self._table, [(0, n) for n in added])

    def find_blocks(self, seat: Seat) -> None:
        """Gives a seat the pages of its next blocks that others have computed."""
        while (name := self._next_name(seat)) is not None:
            page = self._pages.share(name)
            if page is None:
                return
            # At a block's end further pages are only reserved: they hold nothing.
            self._pages.drop(seat.pages[len(seat.names) :])
            seat.pages[len(seat.names) :] = [page]
            self._table[seat.row, len(seat.names)] = page
            seat.held += seat.between(len(seat.held), len(seat.held) + self._size)
            seat.names.append(name)

    def _name_all(self) -> None:
        for seat in self.seats:
            self.name_blocks(seat)

    def name_blocks(self, seat: Seat) -> None:
        """Makes the blocks that a seat has filled known to others."""
        if seat.generation != self.generation:
            return
        for number in range(len(seat.names), len(seat.held) // self._size):
            before = seat.names[-1] if seat.names else b""
            name = block_name(before, seat.held[number * self._size : (number + 1) * self._size])
            seat.names.append(name)
            self._pages.name(seat.pages[number], name)

    def clear(self) -> None:
        """Forgets what pages hold. No run may be seated."""
        self._pages.forget()

    def abandon(self) -> None:
        """Gives up all seats with their runs and memory, which a program that failed may have left invalid."""
        self.seats, self.preempted = [], []
        self.cache, self._pages = [], Pages(1)
        self._table, self._rows = np.zeros((0, 0), np.int32), []

    def forget(self) -> None:
        """Begins a generation of weights: from now on no run takes over a cache of earlier ones.

        Runs in progress keep what they have cached.
        """
        self.generation += 1
        self._pages.forget()
        for seat in self.seats:
            if not seat.held:
                seat.generation = self.generation

    @property
    def most_seats(self) -> int:
        """Sequences of a batch, at most."""
        return max(1, min(self._limits.slots, TABLE // max(1, self.table_width)))

    @property
    def _affordable_pages(self) -> int:
        # One is `NOWHERE`.
        return max(0, self._limits.cache_bytes // self._page_bytes - 1)

    def _affordable_slots(self, context: int) -> int:
        return min(self._limits.slots, self._affordable_pages // max(1, self._pages_for(context)))

    def slot_bytes(self, context: int) -> int:
        return self._pages_for(context) * self._page_bytes

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _make_pages(self) -> None:
        count = self.wanted
        if self.cache and count <= self._pages.count:
            return
        # The old ones first: memory need not hold both.
        self.cache = []
        self._pages = Pages(count)
        self.cache = make_at(self._place, self.made)

    def made(self) -> list[Stack]:
        """Empty pages, `wanted` of them."""
        return make(self._config, self.wanted, self._size, self._kv, self._kernel)

    def _next_name(self, seat: Seat) -> BlockName | None:
        """The name of the block that a seat begins next; None within a block, and for blocks that others cannot share.

        Its last token is never found: it has to be fed, for the next one.
        """
        first = len(seat.names) * self._size
        assert seat.run is not None
        if (
            seat.generation != self.generation
            or len(seat.held) != first
            or first + self._size > seat.run.prefill_tokens
        ):
            return None
        return block_name(seat.names[-1] if seat.names else b"", seat.between(first, first + self._size))

    def _reserve(self, seat: Seat, tokens: int) -> int:
        """Takes pages for `tokens` more tokens, if need be from later seats; returns how many there is room for."""
        while len(seat.pages) * self._size < len(seat.held) + tokens:
            page = self._pages.take()
            if page is not None:
                self._table[seat.row, len(seat.pages)] = page
                seat.pages.append(page)
            elif self.seats[-1] is seat:
                break
            else:
                self.preempted.append(self.leave(self.seats[-1]))
        return len(seat.pages) * self._size - len(seat.held)
