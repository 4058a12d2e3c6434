"""Final files from the pieces of all blocks: duplicates are removed, fates are counted, shards are sorted.

    pieces of shard 0   pieces of shard 1   pieces of shard 2       of all blocks (`rlhf.tuning.data.gather`)
             |                   |                   |
          part 0              part 1              part 2            each merged alone

Work proceeds shard by shard, on Arrow columns. Equal records and equal rows have equal keys, and a key determines its
shard, so duplicates meet in one shard. What is compared over all shards is on disk, in buckets by its hash. So memory
holds a shard for each thread and a bucket; where near duplicates are looked for 16 bytes a record too, and 32 of each
that leaves.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf.tuning.data.buckets import HASH_BITS, Buckets
from rlhf.tuning.data.digests import Digests
from rlhf.tuning.data.gather import Blocks, file_of, files_of, gather, schema_of, tables
from rlhf.tuning.data.near_duplicates import PERMUTATIONS, band_keys, bands_of, near_duplicates
from rlhf.tuning.data.schema import DEAD, SCHEMAS, ipc_table, table_of, write_parquet

BAND_BYTES = 1 << 27
"""Of keys of bands that are held until they are written."""
COLUMN_BYTES = 1 << 31
"""Which an array of texts has fewer of."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of finished blocks, by shard in a local folder."""

    folder: Path
    shards: int
    source: str
    """Folder or URL of the blocks' files."""
    blocks: Blocks

    def read(self, output: str, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of a shard of `output` or of the ledger, in no particular order."""
        path = file_of(self.folder, output, shard)
        table = ipc_table(path) if path.is_file() else table_of([], schema_of(output))
        return table.select(list(columns)) if columns is not None else table

    def dead(self) -> Iterator[pa.Table]:
        """The dead letters of all blocks."""
        for table in tables(self.source, files_of(self.blocks, "dead")):
            yield table.select(list(DEAD))


def gathered(folder: str, blocks: Blocks, shards: int, into: Path, threads: int = 1, rows: bool = True) -> Pieces:
    """The pieces of blocks, brought together by shard in `into`; arguments and errors as of `gather`."""
    gather(folder, blocks, shards, into, threads, rows)
    return Pieces(into, shards, folder, blocks)


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
    """The same of each source; equal prompts of several records count each."""
    dropped_rows: Counter[str] = dataclasses.field(default_factory=Counter)
    """Dropped rows by output:reason."""
    gone: Digests | None = None
    """Contents of near duplicates; their rows are left out."""
    drawn: int = 0
    """Records whose side is drawn by their group."""
    crowd: tuple[str, int] | None = None
    """The largest of their default groups, and its records."""
    clash: str | None = None
    """An error message where ids or groups contradict each other, else None."""


def unique(table: pa.Table) -> tuple[pa.Table, np.ndarray]:
    """One row for each key, the first in the sources, sorted by key; and the number of rows that had the key.

    In the ledger it is the first line among those with the most rows: sources may weight one record differently.
    """
    at, copies = _firsts(table)
    return table.take(at), copies


def _firsts(table: pa.Table) -> tuple[pa.Array, np.ndarray]:
    """Places of the rows of `unique`, and its numbers; only what decides them is moved."""
    order = [("key", "ascending"), ("position", "ascending")]
    narrow = table.select(["key", "position"])
    if "rows" in table.column_names:
        narrow = narrow.append_column("count", pc.list_value_length(table["rows"]))
        order.insert(1, ("count", "descending"))
    at = pc.sort_indices(narrow, order)
    keys = narrow["key"].combine_chunks().take(at)
    changes = pc.not_equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False) if len(keys) > 1 else np.zeros(0, bool)
    # Sorted by key: a group begins where the key changes.
    first = np.concatenate([[True], changes]) if len(keys) else np.zeros(0, bool)
    starts = np.flatnonzero(first)
    return at.filter(pa.array(first)), np.diff(np.append(starts, len(first)))


def fates(pieces: Pieces, threshold: float | None = None, starts: Sequence[int] = (0,)) -> Fates:
    """Counts the ledger. With a threshold, near duplicates of at least that similarity are dropped first.

    starts: the place of the first record of each source, among those of all.
    """
    total = Fates(by_source=[Counter() for _ in starts])
    if threshold is not None:
        total.gone = _similar(pieces, threshold)
    ids, defaults = (Buckets(pieces.folder / f"hashes-{name}") for name in ("ids", "defaults"))
    groups = Buckets(pieces.folder / "hashes-groups", heldout=bool)
    for shard in range(pieces.shards):
        ledger, copies = unique(pieces.read("ledger", shard))
        near = None if total.gone is None else pa.array(total.gone.holds(ledger["key"]))
        if near is not None:
            ledger = ledger.set_column(
                ledger.schema.get_field_index("fate"), "fate", pc.if_else(near, "near_duplicate", ledger["fate"])
            )
        kept = pc.equal(ledger["fate"], "").to_numpy()
        total.kept += int(kept.sum())
        # Copies of dropped records count as dropped, not as duplicates.
        total.duplicates += int((copies[kept] - 1).sum())
        for reason, count in zip(ledger["fate"].to_pylist(), copies.tolist(), strict=True) if not kept.all() else ():
            if reason:
                total.dropped[reason] += count
        mask = pa.array(kept)
        of = np.searchsorted(starts, ledger["position"].to_numpy(), "right") - 1
        for source, rows in enumerate(total.by_source):
            rows.update(_counted(ledger["rows"].filter(pa.array(kept & (of == source)))))
        near_rows = pa.array(np.ones(len(ledger), bool)) if near is None else pc.invert(near)
        total.dropped_rows.update(_counted(ledger["dropped"].filter(near_rows)))
        live = ledger.filter(mask)
        # Hashes instead of texts; `_clash` reads texts again only where hashes repeat.
        named = live.filter(pc.is_valid(live["group_hash"]))
        # Also where no section reads the side that it was drawn for.
        drawn = ledger.filter(pc.is_in(ledger["fate"], value_set=pa.array(["", "no_split_wants_it"])))
        drawn = drawn.filter(pc.is_valid(drawn["drawn_hash"]))
        total.drawn += len(drawn)
        defaults.add(_uint64(drawn.filter(pc.is_null(drawn["group_hash"]))["drawn_hash"]))
        ids.add(_uint64(ledger["id_hash"]))
        groups.add(_uint64(named["group_hash"]), heldout=named["heldout"].to_numpy())
    total.rows = sum(total.by_source, Counter())
    group, size = _most_frequent(defaults)
    if size:
        largest = pa.scalar(group, pa.uint64())
        ledgers = (pieces.read("ledger", shard, ["group", "drawn_hash"]) for shard in range(pieces.shards))
        names = (name for table in ledgers for name in table.filter(pc.equal(table["drawn_hash"], largest))["group"])
        total.crowd = next(names).as_py(), size
    total.clash = _clash(pieces, ids, groups)
    return total


def _most_frequent(hashes: Buckets) -> tuple[int, int]:
    """The hash that most rows have, the smallest of several, and the number of these rows; 0 where there are none."""
    best = 0, 0
    for rows in hashes:
        values, sizes = np.unique(rows["hash"], return_counts=True)
        if len(values) and sizes.max() > best[1]:
            best = int(values[sizes.argmax()]), int(sizes.max())
    return best


def _uint64(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(pc.fill_null(column, 0).to_numpy(), np.uint64)


def _counted(lists: pa.ChunkedArray) -> dict[str, int]:
    counts = pc.value_counts(pc.list_flatten(lists)).to_pylist()
    return {entry["values"]: entry["counts"] for entry in counts}


def _similar(pieces: Pieces, threshold: float) -> Digests:
    """Contents to leave out. Among similar records a held-out one stays, else the first in the sources.

    Signatures are on disk, and mapped; keys of bands are there in buckets.
    """
    count = bands_of(threshold)[0]
    paths = [pieces.folder / f"band-{band:03d}" for band in range(count)]
    bands = [Buckets(path, BAND_BYTES // count, number=np.uint32) for path in paths]
    ranks, ends = [np.zeros(0, np.int64)], [0]
    with (pieces.folder / "signatures").open("wb") as of_signatures:
        for shard in range(pieces.shards):
            live = _live(pieces, shard, ["heldout", "signature"])
            data = b"".join(live["signature"].to_pylist())
            of_signatures.write(data)
            numbers = np.arange(ends[-1], ends[-1] + len(live))
            signatures = np.frombuffer(data, np.uint32).reshape(len(live), PERMUTATIONS)
            for band, keys in zip(bands, band_keys(signatures, threshold), strict=True):
                # The highest bits of a product are mixed best, and a bucket is known by those of the hash.
                band.add(keys * _ODD >> np.uint64(64 - HASH_BITS), number=numbers)
            # The smallest rank stays: every held-out record ranks before every other.
            ranks.append(live["position"].to_numpy() + np.where(live["heldout"].to_numpy(), 0, 1 << 62))
            ends.append(ends[-1] + len(live))
    if not ends[-1]:
        # An empty file cannot be mapped.
        return Digests.of([])
    mapped = np.memmap(pieces.folder / "signatures", np.uint32, "r", shape=(ends[-1], PERMUTATIONS))
    found = ((rows["hash"], rows["number"]) for band in bands for rows in band)
    gone = near_duplicates(mapped, np.concatenate(ranks), threshold, found)
    parts = []
    for shard, (start, stop) in enumerate(itertools.pairwise(ends)):
        # Read again: the digests of all records would be most of the memory.
        own = gone[np.searchsorted(gone, start) : np.searchsorted(gone, stop)] - start
        if len(own):
            parts.append(_live(pieces, shard, [])["key"].combine_chunks().take(pa.array(own)))
    return Digests.of(parts)


def _live(pieces: Pieces, shard: int, more: Sequence[str]) -> pa.Table:
    """Lines of a shard's distinct records that are not dropped, sorted by key."""
    lines, _ = unique(pieces.read("ledger", shard, ["key", "position", "fate", "rows", *more]))
    return lines.filter(pc.equal(lines["fate"], ""))


def _clash(pieces: Pieces, ids: Buckets, groups: Buckets) -> str | None:
    """The message for two records with one id, or for a group that is both held out and trained; None if neither.

    Hashes are compared first, then the texts behind equal hashes.
    """
    # Of 60-bit hashes hardly any repeats by chance, so a few candidates suffice to report one.
    for hash64 in itertools.islice((value for rows in ids for value in _repeated(rows["hash"])), 8):
        names = [n for n, _ in _lines(pieces, "id", hash64)]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            return (
                f"two different records have the id {twice[0]!r}: make ids unique, or leave `id` out to use the digest "
                "of the content"
            )
    both = (value for rows in groups for value in _on_both_sides(rows))
    for hash64 in itertools.islice(both, 8):
        lines = list(_lines(pieces, "group", hash64))
        sides: dict[str, set[bool]] = {}
        for name, line in lines:
            if not line["fate"]:
                sides.setdefault(name, set()).add(line["heldout"])
        for name, seen in sides.items():
            if len(seen) == 2:
                one = next(line["id"] for n, line in lines if n == name)
                return (
                    f"group {name!r} is both held out and used for training, since its records name different splits "
                    f"(one is {one!r}): give all of them the same side"
                )
    return None


def _on_both_sides(rows: np.ndarray) -> np.ndarray:
    """Hashes of rows that are held out and of rows that are not, sorted."""
    return np.intersect1d(rows["hash"][rows["heldout"]], rows["hash"][~rows["heldout"]])


def _repeated(values: np.ndarray) -> np.ndarray:
    ordered = np.sort(values)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def _lines(pieces: Pieces, name: str, hash64: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ledger lines of distinct records whose id or group has this hash."""
    for shard in range(pieces.shards):
        ledger, _ = unique(pieces.read("ledger", shard))
        matching = ledger.filter(pc.equal(ledger[f"{name}_hash"], pa.scalar(int(hash64), pa.uint64())))
        for line in matching.to_pylist():
            yield line[name], line


def merged(pieces: Pieces, output: str, shard: int, gone: Digests | None = None, seed: int | None = None) -> pa.Table:
    """One final shard of an output: `ordered` rows, without those of the contents in `gone`."""
    return ordered(without(pieces.read(output, shard), gone), output, shard, seed)


def without(table: pa.Table, gone: Digests | None) -> pa.Table:
    """The rows whose contents are not in `gone`."""
    if gone is None or not len(gone):
        return table
    return table.filter(pa.array(~gone.holds(table["content"])))


def ordered(table: pa.Table, output: str, shard: int, seed: int | None = None) -> pa.Table:
    """Of all rows of a shard for each key the first in the sources, sorted by id; with a seed shuffled by it instead.

    The order of the rows in `table` changes nothing. Raises ValueError where they are more than Arrow sorts at a time.
    """
    try:
        return table.select(list(SCHEMAS[output])).take(_order(table, shard, seed))
    except pa.ArrowInvalid as error:
        largest = max(table.column_names, key=lambda name: table[name].nbytes)
        if (size := table[largest].nbytes) < COLUMN_BYTES:
            raise
        raise ValueError(
            f"{output}, shard {shard}: its column {largest} has {size / 2**30:.1f} GiB, and Arrow sorts 2 GiB of texts "
            "at a time: raise data.shards, so that a shard has fewer rows"
        ) from error


def _order(table: pa.Table, shard: int, seed: int | None) -> pa.Array:
    """Places of the rows of `ordered`."""
    at, _ = _firsts(table)
    if seed is not None:
        rng = np.random.Generator(np.random.PCG64([abs(seed), shard]))
        # Sorted by key, so the shuffled order depends on content and seed alone.
        return at.take(pa.array(rng.permutation(len(at))))
    ids = table.select(["id", "position"]).take(at)
    return at.take(pc.sort_indices(ids, [("id", "ascending"), ("position", "ascending")]))


def write_output(
    pieces: Pieces, output: str, shard: int, path: Path, gone: Digests | None = None, seed: int | None = None
) -> int:
    """Write one final shard, the result of `merged`; returns its number of rows."""
    return write_parquet(path, [merged(pieces, output, shard, gone, seed)], SCHEMAS[output])


def leaks(pieces: Pieces, found: Fates) -> bool:
    """Whether a hash of some prompt, of its text or its tokens, is both held out and in training data.

    The prompts behind the hashes are not compared.
    """
    prompts = Buckets(pieces.folder / "hashes-prompts", heldout=bool)
    for shard in range(pieces.shards):
        live = _live(pieces, shard, ["heldout", "prompt_hashes"])
        if found.gone is not None:
            live = live.filter(pa.array(~found.gone.holds(live["key"])))
        hashes, lines = (pc.list_flatten(live["prompt_hashes"]), pc.list_parent_indices(live["prompt_hashes"]))
        prompts.add(_uint64(hashes), heldout=live["heldout"].take(lines).to_numpy())
    return any(len(_on_both_sides(rows)) for rows in prompts)
