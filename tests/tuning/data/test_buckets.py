"""Rows by their hash: each is read once, equal hashes together, and memory holds a part of them."""

import tracemalloc

import numpy as np
import pytest

from rlhf.tuning.data.buckets import BUCKETS, Buckets


def filled(path, count, pending, repeats=3):
    """Buckets of `count` rows in pieces of a thousand; their hashes come several times, in pieces far apart."""
    hashes = np.random.default_rng(0).integers(0, 2**60, count // repeats, dtype=np.uint64)
    hashes = np.tile(hashes, repeats)
    made = Buckets(path, pending, number=np.uint32)
    for start in range(0, len(hashes), 1000):
        piece = hashes[start : start + 1000]
        made.add(piece, number=np.arange(start, start + len(piece)))
    return made, hashes


@pytest.mark.parametrize("pending", [1, 20_000, 1 << 30])
def test_each_row_is_in_one_bucket_with_all_of_its_hash(tmp_path, pending):
    made, hashes = filled(tmp_path / "rows", 30_000, pending)
    for _ in range(2):
        found = list(made)
        assert len(found) == (1 if pending == 1 << 30 else BUCKETS)
        # Buckets are in the order of their hashes.
        assert all(a["hash"].max() < b["hash"].min() for a, b in zip(found, found[1:], strict=False))
        rows = np.concatenate(found)
        assert sorted(rows["number"].tolist()) == list(range(len(hashes)))
        assert (rows["hash"] == hashes[rows["number"]]).all()
    assert (tmp_path / "rows").exists() == (pending < 1 << 30)


def test_no_rows_are_one_empty_bucket(tmp_path):
    assert [len(rows) for rows in Buckets(tmp_path / "rows")] == [0]


def test_memory_is_what_is_pending_and_a_bucket(tmp_path):
    tracemalloc.start()
    try:
        made, hashes = filled(tmp_path / "rows", 1_000_000, 200_000)
        hashes = len(hashes)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert sum(len(rows) for rows in made) == hashes
        # Of 12 MB.
        assert tracemalloc.get_traced_memory()[1] - before < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_hash_that_is_in_no_bucket_is_refused(tmp_path):
    made = Buckets(tmp_path / "rows", 1)
    made.add(np.array([2**60 - 1], np.uint64))
    with pytest.raises(ValueError, match=f"a hash is {2**60}; expected less than 2\\^60"):
        made.add(np.array([3, 2**60], np.uint64))
    assert [int(row["hash"]) for rows in made for row in rows] == [2**60 - 1]
