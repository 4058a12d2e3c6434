"""The engine with its keys and values in pages; samples are those of `Engine`.

A step runs one program: a mixed step while prompts are left to feed, else a run of decoding. A run that has lost its
pages waits in front and continues where it was: its next token has the same number, and so the same random number
(R15).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.paged.attention import Kernel, Ragged, kernel_for
from rlhf.tuning.rollout.engine.paged.pool import PagedPool, Seat
from rlhf.tuning.rollout.engine.paged.programs import Fed, decode, mixed
from rlhf.tuning.rollout.engine.rows import Decoded, Rows, blank_rows
from rlhf.tuning.rollout.engine.slots import fill_rows

FEWEST_ROWS, ROW_STEP = 4, 4
"""Rows of a batch are 4, 16, 64, ... and the most."""


class PagedEngine(Engine):
    """An `Engine` with memory by tokens held, and steps that mix prompts and completions."""

    cpu_kernels = False

    def _make_pool(self, rolled: bool) -> PagedPool:
        if self.config.num_experts:
            raise ValueError("the cache is paged, and pages do not hold the experts of their tokens: say cache: slots")
        place = self._place
        parts = place.shape["tensor"] if isinstance(place, Mesh) else 1
        self._kernel: Kernel | None = kernel_for(target_platform(), self.config, self._kv, self._dtype, parts)
        self._seats = PagedPool(self.config, self._limits, self._kv, place, kernel=self._kernel)
        return self._seats

    def prepare(self, requests: Any) -> None:
        """Nothing: programs are compiled as they are needed."""

    def _start(self, crowded: bool) -> Decoded[jax.Array] | None:
        decoded = self._mixed() if any(s.pending > 1 for s in self._seats.seats) else None
        if decoded is None:
            decoded = self._decode(crowded)
        # The last one was seated first.
        self._waiting.extendleft(self._seats.preempted)
        self._seats.preempted.clear()
        return decoded

    def _mixed(self) -> Decoded[jax.Array] | None:
        """Begins a mixed step; None if there are pages for no prompt."""
        pieces = self._seats.pieces(self._limits.chunks[-1])
        # A later seat may have lost its pages to an earlier one, never the other way round.
        fresh = sum(count for seat, count in pieces if seat.pending > 1)
        if not fresh:
            return None
        rows = self._rows_of(len(pieces), mixed=True)
        size = (self._limits.chunks[-1] if self._limits.few else self._chunk_size(fresh)) + rows
        fed, arrays = self._fed(pieces, rows, size)
        graph, weights = self._use_paged("mixed", rows, f"chunk={size - rows}")
        self._seats.cache, decoded = mixed(graph, weights, self._seats.cache, fed, arrays, **self._paged_options)
        self._under_way = [seat if count == seat.pending else None for seat, count in pieces]
        for seat, count in pieces:
            if seat.pending > 1:
                first = len(seat.held)
                # The last token counts as held once the one that it makes is known.
                seat.held += seat.between(first, first + count - (count == seat.pending))
        return decoded

    def _rows_of(self, sequences: int, mixed: bool = False) -> int:
        """Rows of a batch; a mixed step, whose chunk costs more than its rows, has none of the smallest number."""
        most = self._seats.most_seats
        if not self._limits.few:
            return rows_of(sequences, most)
        return next((n for n in self._limits.rows(most)[mixed:] if n >= sequences), max(most, sequences))

    def _fed(self, pieces: list[tuple[Seat, int]], count: int, size: int) -> tuple[Fed[np.ndarray], Rows[np.ndarray]]:
        """The tokens of a mixed step, and its rows."""
        page = self._limits.page_tokens
        seats, number_R = [seat for seat, _ in pieces], np.asarray([number for _, number in pieces])
        used, end_R = len(seats), np.cumsum(number_R)
        first_R = np.asarray([len(seat.held) for seat in seats])
        tokens, positions, place = (np.zeros(size, np.int32) for _ in range(3))
        length, last, starts = (np.zeros(n, np.int32) for n in (count, count, count + 1))
        length[:used], last[:used] = first_R + number_R, end_R - 1
        starts[1 : used + 1], starts[used + 1 :] = end_R, end_R[-1]
        # The row of each token, and the token's position.
        row_C = np.repeat(np.arange(used), number_R)
        at_C = np.arange(len(row_C)) + (first_R - end_R + number_R)[row_C]
        table = self._seats.table(seats, count)
        tokens[: len(row_C)] = [
            token
            for (seat, number), first in zip(pieces, first_R.tolist(), strict=True)
            for token in seat.between(first, first + number)
        ]
        positions[: len(row_C)] = at_C
        place[: len(row_C)] = table[row_C, at_C // page] * page + at_C % page
        rows, live = blank_rows(count), [i for i, (seat, number) in enumerate(pieces) if number == seat.pending]
        fill_rows(rows, live, [seats[i] for i in live])
        return Fed(tokens, positions, Ragged(place, length, table, starts, np.asarray([used], np.int32)), last), rows

    def _decode(self, crowded: bool) -> Decoded[jax.Array] | None:
        """Begins a run of decoding; None if nothing decodes."""
        steps = self._limits.steps
        seats = self._seats.decoding(steps)
        if not seats:
            return None
        self._under_way = seats
        count = self._rows_of(len(seats))
        rows = blank_rows(count)
        fill_rows(rows, list(range(len(seats))), seats)
        graph, weights = self._use_paged("decode", count)
        table, wake = self._seats.table(seats, count), self._wake(len(seats), crowded)
        self._seats.cache, decoded = decode(graph, weights, self._seats.cache, table, rows, wake, **self.decode_options)
        return decoded

    def _use_paged(self, name: str, rows: int, *shape: str) -> Any:
        self._programs_used.add((name, f"rows={rows}", f"pages={self._seats.table_width}", *shape))
        return self.weights.now

    @property
    def decode_options(self) -> dict[str, Any]:
        """The static arguments of the decoding program."""
        return {"steps": self._limits.steps, **self._paged_options}

    @property
    def _paged_options(self) -> dict[str, Any]:
        mesh = self._place if isinstance(self._place, Mesh) and self._kernel else None
        return {"top": self._top, "dtype": self._dtype, "kernel": self._kernel, "mesh": mesh}


def rows_of(sequences: int, most: int) -> int:
    """Rows of a batch of `sequences` sequences, in an engine of `most` seats."""
    rows = FEWEST_ROWS
    while rows < min(most, sequences):
        rows *= ROW_STEP
    return min(rows, max(most, sequences))
