"""The host's book of an engine's slots: who sits where, and what each slot's cache still holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tuning.rollout.engine.cache import WINDOW
from tuning.rollout.requests import MAX_STOP_IDS, Request


@dataclasses.dataclass(eq=False)
class Run:
    """One sample of one request, waiting or in a slot."""

    number: int
    """Of the request, as `Engine.submit` gave it."""
    sample: int
    request: Request
    key: np.ndarray
    """Key data [2]."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logps: list[float] = dataclasses.field(default_factory=list)
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    leader: Slot | None = None
    """The slot that prefills the same prompt, whose cache is copied when it is done."""

    @property
    def prefilled(self) -> int:
        """Tokens to prefill: all but the prompt's last, which decoding feeds."""
        return len(self.request.prompt) - 1

    @property
    def left(self) -> int:
        """Tokens that it may still make."""
        return self.request.max_tokens - len(self.tokens)


@dataclasses.dataclass(eq=False)
class Slot:
    """A row of the cache."""

    run: Run | None = None
    held: list[int] = dataclasses.field(default_factory=list)
    """The tokens whose keys and values the slot holds, of its run or of the one that has left."""
    used: int = 0
    """When a run last left."""

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt is in the cache."""
        return self.run is not None and len(self.held) >= self.run.prefilled


SMALLEST_PREFIX = 16
"""Fewer common tokens than this are prefilled again rather than copied."""


def longest_prefix(slots: list[Slot], run: Run) -> tuple[Slot | None, int]:
    """The slot that holds most of what `run` needs from the beginning on, and how many tokens."""
    wanted = np.asarray(run.request.prompt[:-1], np.int64)
    best, most = None, 0
    for slot in slots:
        count = min(len(slot.held), len(wanted))
        if count <= most:
            continue
        differ = np.asarray(slot.held[:count], np.int64) != wanted[:count]
        common = int(np.argmax(differ)) if differ.any() else count
        if common > most:
            best, most = slot, common
    enough = most == len(wanted) or most >= SMALLEST_PREFIX
    return (best, most) if enough else (None, 0)


def row_arrays(slots: list[Slot], capacity: int, steps: int) -> dict[str, np.ndarray]:
    """What `programs.decode` is told about each slot."""
    count = len(slots)
    rows = {
        "token": np.zeros(count, np.int32),
        "length": np.zeros(count, np.int32),
        "left": np.zeros(count, np.int32),
        "made": np.zeros(count, np.int32),
        "live": np.zeros(count, bool),
        "key": np.zeros((count, 2), np.uint32),
        "stops": np.full((count, MAX_STOP_IDS), -1, np.int32),
        "temperature": np.ones(count, np.float32),
        "top_p": np.ones(count, np.float32),
        "top_k": np.zeros(count, np.int32),
        "min_p": np.zeros(count, np.float32),
        "repetition_penalty": np.ones(count, np.float32),
    }
    for i, slot in enumerate(slots):
        if not slot.decoding:
            # A run of steps writes behind every slot's tokens: what it writes over is no longer held.
            del slot.held[max(0, capacity - steps) :]
            rows["length"][i] = len(slot.held)
            continue
        run = slot.run
        assert run is not None
        rows["token"][i] = run.tokens[-1] if run.tokens else run.request.prompt[-1]
        rows["length"][i] = len(slot.held)
        rows["left"][i] = run.left
        rows["made"][i] = len(run.tokens)
        rows["live"][i] = True
        rows["key"][i] = run.key
        rows["stops"][i, : len(run.request.stop_ids)] = run.request.stop_ids
        for name, value in dataclasses.asdict(run.request.sampling).items():
            rows[name][i] = value
    return rows


def pack(slots: list[Slot], size: int) -> tuple[dict[str, Any], list[tuple[int, int]], bool]:
    """A chunk of at most `size` tokens of the prompts that slots still need.

    Gives the chunk for `programs.prefill`, (slot, tokens) for each piece, and whether the first piece goes on behind
    tokens that its slot holds. Only the first may.
    """
    open_slots = [i for i, s in enumerate(slots) if s.run and not s.decoding and s.run.leader is None]
    begun = [i for i in open_slots if slots[i].held]
    first = begun[:1]
    order = first + [i for i in open_slots if i not in begun]
    chunk = {name: np.zeros(size, np.int32) for name in ("tokens", "positions", "group")}
    entries: list[tuple[int, int, int, int]] = []
    pieces: list[tuple[int, int]] = []
    start = 0
    for i in order:
        run, at = slots[i].run, len(slots[i].held)
        assert run is not None
        count = min(run.prefilled - at, size - start)
        if count <= 0:
            break
        if start and count < run.prefilled - at <= size:
            # Whole in the next chunk, it needs no program that looks behind.
            continue
        here = slice(start, start + count)
        chunk["tokens"][here] = run.request.prompt[at : at + count]
        chunk["positions"][here] = np.arange(at, at + count)
        chunk["group"][here] = len(pieces) + 1
        entries += [(i, start + n, at + n, min(WINDOW, count - n)) for n in range(0, count, WINDOW)]
        pieces.append((i, count))
        start += count
    table = np.zeros((4, len(slots) + size // WINDOW), np.int32)
    table[:, : len(entries)] = np.asarray(entries, np.int32).reshape(-1, 4).T
    columns = dict(zip(("slot", "start", "at", "tokens"), table, strict=True)) | {"count": np.int32(len(entries))}
    whole = chunk | {"entries": columns, "prefix_slot": np.int32(first[0] if first else 0)}
    return whole, pieces, bool(first)
