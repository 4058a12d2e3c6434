"""Rows of all blocks by shard: each is there once, and damaged pieces are named and computed again."""

import hashlib
import json
import os
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest

from rlhf.tuning.data import gather
from rlhf.tuning.data.receipts import read_receipts, write_receipt
from rlhf.tuning.data.remote import SourceError
from rlhf.tuning.data.schema import LEDGER, ipc_bytes, table_of


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
