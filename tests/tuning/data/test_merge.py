"""Merging holds a shard for each thread and some bytes a record; contents that leave are found exactly."""

import hashlib
import json
import os
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from rlhf.tuning.data import gather, merge
from rlhf.tuning.data.gather import Pieces
from rlhf.tuning.data.near_duplicates import PERMUTATIONS
from rlhf.tuning.data.receipts import read_receipts, write_receipt
from rlhf.tuning.data.remote import SourceError
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


def written(folder, count, shards, rows=40):
    """Files of `count` blocks whose rows have random shards; the positions of each shard."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    blocks, wanted = {}, {}
    for block in range(count):
        number = rng.integers(0, shards, rows).astype(np.int32)
        columns = {name: pa.nulls(rows, kind) for name, kind in LEDGER.items()}
        positions = np.arange(rows) + block * rows
        columns |= {"key": pa.array([str(p) for p in positions]), "position": pa.array(positions)}
        table = pa.table(columns | {"shard": pa.array(number)}, schema=pa.schema(list(LEDGER.items())))
        data, name = ipc_bytes(table), f"b{block:05d}"
        (folder / f"{name}.ledger.arrow").write_bytes(data)
        blocks[name] = {f"{name}.ledger.arrow": hashlib.sha256(data).hexdigest()}
        write_receipt(str(folder), name, {})
        for position, shard in zip(positions.tolist(), number.tolist(), strict=True):
            wanted.setdefault(shard, set()).add(position)
    return blocks, wanted


@pytest.mark.parametrize("shards", [1, 7, 100])
def test_each_row_is_once_in_its_shard_and_nothing_of_an_earlier_try(tmp_path, shards):
    blocks, wanted = written(tmp_path / "pieces", 30, shards)
    (tmp_path / "out" / "ledger" / "0").mkdir(parents=True)
    (tmp_path / "out" / "ledger" / "0" / "9.arrow").write_bytes(b"half")
    pieces = gather.gather(str(tmp_path / "pieces"), blocks, shards, tmp_path / "out")
    found = {shard: pieces.read("ledger", shard, ["position"])["position"].to_pylist() for shard in range(shards)}
    assert {shard: sorted(positions) for shard, positions in found.items() if positions} == {
        shard: sorted(positions) for shard, positions in wanted.items()
    }
    assert pieces.read("sft", 0).num_rows == 0
    # Files are those of shards, not of blocks and shards.
    assert len(list((tmp_path / "out").rglob("*.arrow"))) == len(wanted)


@pytest.mark.parametrize("below", ["", "local://"])
def test_a_damaged_piece_is_named_and_its_block_loses_its_receipt(tmp_path, below):
    blocks, _ = written(tmp_path / "pieces", 3, 2, rows=5)
    folder = f"{below}{tmp_path}/pieces"
    piece = tmp_path / "pieces" / "b00001.ledger.arrow"
    whole = piece.read_bytes()
    bits = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 199)]
    for content in (*bits, whole[:40], None):
        piece.unlink(missing_ok=True)
        if content is not None:
            piece.write_bytes(content)
        with pytest.raises(SourceError, match=r"b00001.ledger.arrow is (missing|damaged).*run again to recompute it"):
            list(gather.tables(folder, blocks, "ledger"))
        assert set(read_receipts(folder)) == {"b00000", "b00002"}
        write_receipt(folder, "b00001", {})
    piece.write_bytes(whole)
    assert len(list(gather.tables(folder, blocks, "ledger"))) == 3


def test_many_small_pieces_take_linear_time():
    """One that was looked at again with each later one took 20 s for 300, and an hour for 4,000."""
    piece = pa.schema(list(LEDGER.items())).empty_table()
    began = time.process_time()
    [joined] = gather._joined(piece for _ in range(400))
    assert time.process_time() - began < 2.0 and joined.num_rows == 0


PEAK = """
import json, resource, sys
from pathlib import Path
from rlhf.tuning.data import gather
folder, blocks = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
gather.gather(str(folder), blocks, 4, folder / "out")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_long_rows_are_not_held_in_memory(tmp_path):
    folder, blocks = tmp_path / "pieces", {}
    folder.mkdir()
    for block in range(40):
        rows = [{"shard": i % 4, "key": f"{block} {i}", "id": os.urandom(50_000).hex()} for i in range(100)]
        data, name = ipc_bytes(table_of(rows, LEDGER)), f"b{block:05d}.ledger.arrow"
        (folder / name).write_bytes(data)
        blocks[name.split(".")[0]] = {name: hashlib.sha256(data).hexdigest()}
    (tmp_path / "blocks.json").write_text(json.dumps(blocks))
    command = [sys.executable, "-c", PEAK, str(folder), str(tmp_path / "blocks.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Of 400 MB.
    assert int(done.stdout) / 1024 < 250
