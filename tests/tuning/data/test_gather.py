"""Rows of all blocks by shard: each is there once, whatever the numbers of shards and blocks, and files are few."""

import hashlib

import numpy as np
import pyarrow as pa
import pytest

from rlhf.tuning.data import gather
from rlhf.tuning.data.schema import LEDGER, ipc_bytes


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
        for position, shard in zip(positions.tolist(), number.tolist(), strict=True):
            wanted.setdefault(shard, set()).add(position)
    return blocks, wanted


def read(into, shards):
    found = {}
    for shard in range(shards):
        path = gather.file_of(into, "ledger", shard)
        if path.is_file():
            table = gather.ipc_table(path)
            assert set(table["shard"].to_pylist()) == {shard}
            positions = table["position"].to_pylist()
            assert len(set(positions)) == len(positions)
            found[shard] = set(positions)
    return found


@pytest.mark.parametrize("shards", [1, 7, 64, 65, 100, 4097])
def test_each_row_is_once_in_the_file_of_its_shard(tmp_path, shards):
    blocks, wanted = written(tmp_path / "pieces", 30, shards)
    gather.gather(str(tmp_path / "pieces"), blocks, shards, tmp_path / "out")
    assert read(tmp_path / "out", shards) == wanted
    # Nothing of ranges is left.
    assert len(list((tmp_path / "out" / "ledger").iterdir())) == len(wanted)


def test_what_an_earlier_try_has_left_is_gone(tmp_path):
    blocks, wanted = written(tmp_path / "pieces", 3, 5)
    (tmp_path / "out" / "ledger").mkdir(parents=True)
    gather.file_of(tmp_path / "out", "ledger", 4).write_bytes(b"half")
    (tmp_path / "out" / "ledger" / "0-64.arrow").write_bytes(b"half")
    gather.gather(str(tmp_path / "pieces"), blocks, 5, tmp_path / "out")
    assert read(tmp_path / "out", 5) == wanted


def test_rows_are_written_in_batches_however_few_a_block_has_of_a_shard(tmp_path, monkeypatch):
    blocks, _ = written(tmp_path / "pieces", 200, 10, rows=10)
    gather.gather(str(tmp_path / "pieces"), blocks, 10, tmp_path / "out")
    with pa.memory_map(str(gather.file_of(tmp_path / "out", "ledger", 3))) as file:
        assert pa.ipc.open_file(file).num_record_batches == 1
    monkeypatch.setattr(gather, "PENDING_BYTES", 1)
    gather.gather(str(tmp_path / "pieces"), blocks, 10, tmp_path / "out")
    with pa.memory_map(str(gather.file_of(tmp_path / "out", "ledger", 3))) as file:
        assert pa.ipc.open_file(file).num_record_batches > 100


def test_files_are_opened_as_often_as_there_are_blocks_ranges_and_shards(tmp_path, monkeypatch):
    """Not once for each block and shard, which are 8,000 and 32,000 pairs."""
    names = []

    def counting(open_file):
        def opened(path, *args, **options):
            names.append(path)
            return open_file(path, *args, **options)

        return opened

    monkeypatch.setattr(pa, "memory_map", counting(pa.memory_map))
    monkeypatch.setattr(pa.ipc, "new_file", counting(pa.ipc.new_file))
    for scale in (1, 2):
        place = tmp_path / str(scale)
        place.mkdir()
        blocks, _ = written(place / "pieces", 40 * scale, 200 * scale)
        names.clear()
        gather.gather(str(place / "pieces"), blocks, 200 * scale, place / "out")
        # A range is written and read.
        assert 40 * scale + 200 * scale <= len(names) <= 40 * scale + 200 * scale + 2 * gather.FAN
