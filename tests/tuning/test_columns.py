"""List columns are flat arrays: a row is a view of what Arrow has read, and what is written has the same bytes."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf.tuning.algorithms.round_data import RoundData
from rlhf.tuning.columns import Numbers, list_column, list_rows
from rlhf.tuning.rows import CompletionRow, ScoreRow, read_rows_at, read_table, write_arrow, write_table

IDS, REALS = pa.list_(pa.int32()), pa.list_(pa.float32())
LISTS = [[5, 6, 7], [], [8], [9, 4]]


def completions(count, tokens):
    """Groups of four completions of this length, without a list of tokens."""
    rng = np.random.default_rng(0)
    return [
        CompletionRow(
            place=i // 4, sample=i % 4, prompt_id=f"p{i // 4}", prompt_ids=Numbers(np.arange(20, dtype=np.int32)),
            token_ids=Numbers(rng.integers(300, 900, tokens, np.int32)),
            logprobs=Numbers(-rng.random(tokens, np.float32)),
        )
        for i in range(count)
    ]  # fmt: skip


def test_a_row_reads_like_a_list_and_equals_one():
    row = Numbers(np.asarray([5, 6, 7], np.int32))
    assert row == [5, 6, 7] == row and row != [5, 6] and row != [5, 6, 8] and row != "567"
    assert (len(row), row[-1], list(row[1:]), [*row], repr(row)) == (3, 7, [6, 7], [5, 6, 7], "[5, 6, 7]") and 6 in row
    assert type(row[0]) is int and not Numbers(np.zeros(0, np.int32))
    assert np.shares_memory(np.asarray(row), row.array) and np.asarray(row, np.int64).dtype == np.int64


@pytest.mark.parametrize(("start", "length"), [(0, 4), (1, 3), (2, 1), (3, 0)])
def test_rows_of_slices_and_chunks_are_views_of_their_buffers(start, length):
    whole = pa.array(LISTS, IDS)
    column = pa.chunked_array([whole.slice(start, length), whole])
    rows = list_rows(column)
    assert rows == LISTS[start : start + length] + LISTS
    assert all(np.shares_memory(row.array, whole.values.to_numpy()) for row in rows if len(row))


def test_nulls_are_rows_that_are_not_there_and_holes_are_nan():
    rows = list_rows(pa.chunked_array([pa.array([[1.5, None], None, [2.5]], REALS)]))
    assert rows[1] is None and rows[2] == [2.5]
    np.testing.assert_array_equal(rows[0], np.asarray([1.5, np.nan], np.float32))
    np.testing.assert_array_equal(list_column([[None, 0.1]], REALS).to_pylist()[0], np.float32([np.nan, 0.1]))
    with pytest.raises(ValueError, match="1 values of a list of int32 are null"):
        list_rows(pa.chunked_array([pa.array([[1, None]], IDS)]))


@pytest.mark.parametrize(
    ("rows", "kind"),
    [(LISTS, IDS), ([[0.1, float("nan")], [], [-3.0]], REALS), ([[2**40], None], pa.list_(pa.int64())), ([], IDS)],
)
def test_a_column_of_rows_is_that_of_lists(rows, kind, tmp_path):
    given = [
        row if row is None else Numbers(list_rows(pa.chunked_array([pa.array([row], kind)]))[0].array) for row in rows
    ]
    for name, column in {
        "lists": pa.array(rows, kind),
        "rows": list_column(given, kind),
        "both": list_column(rows, kind),
    }.items():
        write_arrow(tmp_path / name, pa.table({"x": column}))
    assert (tmp_path / "lists").read_bytes() == (tmp_path / "rows").read_bytes() == (tmp_path / "both").read_bytes()


@pytest.mark.parametrize("row", [np.asarray([2**40 + 5]), [2**40 + 5], [1.5], [float("nan")], ["7"]])
def test_a_number_that_a_column_of_integers_cannot_hold_is_refused(row):
    with pytest.raises(ValueError, match="is no int32: expected a list of numbers of that type"):
        list_column([[3], row], IDS)


def test_rows_of_some_columns_are_not_written_with_nulls_in_place_of_the_others(tmp_path):
    write_table(tmp_path / "all", completions(2, 5), CompletionRow.schema())
    some = read_table([tmp_path / "all"], CompletionRow, ("place", "prompt_id", "prompt_ids", "token_ids", "logprobs"))
    with pytest.raises(KeyError, match="sample"):
        write_table(tmp_path / "some", some, CompletionRow.schema())


def test_what_is_read_and_written_again_has_the_same_bytes(tmp_path):
    table = completions(8, 5)
    table[3] = CompletionRow(
        place=0, sample=3, prompt_id="p0", prompt_ids=[7], token_ids=[1, 2], logprobs=[float("nan"), -1.0]
    )
    plain = [
        vars(row) | {name: list(getattr(row, name)) for name in ("prompt_ids", "token_ids", "logprobs")}
        for row in table
    ]
    write_arrow(tmp_path / "plain", pa.Table.from_pylist(plain, schema=CompletionRow.schema()))
    write_table(tmp_path / "table", table, CompletionRow.schema())
    write_table(tmp_path / "again", read_table([tmp_path / "table"], CompletionRow), CompletionRow.schema())
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "table").read_bytes() == (tmp_path / "again").read_bytes()


def test_rows_are_found_by_their_numbers_over_files(tmp_path):
    for name, some in (("a", slice(0, 6)), ("b", slice(6, 12))):
        pq.write_table(
            pa.Table.from_pylist([{"place": i, "prompt_id": f"p{i}"} for i in range(12)][some]), tmp_path / name
        )
    paths = [tmp_path / "a", tmp_path / "b"]
    assert [row.place for row in read_rows_at(paths, ScoreRow, [7, 0, 11, 7])] == [7, 0, 11, 7]
    with pytest.raises(KeyError):
        read_rows_at(paths, ScoreRow, [12])


def test_row_groups_without_a_wanted_row_are_not_decoded(tmp_path):
    rows = [{"place": i, "sample": 0, "prompt_id": f"p{i}"} for i in range(400)]
    path = tmp_path / "a"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100, use_dictionary=False)
    column = pq.read_metadata(path).row_group(2).column(2)
    damaged = bytearray(path.read_bytes())
    start = column.data_page_offset
    damaged[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(damaged)
    assert [row.prompt_id for row in read_rows_at([path], ScoreRow, [399, 0, 101])] == ["p399", "p0", "p101"]
    with pytest.raises(OSError):
        read_rows_at([path], ScoreRow, [250])


def test_a_round_is_read_without_an_object_for_each_token(tmp_path):
    """A list of a token's id and one of its log-probability take 72 bytes of it."""
    count, tokens = 128, 4096
    write_table(tmp_path / "a", completions(count, tokens), CompletionRow.schema())
    tracemalloc.start()
    try:
        rows = read_table([tmp_path / "a"], CompletionRow)
        read = tracemalloc.get_traced_memory()[1] / count / tokens
        scores = [ScoreRow(place=r.place, sample=r.sample, prompt_id=r.prompt_id, total=0.0) for r in rows]
        data = RoundData.from_rows(rows, scores)
        every = np.ones(count, bool)
        (groups,) = data.divided(every, every, count).groups
        packed = tracemalloc.get_traced_memory()[1] / count / tokens
    finally:
        tracemalloc.stop()
    assert all(
        np.shares_memory(tokens, row.token_ids.array) for row, tokens in zip(rows, data.completions, strict=True)
    )
    assert sum(group.size for group in groups) == count * tokens + count // 4 * 20
    # Arrow's own buffers are not counted, the round's padded log-probabilities and mask are.
    assert read < 2 and packed < 12
