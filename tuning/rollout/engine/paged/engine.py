"""The engine with its keys and values in pages. What a sample is does not depend on it; see `Engine`.

`step` does, in this order: end what was cancelled, seat waiting runs, and one program: a mixed step while prompts are
left to feed, else a run of decoding. A run that has lost its pages waits in front, and goes on where it was: its next
token has the same number, and so the same random number (R15).
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.precision import without_float64
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.paged.attention import Kernel, Ragged, kernel_for
from rlhf.tuning.rollout.engine.paged.pool import PagedPool, Seat
from rlhf.tuning.rollout.engine.paged.programs import Fed, decode, mixed
from rlhf.tuning.rollout.engine.rows import Decoded, Rows, blank_rows
from rlhf.tuning.rollout.engine.slots import fill_row
from rlhf.tuning.rollout.requests import Update

FEWEST_ROWS, ROW_STEP = 4, 4
"""Rows of a batch are 4, 16, 64, ... and the most."""
FEWEST_PAGES = 4
"""Without the kernel the pages of a table are the most, half of it, ... down to this: work grows with them."""


class PagedEngine(Engine):
    """An `Engine` whose memory is by tokens held, and whose steps mix prompts and completions."""

    cpu_kernels = False

    def _make_pool(self, rolled: bool) -> PagedPool:
        if self._kv == "int8":
            raise ValueError("the cache is paged, and kv_cache_dtype is int8: pages hold no scales; say cache: slots")
        place = self._place
        parts = place.shape["tensor"] if isinstance(place, Mesh) else 1
        self._kernel: Kernel | None = kernel_for(target_platform(), self.config, self._kv, self._dtype, parts)
        self._seats = PagedPool(self.config, self._limits, self._kv, place, kernel=self._kernel)
        self._under_way: list[Seat | None] = []
        """Whose tokens the rows of the step in progress are."""
        return self._seats

    def prepare(self, requests: Any) -> None:
        """Nothing but the check: programs are compiled as they are needed. Raises RefusedRequest as `submit` does."""
        self._seats.widen(requests)

    @without_float64
    def begin(self, crowded: bool = False) -> None:
        """The part of a step that gives the device its work, without waiting for it; `finish` must be next."""
        updates = self._end_cancelled()
        self._waiting.seat(self._seats)
        decoded = self._mixed() if any(s.pending > 1 for s in self._seats.seats) else None
        if decoded is None:
            decoded = self._decoding(crowded or bool(self._waiting))
        # Those preempted first were seated last.
        self._waiting.put_in_front(self._seats.preempted)
        self._seats.preempted.clear()
        self._decoded = updates, decoded

    @without_float64
    def finish(self) -> list[Update]:
        """The rest of the step that was begun: waits for its tokens and returns the updates; [] where none was."""
        if self._decoded is None:
            return []
        (updates, decoded), self._decoded = self._decoded, None
        if decoded is None:
            return updates
        arrays = jax.tree.map(np.asarray, decoded)
        self.steps += int(arrays.made_R.max())
        for i, seat in enumerate(self._under_way):
            if seat is not None and seat.run is not None:
                updates.append(self._advance(seat, jax.tree.map(operator.itemgetter(i), arrays)))
                if seat.run is not None:
                    self._seats.name_blocks(seat)
        return updates

    def _mixed(self) -> Decoded[jax.Array] | None:
        """Begins a mixed step; None where there are pages for no prompt."""
        pieces = self._seats.pieces(self._limits.chunks[-1])
        # A later seat may have lost its pages to an earlier one, never the other way round.
        fresh = sum(count for seat, count in pieces if seat.pending > 1)
        if not fresh:
            return None
        rows, width = self._shape([seat for seat, _ in pieces])
        size = self._chunk_size(fresh) + rows
        fed, arrays, slots = self._fed(pieces, rows, width, size)
        graph, weights = self._use_paged("mixed", rows, width, f"chunk={size - rows}")
        assert self._seats.arrays is not None
        self._seats.arrays, decoded = mixed(
            graph, weights, self._seats.arrays, fed, arrays, slots, top=self._top, **self._paged_options
        )
        self._under_way = []
        for seat, count in pieces:
            ends = count == seat.pending
            self._under_way.append(seat if ends else None)
            first = len(seat.held)
            # The last token counts as held once the one that it makes is known.
            seat.held += seat.between(first, first + count - ends)
            self._seats.name_blocks(seat)
        return decoded

    def _fed(
        self, pieces: list[tuple[Seat, int]], count: int, width: int, size: int
    ) -> tuple[Fed[np.ndarray], Rows[np.ndarray], np.ndarray]:
        """The tokens of a mixed step, its rows and their slots."""
        page = self._limits.page_tokens
        tokens, positions, place = (np.zeros(size, np.int32) for _ in range(3))
        rows, length, last = blank_rows(count), np.zeros(count, np.int32), np.zeros(count, np.int32)
        starts = np.zeros(count + 1, np.int32)
        start = 0
        for i, (seat, number) in enumerate(pieces):
            first, end = len(seat.held), start + number
            at = np.arange(first, first + number)
            tokens[start:end] = seat.between(first, first + number)
            positions[start:end] = at
            place[start:end] = np.asarray(seat.pages)[at // page] * page + at % page
            if number == seat.pending:
                fill_row(rows, i, seat)
            length[i], last[i], start = first + number, end - 1, end
            starts[i + 1 :] = end
        seats = [seat for seat, _ in pieces]
        ragged = Ragged(place, length, self._table(seats, count, width), starts, np.asarray([len(seats)], np.int32))
        return Fed(tokens, positions, ragged, last), rows, self._slots_of(seats, count)

    def _decoding(self, crowded: bool) -> Decoded[jax.Array] | None:
        """Begins a run of decoding; None where nothing decodes."""
        steps = self._limits.steps
        seats = self._seats.decoding(steps)
        if not seats:
            return None
        self._under_way = list(seats)
        count, width = self._shape(seats)
        rows = blank_rows(count)
        for i, seat in enumerate(seats):
            fill_row(rows, i, seat)
        # As `Engine._decode` does.
        wake = max(1, len(seats) // 8) if crowded else max(1, len(seats) - len(seats) // 4)
        graph, weights = self._use_paged("decode", count, width)
        assert self._seats.arrays is not None
        self._seats.arrays, decoded = decode(
            graph,
            weights,
            self._seats.arrays,
            self._table(seats, count, width),
            rows,
            self._slots_of(seats, count),
            np.int32(wake),
            np.int32(steps),
            steps=steps,
            top=self._top,
            **self._paged_options,
        )
        return decoded

    def _shape(self, seats: list[Seat]) -> tuple[int, int]:
        """Rows of a batch and pages of its table, from two short ladders."""
        width = self._seats.table_width
        longest = max(len(seat.pages) for seat in seats)
        while self._kernel is None and width // 2 >= max(longest, FEWEST_PAGES):
            width = width // 2
        return rows_of(len(seats), self._seats.most_seats), width

    def _table(self, seats: list[Seat], count: int, width: int) -> np.ndarray:
        table = np.zeros((count, width), np.int32)
        for i, seat in enumerate(seats):
            table[i, : len(seat.pages)] = seat.pages
        return table

    def _slots_of(self, seats: list[Seat], count: int) -> np.ndarray:
        slots = np.full(count, self._limits.slots, np.int32)
        slots[: len(seats)] = [seat.number for seat in seats]
        return slots

    def _use_paged(self, name: str, rows: int, width: int, *shape: str) -> Any:
        self._programs_used.add((name, f"rows={rows}", f"pages={width}", *shape))
        return self.weights.now

    @property
    def _paged_options(self) -> dict[str, Any]:
        mesh = self._place if isinstance(self._place, Mesh) and self._kernel else None
        return {"dtype": self._dtype, "kernel": self._kernel, "mesh": mesh}


def rows_of(sequences: int, most: int) -> int:
    """Rows of a batch of so many sequences, in an engine of `most` seats."""
    rows = FEWEST_ROWS
    while rows < min(most, sequences):
        rows *= ROW_STEP
    return min(rows, max(most, sequences))


def runs_paged(cache: str, config: Any, dtype: str, kv_cache_dtype: str, parts: int) -> bool:
    """Whether an engine over `parts` devices has pages: where it is said, or by `auto` where the kernel for TPUs takes
    the model."""
    kv: Any = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    return cache == "paged" or (cache == "auto" and kernel_for(target_platform(), config, kv, dtype, parts) is not None)
