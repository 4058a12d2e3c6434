"""Tables are read by rows and columns, in the order of the files; of a policy, what it was trained on."""

import pytest

from rlhf.stages.common.tables import batches, count_rows, first_rows, read_table, rows_at
from rlhf.stages.common.trained_prompts import prompts_among, trained_names
from rlhf.stages.refill import unusable
from rlhf.stages.sampling.order import prompts_of_refill
from rlhf.tuning.rows import PromptRow, write_table
from tests.stages.gate.support import Lab
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


@pytest.fixture
def rounds(tmp_path):
    """Policies of two rounds, each with prompts of its own; and makes the choice of one of them."""
    lab = Lab(tmp_path)
    one = lab.commit("rewarded", {"policy.json": "one"}, {"data": lab.data(1, ["a", "b"])})
    two = lab.commit("rewarded", {"policy.json": "two"}, {"data": lab.data(1, ["c"]), "policy": one})

    def choice(number):
        inputs = {"candidate_000": one, "candidate_001": two, "evaluation_000": lab.commit("evaluate", {"of": "one"})}
        return lab.commit("select", {"policy.json": "chosen"}, inputs, metrics={"round": number})

    return one, two, choice


def test_the_best_of_several_rounds_was_trained_on_what_its_round_and_those_before_it_saw(rounds):
    one, two, choice = rounds
    assert trained_names(choice(0)) == trained_names(one) and prompts_among(trained_names(one)) == 2
    assert trained_names(choice(1)) == trained_names(two) and prompts_among(trained_names(two)) == 3
