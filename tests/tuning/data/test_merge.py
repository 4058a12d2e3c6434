"""What merging holds at a time does not grow with the records: a shard for each thread, and a bucket of hashes."""

import hashlib
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from rlhf.tuning.data import buckets, merge
from rlhf.tuning.data.gather import file_of
from rlhf.tuning.data.near_duplicates import PERMUTATIONS
from rlhf.tuning.data.schema import LEDGER, ORDER, SCHEMAS, ipc_bytes, table_of

ROWS = 2000


def ledger(folder, shards, signatures=False):
    """Ledgers of shards of so many records each; of signatures every tenth is that of the record before."""
    rng = np.random.default_rng(0)
    for shard in range(shards):
        lines = []
        for number in range(shard * ROWS, (shard + 1) * ROWS):
            if number % 10 != 9:
                drawn = rng.integers(0, 2**32, PERMUTATIONS, dtype=np.uint32).tobytes()
            hashes = rng.integers(0, 2**60, 6).tolist()
            lines.append(
                {"id": f"r{number}", "group": f"g{number}", "fate": "", "heldout": number % 50 == 0, "rows": ["sft"]}
                | {"dropped": [], "id_hash": hashes[0], "group_hash": None, "drawn_hash": hashes[1]}
                | {"prompt_hashes": hashes[2:], "signature": drawn if signatures else None}
                | {"key": hashlib.sha256(str(number).encode()).hexdigest(), "position": number, "shard": shard}
            )
        path = file_of(folder, "ledger", shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(ipc_bytes(table_of(lines, LEDGER)))
    return merge.Pieces(folder, shards, str(folder), {})


def held(function):
    """The most bytes that NumPy and Python hold during a call, and its result."""
    tracemalloc.start()
    try:
        result = function()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_hashes_of_more_records_take_no_more_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "PENDING_BYTES", 1 << 16)
    found = {}
    for shards in (4, 16):
        pieces = ledger(tmp_path / str(shards), shards)

        def compared(pieces=pieces):
            fates = merge.fates(pieces)
            return fates.kept, fates.drawn, merge.leaks(pieces, fates)

        found[shards], result = held(compared)
        assert result == (shards * ROWS, shards * ROWS, False)
    assert found[16] < 1.3 * found[4], found


def test_near_duplicates_take_sixteen_bytes_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "BAND_BYTES", 1 << 16)
    found = {}
    for shards in (4, 16):
        pieces = ledger(tmp_path / str(shards), shards, signatures=True)
        found[shards], fates = held(lambda pieces=pieces: merge.fates(pieces, 0.8))
        assert fates.dropped == {"near_duplicate": shards * ROWS // 10} and len(fates.gone) == shards * ROWS // 10
    assert (found[16] - found[4]) / (12 * ROWS) < 40, found


def test_a_shard_is_sorted_with_one_copy_of_it(tmp_path):
    """Beside the rows as they are read, and those that are written."""
    count = 50_000
    rng = np.random.default_rng(0)
    columns = {**SCHEMAS["sft"], **ORDER}
    values = {name: pa.nulls(count, kind) for name, kind in columns.items()}
    text = [hashlib.sha256(str(i).encode()).hexdigest() for i in rng.permutation(count)]
    values |= dict.fromkeys(("id", "key", "content", "group", "prompt", "completion"), pa.array(text))
    values |= {"position": pa.array(np.arange(count)), "shard": pa.array(np.zeros(count, np.int32))}
    values |= {"prompt_ids": pa.array(list(rng.integers(0, 99, (count, 40), np.int32)), columns["prompt_ids"])}
    table = pa.table(values, schema=pa.schema(list(columns.items())))
    path = file_of(tmp_path, "sft", 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(ipc_bytes(table))
    size, before = table.nbytes, pa.default_memory_pool()
    del table, values
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        # No buffer may outlive its pool.
        found = merge.merged(merge.Pieces(tmp_path, 1, str(tmp_path), {}), "sft", 0)["id"].to_pylist()
    finally:
        pa.set_memory_pool(before)
    assert found == sorted(text) and pool.max_memory() < 2.5 * size


@pytest.mark.parametrize("seed", [None, 3])
def test_a_shard_without_rows_is_an_empty_table(tmp_path, seed):
    assert merge.merged(merge.Pieces(tmp_path, 1, str(tmp_path), {}), "sft", 0, seed=seed).num_rows == 0


def test_a_shard_with_more_text_than_a_column_holds_is_named(tmp_path):
    count, length = 300, 10_000_000
    columns = {**SCHEMAS["prompts"], **ORDER}
    data = pa.py_buffer(b"x" * length)
    # All texts lie at one place: 3 GB that take 10 MB.
    text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(np.array([0, length], np.int32)), data])
    values = {name: pa.nulls(count, kind) for name, kind in columns.items()}
    values |= dict.fromkeys(("id", "key"), pa.array([f"{number:03d}" for number in range(count)]))
    values |= {"position": pa.array(np.arange(count)), "prompt": pa.chunked_array([text] * count)}
    table = pa.table(values, schema=pa.schema(list(columns.items())))
    with pytest.raises(ValueError, match=r"prompts, shard 7: .*column prompt has 2.8 GiB.* 2 GiB.*raise data.shards"):
        merge.ordered(table, "prompts", 7)
    # Up to there it is sorted.
    assert merge.ordered(table[:3], "prompts", 7).num_rows == 3
