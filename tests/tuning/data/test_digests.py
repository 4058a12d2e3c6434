"""Digests are found whatever their bytes, without work or memory for those that nobody asks for."""

import hashlib
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from rlhf.tuning.data.digests import Digests
from rlhf.tuning.data.schema import ipc_bytes, ipc_table

# Bytes of zero at an end, and neighbours in order.
EDGES = ["00" * 32, "00" * 31 + "01", "ff" * 31 + "00", "ff" * 32, "0f" * 32, "f0" * 32, "0f" * 31 + "0e"]


def texts(numbers):
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in numbers]


def test_a_digest_is_found_exactly_where_it_was_given():
    known = [*EDGES[::2], *texts(range(100))]
    digests = Digests.of([pa.array(known[50:]), pa.array([], pa.string()), pa.array(known[:50])])
    asked = [*EDGES, *texts(range(50, 150))]
    expected = [text in known for text in asked]
    assert len(digests) == len(known) and digests.holds(pa.array(asked)).tolist() == expected
    # As columns of tables are: in chunks, and parts of larger ones.
    chunks = pa.chunked_array([pa.array(asked)[:9], pa.array([], pa.string()), pa.array(["x", *asked])[10:]])
    assert digests.holds(chunks).tolist() == expected
    assert digests.holds(pa.array(asked)[3:20]).tolist() == expected[3:20]


def test_of_no_digests_none_is_found():
    assert Digests.of([]).holds(pa.array(EDGES)).tolist() == [False] * len(EDGES)
    assert Digests.of([pa.array(EDGES)]).holds(pa.chunked_array([], pa.string())).tolist() == []


def test_a_file_has_them_as_they_are_looked_up():
    digests = Digests.of([pa.array(texts(range(1000)))])
    # Without offsets, which end at 2 GiB of digests.
    assert digests.column.type == pa.binary(32)
    file = ipc_table(ipc_bytes(pa.table({"content": digests.column})))
    assert Digests(file["content"].combine_chunks()).holds(pa.array(texts(range(900, 1100)))).tolist() == [
        number < 1000 for number in range(900, 1100)
    ]


def test_a_look_up_takes_no_memory_for_those_that_are_known():
    values = np.random.default_rng(0).integers(0, 256, (300_000, 32), np.uint8)
    known = [value.tobytes().hex() for value in values]
    asked = pa.array(known[:50] + texts(range(50)))
    digests = Digests.of([pa.array(known)])
    pool = pa.proxy_memory_pool(before := pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        assert digests.holds(asked).tolist() == [True] * 50 + [False] * 50
        assert tracemalloc.get_traced_memory()[1] + pool.max_memory() < 200_000
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


def test_what_is_no_digest_is_told():
    with pytest.raises(ValueError, match="widths must match"):
        Digests.of([pa.array(["a"])])
