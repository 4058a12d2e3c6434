"""Final files from the pieces of all blocks: duplicates are removed, fates are counted, shards are sorted.

    pieces of shard 0   pieces of shard 1   pieces of shard 2       of all blocks (`rlhf.tuning.data.gather`)
             |                   |                   |
          part 0              part 1              part 2            each merged alone

Work proceeds shard by shard, on Arrow columns. Equal records and equal rows have equal keys, and a key determines its
shard, so duplicates meet in one shard. Memory holds a shard for each thread, and some 150 bytes a record of hashes that
are compared over all shards; the search for near duplicates doubles that.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf.tuning.data.gather import Pieces
from rlhf.tuning.data.near_duplicates import PERMUTATIONS, near_duplicates
from rlhf.tuning.data.schema import SCHEMAS

CANDIDATES = 8
"""Equal hashes whose texts are compared; hardly any 60-bit hash repeats by chance."""


@dataclasses.dataclass
class Fates:
    """Counts of readable records by their fate."""

    kept: int = 0
    duplicates: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    """Records without a row by reason, copies included."""
    rows: Counter[str] = dataclasses.field(default_factory=Counter)
    """Planned rows by output."""
    by_source: list[Counter[str]] = dataclasses.field(default_factory=list)
    """Planned rows by output, of each source; equal prompts of several records count each."""
    dropped_rows: Counter[str] = dataclasses.field(default_factory=Counter)
    """Dropped rows by output:reason."""
    gone: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, "S64"))
    """Sorted contents of near duplicates; their rows are left out."""
    fault: str | None = None
    """An error message if ids, groups or prompts contradict each other, else None."""


def unique(table: pa.Table) -> tuple[pa.Table, np.ndarray]:
    """Return one row for each key, the first in the sources, sorted by key; and the number of rows that had the key.

    In the ledger it is the first line among those with the most rows: sources may weight one record differently.
    """
    at, copies = _firsts(table)
    return table.take(at), copies


def _firsts(table: pa.Table) -> tuple[pa.Array, np.ndarray]:
    """Return the indices of the rows of `unique`, and its counts."""
    order = [("key", "ascending"), ("position", "ascending")]
    # Texts of all columns would double the memory.
    narrow = table.select(["key", "position"])
    if "rows" in table.column_names:
        narrow = narrow.append_column("count", pc.list_value_length(table["rows"]))
        order.insert(1, ("count", "descending"))
    at = pc.sort_indices(narrow, order)
    keys = narrow["key"].combine_chunks().take(at)
    first = np.ones(len(keys), bool)
    if len(keys):
        first[1:] = pc.not_equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    return at.filter(pa.array(first)), np.diff(np.append(np.flatnonzero(first), len(first)))


def fates(pieces: Pieces, threshold: float | None = None, starts: Sequence[int] = (0,)) -> Fates:
    """Count the ledger. With a threshold, drop near duplicates of at least that similarity first.

    starts: the position of the first record of each source, among those of all.
    """
    total = Fates(by_source=[Counter() for _ in starts])
    if threshold is not None:
        total.gone = _similar(pieces, threshold)
    ids, groups, prompts = _Hashes(), _Hashes(), _Hashes()
    for shard in range(pieces.shards):
        ledger, copies = unique(pieces.read("ledger", shard))
        near = among(ledger["key"], total.gone)
        fate = np.where(near, "near_duplicate", ledger["fate"].to_numpy())
        kept, heldout = fate == "", ledger["heldout"].to_numpy()
        total.kept += int(kept.sum())
        # Copies of dropped records count as dropped, not as duplicates.
        total.duplicates += int((copies[kept] - 1).sum())
        for reason, count in zip(fate[~kept], copies[~kept].tolist(), strict=True):
            total.dropped[reason] += count
        source = np.searchsorted(starts, ledger["position"].to_numpy(), "right") - 1
        for number, rows in enumerate(total.by_source):
            rows.update(_counts(ledger["rows"].filter(pa.array(kept & (source == number)))))
        total.dropped_rows.update(_counts(ledger["dropped"].filter(pa.array(~near))))
        ids.add(ledger["id_hash"], heldout)
        live = ledger.filter(pa.array(kept))
        named = live.filter(pc.is_valid(live["group_hash"]))
        groups.add(named["group_hash"], named["heldout"].to_numpy())
        lines = pc.list_parent_indices(live["prompt_hashes"])
        prompts.add(pc.list_flatten(live["prompt_hashes"]), live["heldout"].take(lines).to_numpy())
    total.rows = sum(total.by_source, Counter())
    total.fault = _fault(pieces, total.gone, ids, groups, prompts)
    return total


def _counts(lists: pa.ChunkedArray) -> dict[str, int]:
    counts = pc.value_counts(pc.list_flatten(lists)).to_pylist()
    return {entry["values"]: entry["counts"] for entry in counts}


class _Hashes:
    """Hashes of held-out and of other records of all shards."""

    def __init__(self) -> None:
        self._sides: dict[bool, list[np.ndarray]] = {side: [np.zeros(0, np.uint64)] for side in (False, True)}

    def add(self, hashes: pa.ChunkedArray, heldout_N: np.ndarray) -> None:
        for side, parts in self._sides.items():
            parts.append(hashes.to_numpy()[heldout_N == side])

    def repeated(self) -> np.ndarray:
        """Return the first hashes that several records have."""
        values = np.sort(np.concatenate([*self._sides[False], *self._sides[True]]))
        return np.unique(values[1:][values[1:] == values[:-1]])[:CANDIDATES]

    def on_both_sides(self) -> np.ndarray:
        """Return the first hashes that held-out and other records have."""
        return np.intersect1d(np.concatenate(self._sides[False]), np.concatenate(self._sides[True]))[:CANDIDATES]


def _fault(pieces: Pieces, gone: np.ndarray, ids: _Hashes, groups: _Hashes, prompts: _Hashes) -> str | None:
    """Return the error message for an id of two records, or for a group or prompt that is both held out and trained.

    Prompts are compared by the hashes of their texts, tokens and turns (`rlhf.tuning.data.pipeline`).
    """
    names = Counter(line["id"] for line in _lines(pieces, "id_hash", ids.repeated()))
    if twice := [name for name, count in names.items() if count > 1]:
        return (
            f"two different records have the id {twice[0]!r}: make ids unique, or leave `id` out to use the digest of "
            "the content"
        )
    sides: dict[str, dict[bool, str]] = {}
    for line in _lines(pieces, "group_hash", groups.on_both_sides(), gone):
        sides.setdefault(line["group"], {})[line["heldout"]] = line["id"]
    for group, records in sides.items():
        if len(records) == 2:
            return (
                f"group {group!r} is both held out and used for training, since its records name different splits "
                f"(one is {records[True]!r}): give all of them the same side"
            )
    shared = prompts.on_both_sides()[:1]
    both = {line["heldout"]: line for line in _lines(pieces, "prompt_hashes", shared, gone)}
    if not both:
        return None
    heldout, trained = (f"number {both[side]['position'] + 1} (id {both[side]['id']!r})" for side in (True, False))
    return (
        f"record {heldout} of the sources is held out, and record {trained} is for training and has the same prompt. "
        "Give records of one prompt the same `group`, or name their `split`; if only system turns tell them apart, "
        "name the `group` of each"
    )


def _lines(pieces: Pieces, column: str, hashes: np.ndarray, gone: np.ndarray | None = None) -> Iterator[dict[str, Any]]:
    """Yield the ledger lines of distinct records with any of the hashes; with `gone`, those of kept records alone."""
    for shard in range(pieces.shards) if len(hashes) else ():
        ledger, _ = unique(pieces.read("ledger", shard))
        if gone is not None:
            ledger = ledger.filter(pa.array((ledger["fate"].to_numpy() == "") & ~among(ledger["key"], gone)))
        values = ledger[column]
        lines = pc.list_parent_indices(values) if pa.types.is_list(values.type) else pa.array(range(len(ledger)))
        flat = pc.list_flatten(values) if pa.types.is_list(values.type) else values
        found = pc.is_in(flat, value_set=pa.array(hashes))
        yield from ledger.take(lines.filter(found)).to_pylist()


def _similar(pieces: Pieces, threshold: float) -> np.ndarray:
    """Return the sorted contents to leave out. Among similar records a held-out one stays, else the first one.

    Signatures are in a mapped file.
    """
    contents, ranks = [np.zeros(0, "S64")], [np.zeros(0, np.int64)]
    with (pieces.folder / "signatures").open("wb") as file:
        for shard in range(pieces.shards):
            columns = ["key", "position", "fate", "rows", "heldout", "signature"]
            lines, _ = unique(pieces.read("ledger", shard, columns))
            live = lines.filter(pc.equal(lines["fate"], ""))
            file.writelines(live["signature"].to_pylist())
            contents.append(live["key"].to_numpy().astype("S64"))
            # The smallest rank stays: every held-out record ranks before every other.
            ranks.append(live["position"].to_numpy() + np.where(live["heldout"].to_numpy(), 0, 1 << 62))
    content_N, rank_N = np.concatenate(contents), np.concatenate(ranks)
    if not len(rank_N):
        # An empty file cannot be mapped.
        return content_N
    signatures = np.memmap(pieces.folder / "signatures", np.uint32, "r", shape=(len(rank_N), PERMUTATIONS))
    return np.sort(content_N[near_duplicates(signatures, rank_N, threshold)])


def among(contents: pa.ChunkedArray, gone: np.ndarray) -> np.ndarray:
    """Return [N] bool: which contents are in `gone`, which is sorted."""
    if not len(gone):
        return np.zeros(len(contents), bool)
    wanted = contents.to_numpy().astype("S64")
    at = np.searchsorted(gone, wanted)
    return np.asarray(gone[np.minimum(at, len(gone) - 1)] == wanted)


def merged(pieces: Pieces, output: str, shard: int, gone: np.ndarray) -> pa.Table:
    """Return one final shard of an output: `sort_rows` of the rows whose contents are not in `gone`."""
    table = pieces.read(output, shard)
    return sort_rows(table.filter(pa.array(~among(table["content"], gone))) if len(gone) else table, output, shard)


def sort_rows(table: pa.Table, output: str, shard: int) -> pa.Table:
    """Return for each key the first row in the sources, sorted by id.

    Raises ValueError if Arrow cannot sort the rows, such as 2 GiB of texts in a column.
    """
    try:
        at, _ = _firsts(table)
        ids = table.select(["id", "position"]).take(at)
        at = at.take(pc.sort_indices(ids, [("id", "ascending"), ("position", "ascending")]))
        return table.select(list(SCHEMAS[output])).take(at)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{output}, shard {shard}: {error}; raise data.shards to have smaller ones") from error
