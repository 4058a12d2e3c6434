"""The host's record of an engine's slots: which run each has, and which tokens its cache still holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlhf.tuning.rollout.engine.cache import WINDOW, Entries
from rlhf.tuning.rollout.engine.programs import Chunk, Prefixed
from rlhf.tuning.rollout.engine.rows import Rows, blank_rows
from rlhf.tuning.rollout.requests import Completion, Request, Sampling


@dataclasses.dataclass(eq=False)
class Run:
    """One sample of one request, waiting or in a slot."""

    number: int
    """Of the request, as `Engine.submit` gave it."""
    sample: int
    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)
    logps: list[float] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    routing: bytes | None = None
    leader: Slot | None = None
    """The slot that prefills the same prompt; its cache is copied when it has finished."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens that must be cached before decoding: all but the last, which decoding feeds."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.request.max_tokens - len(self.tokens)

    def completion(self, stop: str) -> Completion:
        """Its tokens so far as a completion that ended by `stop`."""
        return Completion(self.tokens, self.logps, stop, self.top, self.routing)

    @property
    def next_input(self) -> int:
        """The token that decoding feeds next; its keys and values are not cached yet."""
        return self.tokens[-1] if self.tokens else int(self.request.prompt[-1])


@dataclasses.dataclass(eq=False)
class Slot:
    """A row of the cache."""

    run: Run | None = None
    held: list[int] = dataclasses.field(default_factory=list)
    """The tokens that are cached in the slot, of its run or of the last one."""
    kept: int | None = None
    """Number of the ended request for which it is kept (`Request.keep`)."""
    left_at: int = 0
    """When its last run left, on the pool's clock of runs that ended."""
    generation: int = 0
    """The engine's count of weights (`Pool.generation`) when its tokens began to be cached: others take none of an
    earlier one."""

    @property
    def taken(self) -> bool:
        """Whether it has a run, or is kept for one."""
        return self.run is not None or self.kept is not None

    @property
    def decoding(self) -> bool:
        """Whether it has a run, and the run's prompt is cached."""
        return self.run is not None and len(self.held) >= self.run.prefill_tokens

    def advance(
        self, tokens: list[int], logps: list[float], top: list[list[tuple[int, float]]], live: bool
    ) -> str | None:
        """Adds a run of decoding (one row of it) to its run; why the completion has ended, or None."""
        run = self.run
        assert run is not None
        # The newest token is not cached: the next step feeds it.
        self.held.append(run.next_input)
        self.held += tokens[:-1]
        run.tokens += tokens
        run.logps += logps
        run.top += top
        # Stop strings come after: the program ends a row by ids and length only, so a string may end it earlier.
        kept = run.request.find_stop(run.tokens) if run.request.find_stop and tokens else None
        if kept is not None:
            del run.tokens[kept:], run.logps[kept:], run.top[kept:]
            return "string"
        return None if live else ("eos" if run.tokens[-1] in run.request.stop_ids else "length")

    @property
    def prefilling(self) -> bool:
        """Whether it has a run, and must prefill the prompt itself."""
        return self.run is not None and self.run.leader is None and not self.decoding


SMALLEST_PREFIX = 16
"""Fewer common tokens than this are prefilled again rather than copied."""


def longest_prefix(slots: list[Slot], run: Run) -> tuple[Slot | None, int]:
    """The slot that holds the longest prefix of the tokens that `run` must have cached, and its length in tokens."""
    request = run.request
    wanted = np.asarray(request.prompt[:-1], np.int64)
    best, most = None, 0
    for slot in slots:
        count = min(len(slot.held), len(wanted))
        if count <= most:
            continue
        differ = np.asarray(slot.held[:count], np.int64) != wanted[:count]
        common = int(np.argmax(differ)) if differ.any() else count
        if common > most:
            best, most = slot, common
    # A complete prefix is always worth its copy: nothing is left to prefill.
    enough = most == len(request.prompt) - 1 or most >= SMALLEST_PREFIX
    return (best, most) if enough else (None, 0)


