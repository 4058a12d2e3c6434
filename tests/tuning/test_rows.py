"""Rows of tables: the columns on disk are those that stores have held, and what is written is read."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf.tuning.data.schema import SCHEMAS
from rlhf.tuning.rows import (
    CompletionRow,
    RefusedRow,
    ScoreRow,
    VerdictRow,
    numbers_of_groups,
    read_table,
    write_table,
)

TEXT, IDS = pa.string(), pa.list_(pa.int32())
NAME = [("place", pa.int64()), ("sample", pa.int32()), ("prompt_id", TEXT)]
PROVENANCE = {"source": TEXT, "record": pa.int64(), "content": TEXT, "group": TEXT}


def test_the_columns_of_a_round_are_those_that_stores_hold():
    assert CompletionRow.schema() == pa.schema(
        [
            *NAME[:2], ("part", pa.int32()), *NAME[2:], ("prompt", TEXT), ("answer", TEXT), ("metadata", TEXT),
            ("prompt_ids", IDS), ("token_ids", IDS), ("logprobs", pa.list_(pa.float32())), ("text", TEXT),
            ("stop", TEXT), ("policy", TEXT), ("seed", pa.int64()), ("temperature", pa.float32()),
        ]
    )  # fmt: skip
    rewards = pa.struct([("exact", pa.float32()), ("model", pa.float32())])
    assert ScoreRow.schema(["exact", "model"]) == pa.schema(
        [*NAME, ("rewards", rewards), ("total", pa.float32()), ("failure", TEXT)]
    )
    verdict = [("group", TEXT), ("judge", TEXT), ("answer", TEXT), ("score", pa.float32()), ("failure", TEXT)]
    assert VerdictRow.schema() == pa.schema(NAME + verdict)
    assert RefusedRow.schema() == pa.schema([("place", pa.int64()), ("prompt_id", TEXT), ("reason", TEXT)])


@pytest.mark.parametrize(
    ("output", "columns"),
    [
        ("prompts", {"prompt": TEXT, "answer": TEXT, "metadata": TEXT}),
        ("sft", {"completion_ids": IDS, "completion_mask": pa.list_(pa.int8()), "prompt": TEXT, "completion": TEXT}),
        ("labelled", {"completion_ids": IDS, "label": pa.bool_(), "prompt": TEXT, "completion": TEXT}),
        (
            "preference",
            {"chosen_ids": IDS, "rejected_ids": IDS, "prompt": TEXT, "chosen": TEXT, "rejected": TEXT}
            | {"margin": pa.float64()},
        ),
    ],
)
def test_the_columns_of_prepared_data_are_those_that_stores_hold(output, columns):
    expected = {"id": TEXT, "prompt_ids": IDS, **columns, **PROVENANCE, "turns": pa.list_(pa.int64())}
    assert list(SCHEMAS[output].items()) == list(expected.items())


def test_what_is_written_is_read(tmp_path):
    row = CompletionRow(
        place=3, prompt_id="p", prompt="1 + 1", answer=None, metadata="{}", prompt_ids=[5, 6], token_ids=[7],
        logprobs=[-0.5],
    )  # fmt: skip
    scores = [
        ScoreRow(place=3, prompt_id="p", rewards={"a": 0.5, "b": None}, total=0.5),
        ScoreRow(place=3, prompt_id="p", sample=1, rewards={"a": None, "b": None}, failure="a: timeout"),
    ]
    write_table(tmp_path / "rollouts" / "a.parquet", [row], CompletionRow.schema())
    write_table(tmp_path / "scores.parquet", scores, ScoreRow.schema(["a", "b"]))
    assert read_table([tmp_path / "rollouts" / "a.parquet"] * 2, CompletionRow) == [row, row]
    assert read_table([tmp_path / "scores.parquet"], ScoreRow) == scores
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["a.parquet"]


def test_a_table_without_rows_has_its_columns(tmp_path):
    write_table(tmp_path / "a.parquet", [], CompletionRow.schema())
    assert pq.read_schema(tmp_path / "a.parquet") == CompletionRow.schema()
    assert read_table([tmp_path / "a.parquet"], CompletionRow) == []


def test_a_field_without_a_column_keeps_its_default(tmp_path):
    pq.write_table(pa.table({"place": [3], "prompt_id": ["p"], "total": [1.0]}), tmp_path / "a.parquet")
    assert read_table([tmp_path / "a.parquet"], ScoreRow) == [ScoreRow(place=3, prompt_id="p", total=1.0)]


@pytest.mark.parametrize("columns", [{"place": [3]}, {"place": [3], "prompt_id": ["p"], "counter": [0]}])
def test_a_table_of_other_columns_is_refused_by_name(tmp_path, columns):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet is no table of ScoreRow.*(lacks.*prompt_id|has.*counter)"):
        read_table([tmp_path / "a.parquet"], ScoreRow)


def test_groups_are_places_in_the_order_of_their_first_rows_whatever_their_prompts():
    rows = [ScoreRow(place=place, prompt_id="same") for place in (4, 1, 4, 7, 1)]
    assert numbers_of_groups(rows) == [0, 1, 0, 2, 1]


def test_a_column_that_was_not_read_has_no_default_value(tmp_path):
    rows = [CompletionRow(place=0, prompt_id="p", prompt_ids=[1], token_ids=[2], logprobs=[0.0], stop="length")]
    write_table(tmp_path / "a.parquet", rows, CompletionRow.schema())
    (row,) = read_table([tmp_path / "a.parquet"], CompletionRow, ("place",))
    assert row.place == 0
    for name in ("stop", "token_ids"):
        with pytest.raises(AttributeError, match=f"the column {name} of CompletionRow was not read"):
            getattr(row, name)
