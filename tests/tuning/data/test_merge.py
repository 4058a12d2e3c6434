"""Merging holds a shard for each thread and some bytes a record; contents that leave are found exactly."""

import hashlib
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from rlhf.tuning.data import merge
from rlhf.tuning.data.gather import Pieces
from rlhf.tuning.data.near_duplicates import PERMUTATIONS
from rlhf.tuning.data.schema import LEDGER, ORDER, SCHEMAS, ipc_bytes, table_of
from tests.tuning.data.run import NONE

ROWS = 2000


def put(folder, output, shard, table):
    path = folder / output / str(shard) / "0.arrow"
    path.parent.mkdir(parents=True)
    path.write_bytes(ipc_bytes(table.drop_columns(["shard"])))


def ledger(folder, shards):
    """Ledgers of shards with `ROWS` records each; the signature of every tenth is that of the record before."""
    rng = np.random.default_rng(0)
    for shard in range(shards):
        lines = []
        for number in range(shard * ROWS, (shard + 1) * ROWS):
            if number % 10 != 9:
                signature = rng.integers(0, 2**32, PERMUTATIONS, dtype=np.uint32).tobytes()
            hashes = rng.integers(0, 2**60, 5).tolist()
            lines.append(
                {"id": f"r{number}", "group": f"g{number}", "fate": "", "heldout": number % 50 == 0, "rows": ["sft"]}
                | {"dropped": [], "id_hash": hashes[0], "prompt_hashes": hashes[1:], "signature": signature}
                | {"key": hashlib.sha256(str(number).encode()).hexdigest(), "position": number, "shard": shard}
            )
        put(folder, "ledger", shard, table_of(lines, LEDGER))
    return Pieces(folder, shards, str(folder), {})


def test_memory_grows_by_some_bytes_a_record(tmp_path):
    found = {}
    for shards in (2, 6):
        pieces = ledger(tmp_path / str(shards), shards)
        for threshold, dropped in ((None, 0), (0.8, shards * ROWS // 10)):
            tracemalloc.start()
            fates = merge.fates(pieces, threshold)
            found[shards, threshold] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert (fates.kept, len(fates.gone), fates.fault) == (shards * ROWS - dropped, dropped, None)
    for threshold, most in ((None, 180), (0.8, 350)):
        assert (found[6, threshold] - found[2, threshold]) / (4 * ROWS) < most, found


def test_contents_that_leave_are_found_whatever_their_digits():
    edges = ["00" * 32, "00" * 31 + "01", "ff" * 31 + "00", "ff" * 32, "0f" * 32, "f0" * 32, "0f" * 31 + "0e"]
    gone = np.sort(np.array(edges[::2], "S64"))
    chunks = pa.chunked_array([pa.array(edges[:3]), pa.array([], pa.string()), pa.array(edges[3:])])
    assert merge.among(chunks, gone).tolist() == [text in edges[::2] for text in edges]
    assert merge.among(chunks, NONE).tolist() == [False] * len(edges)


def test_a_shard_is_sorted_with_one_copy_of_it(tmp_path):
    """Next to the rows as they are read, and those that are written."""
    count = 50_000
    rng = np.random.default_rng(0)
    columns = {**SCHEMAS["sft"], **ORDER}
    values = {name: pa.nulls(count, kind) for name, kind in columns.items()}
    text = [hashlib.sha256(str(i).encode()).hexdigest() for i in rng.permutation(count)]
    values |= dict.fromkeys(("id", "key", "content", "group", "prompt", "completion"), pa.array(text))
    values |= {"position": pa.array(np.arange(count)), "shard": pa.array(np.zeros(count, np.int32))}
    values |= {"prompt_ids": pa.array(list(rng.integers(0, 99, (count, 40), np.int32)), columns["prompt_ids"])}
    table = pa.table(values, schema=pa.schema(list(columns.items())))
    put(tmp_path, "sft", 0, table)
    size, before = table.nbytes, pa.default_memory_pool()
    del table, values
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        # No buffer may outlive its pool.
        found = merge.merged(Pieces(tmp_path, 1, str(tmp_path), {}), "sft", 0, NONE)["id"].to_pylist()
    finally:
        pa.set_memory_pool(before)
    assert found == sorted(text) and pool.max_memory() < 2.7 * size


def test_a_shard_with_more_text_than_a_column_holds_is_named():
    count, length = 300, 10_000_000
    columns = {**SCHEMAS["prompts"], **ORDER}
    data = pa.py_buffer(b"x" * length)
    # All texts lie at one place: 3 GB that take 10 MB.
    text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(np.array([0, length], np.int32)), data])
    values = {name: pa.nulls(count, kind) for name, kind in columns.items()}
    values |= dict.fromkeys(("id", "key"), pa.array([f"{number:03d}" for number in range(count)]))
    values |= {"position": pa.array(np.arange(count)), "prompt": pa.chunked_array([text] * count)}
    table = pa.table(values, schema=pa.schema(list(columns.items())))
    with pytest.raises(ValueError, match=r"prompts, shard 7: .*raise data.shards"):
        merge.sort_rows(table, "prompts", 7)
    assert merge.sort_rows(table[:3], "prompts", 7).num_rows == 3