def fill_rows(rows: Rows[np.ndarray], at: list[int], slots: Sequence[Slot]) -> None:
    """Makes the rows `at` live, with the runs of slots that decode: column by column, as there are a thousand rows."""
    if not at:
        return
    runs = [slot.run for slot in slots if slot.run is not None]
    rows.token_R[at] = [run.next_input for run in runs]
    rows.length_R[at] = [len(slot.held) for slot in slots]
    rows.made_R[at] = [len(run.tokens) for run in runs]
    rows.live_R[at] = True
    rows.left_R[at] = [run.request.max_tokens for run in runs]
    rows.left_R[at] -= rows.made_R[at]
    rows.origin_R3[at] = [(run.request.seed & 0xFFFFFFFF, run.request.counter, run.sample) for run in runs]
    # Requests of a round share their stop ids and settings.
    numbers: dict[tuple[tuple[int, ...], Sampling], int] = {}
    kind = [numbers.setdefault((run.request.stop_ids, run.request.sampling), len(numbers)) for run in runs]
    stops = np.full((len(numbers), rows.stops_RE.shape[1]), -1, np.int32)
    for i, (ids, _) in enumerate(numbers):
        stops[i, : len(ids)] = ids
    rows.stops_RE[at] = stops[kind]
    for name, column in rows.controls._asdict().items():
        column[at] = np.asarray([getattr(sampling, name[:-2]) for _, sampling in numbers])[kind]


def row_arrays(slots: list[Slot], capacity: int, steps: int) -> Rows[np.ndarray]:
    """The rows of `programs.decode`, one for each slot.

    Rows of free slots, and of slots that still prefill, are not live.
    """
    rows, live = blank_rows(len(slots)), []
    for i, slot in enumerate(slots):
        if slot.decoding:
            live.append(i)
            continue
        # Decoding writes `steps` tokens after those of every slot, live or not. If there is no room for them,
        # it overwrites the last ones, which then count as held no longer.
        del slot.held[max(0, capacity - steps) :]
        rows.length_R[i] = len(slot.held)
    fill_rows(rows, live, [slots[i] for i in live])
    return rows


def pack(slots: list[Slot], size: int) -> tuple[Chunk[np.ndarray], list[tuple[int, int]], Prefixed]:
    """A chunk of at most `size` tokens of the prompts that slots still need.

    Returns the chunk for `programs.prefill`, (slot, tokens) for each piece, and which pieces continue tokens that their
    slots hold. A chunk of 12, with slots 4 and 6 at their prompts' tokens 3 and 5, then slot 0 at its first:

        tokens_C     d e f g   u v w   x y z   . .
        positions_C  3 4 5 6   5 6 7   0 1 2   0 0
        group_C      1 1 1 1   2 2 2   3 3 3   0 0    0 is padding; a token sees its own group only
        start_C      0 0 0 0   4 4 4   7 7 7   0 0
        slot_C       4 4 4 4   6 6 6   0 0 0   0 0
        entries      (slot 4, start 0, at 3, 4 tokens) (slot 6, start 4, at 5, 3) (slot 0, start 7, at 0, 3)
    """
    prefilling = [i for i, s in enumerate(slots) if s.prefilling]
    begun = [i for i in prefilling if slots[i].held]
    order = begun + [i for i in prefilling if not slots[i].held]
    tokens, positions, group, starts, slot = (np.zeros(size, np.int32) for _ in range(5))
    entries: list[tuple[int, int, int, int]] = []
    pieces: list[tuple[int, int]] = []
    start = 0
    for i in order:
        run, at = slots[i].run, len(slots[i].held)
        assert run is not None
        left = run.prefill_tokens - at
        count = min(left, size - start)
        if count <= 0:
            break
        if start and count < left <= size:
            # It fits the next chunk in one piece.
            continue
        here = slice(start, start + count)
        tokens[here] = run.request.prompt[at : at + count]
        positions[here] = np.arange(at, at + count)
        group[here], starts[here], slot[here] = len(pieces) + 1, start, i
        entries += [(i, start + n, at + n, min(WINDOW, count - n)) for n in range(0, count, WINDOW)]
        pieces.append((i, count))
        start += count
    # A piece has at most one entry that is not a full window, so this many entries always suffice: the shape is fixed.
    table = np.zeros((4, len(slots) + size // WINDOW), np.int32)
    table[:, : len(entries)] = np.asarray(entries, np.int32).reshape(-1, 4).T
    slot_I, start_I, at_I, tokens_I = table
    columns = Entries(slot_I, start_I, at_I, tokens_I, used=np.asarray(len(entries), np.int32))
    going_on = sum(i in begun for i, _ in pieces)
    prefixed: Prefixed = "many" if going_on > 1 else "one" if going_on else "none"
    return Chunk(tokens, positions, group, starts, slot, columns), pieces, prefixed
