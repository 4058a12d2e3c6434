"""Tables are read by rows and columns: what is not asked for is not kept, and the order is that of the files."""

import pytest

from rlhf.stages.common.tables import batches, count_rows, first_rows, read_table, rows_at
from rlhf.stages.refill import unusable
from rlhf.stages.sampling.order import prompts_of_refill
from rlhf.tuning.rows import PromptRow, write_table
from tests.stages.training.support import Folder


@pytest.fixture
def prompts(tmp_path):
    """Twelve prompts of 0 to 11 tokens in three files."""
    rows = [PromptRow(id=f"p{i}", prompt_ids=list(range(300, 300 + i)), prompt=f"question {i}") for i in range(12)]
    for number in range(3):
        some = rows[4 * number : 4 * number + 4]
        write_table(tmp_path / "prompts" / f"part-{number}.parquet", some, PromptRow.schema())
    return Folder(tmp_path, "data")


def test_the_first_rows_are_read_with_their_columns_alone(prompts):
    assert first_rows(prompts, "prompts/", 5, ("id", "prompt")) == [
        {"id": f"p{i}", "prompt": f"question {i}"} for i in range(5)
    ]
    assert len(first_rows(prompts, "prompts/", 99, ("id",))) == 12


def test_rows_of_a_number_are_those_of_the_whole_table(prompts):
    table = read_table(prompts, "prompts/", PromptRow)
    assert rows_at(prompts, "prompts/", PromptRow, [7, 0, 11]) == [table[7], table[0], table[11]]
    assert rows_at(prompts, "prompts/", PromptRow, []) == []
    assert (
        count_rows(prompts, "prompts/") == len(table) == sum(b.num_rows for b in batches(prompts, "prompts/", ("id",)))
    )


def test_a_refill_draws_no_prompt_that_the_round_has_or_that_is_too_long(prompts):
    total, used = unusable(prompts, {"p0", "p3", "p9"}, room=8)
    assert (total, used) == (12, {0, 3, 9, 10, 11})
    assert sorted(prompts_of_refill(9, total, 0, 5, used)) == [1, 2, 4, 5, 6, 7, 8]
    assert unusable(prompts, set(), room=float("inf")) == (12, set())
