"""What a stage itself holds out: a random draw by prompt or group, as prepare's splits are."""

import json
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from rlhf.stages.store.artifacts import Store
from rlhf.stages.training.examples import Table, train_and_heldout
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import save_tokenizer
from tests.stages.support import context
from tests.stages.training.support import Folder, data, rows_of


def over(tmp_path, seed=3, rows=50_000, log=print, **config):
    base = Folder(tmp_path / "base", "base")
    base.local("model").mkdir(parents=True, exist_ok=True)
    base.local("model/config.json").write_text(json.dumps({"vocab_size": rows} | config))
    return context(None, tmp_path, tmp_path / "work", inputs={"tokenizer": base}, seed=seed, log=log)


def tables(tmp_path, part, rows, seed=3, fraction=0.25):
    made = data(tmp_path / part, **{part: rows})
    return train_and_heldout(over(tmp_path, seed), made, part, fraction)


@pytest.mark.parametrize("part", ["sft", "preference", "labelled"])
@pytest.mark.parametrize("named", [False, True])
def test_a_prompt_is_never_on_both_sides_and_the_rows_held_out_are_no_slice(tmp_path, part, named):
    # Of each prompt three rows: wide apart, as in the order of a hash of their content.
    rows = [row | {"id": f"{copy}-{row['id']}"} for copy in range(3) for row in rows_of(part, 40)]
    if named:
        # Pairs of prompts belong together, whatever their words.
        rows = [row | {"group": f"g{int(row['id'][-4:]) // 2}"} for row in rows]
    train, held = tables(tmp_path, part, rows)
    assert 24 <= len(held) <= 30 and len(train) + len(held) == 120
    sides = [set(zip(table.groups(), table.examples.prompt_bytes(), strict=True)) for table in (train, held)]
    assert not {group for group, _ in sides[0]} & {group for group, _ in sides[1]}
    assert not {prompt for _, prompt in sides[0]} & {prompt for _, prompt in sides[1]}
    numbers = sorted({int(name[-4:]) for name in held.column("id")})
    assert numbers != list(range(len(numbers))) and numbers[-1] > 20
    # Examples and columns are of the same rows.
    by_id = {row["id"]: row for row in rows}
    assert [g.prompt for g in held.examples] == [by_id[name]["prompt_ids"] for name in held.column("id")]


def test_another_seed_holds_out_others_and_the_same_seed_the_same(tmp_path):
    found = [
        tables(tmp_path / str(i), "sft", rows_of("sft", 40), seed)[1].column("id") for i, seed in enumerate((1, 1, 2))
    ]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("split", [True, False], ids=["held out by the data", "held out here"])
def test_of_many_held_out_rows_some_whole_groups_are_measured_on(tmp_path, split):
    rows = [row | {"id": f"{copy}-{row['id']}"} for copy in range(3) for row in rows_of("sft", 40)]
    splits = {"sft": rows_of("sft", 8, 900), "heldout_sft": rows} if split else {"sft": rows}
    made = data(tmp_path / "data", **splits)

    def measured(seed, most):
        return train_and_heldout(over(tmp_path, seed), made, "sft", 0.5, most)

    train, held = measured(3, 10)
    assert len(held) == 9 and sorted(Counter(held.groups()).values()) == [3, 3, 3]
    # What is not measured on is not trained on.
    assert train.column("id") == measured(3, 0)[0].column("id")
    assert held.column("id") == measured(3, 10)[1].column("id") != measured(4, 10)[1].column("id")
    assert len(measured(3, 1000)[1]) == len(measured(3, 0)[1])


def test_rows_of_one_prompt_cannot_be_divided(tmp_path):
    rows = [row | {"prompt_ids": [5]} for row in rows_of("sft", 8)]
    with pytest.raises(ValueError, match="8 rows of one prompt or group, all of them held out.*heldout_fraction to 0"):
        tables(tmp_path, "sft", rows)
    train, held = tables(tmp_path / "0", "sft", rows, fraction=0.0)
    assert (len(train), len(held)) == (8, 0)


def test_prompts_are_read_only_where_the_data_names_no_group(tmp_path):
    groups = [None if number == 30 else "" if number == 7 else f"g{number}" for number in range(40)]
    rows = [
        row | {"group": group, "prompt_ids": [number + 1] * 50_000}
        for number, (row, group) in enumerate(zip(rows_of("sft", 40), groups, strict=True))
    ]
    made = data(tmp_path / "data", sft=rows)
    table = Table(made, "sft")
    tracemalloc.start()
    try:
        found, most = table.groups(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    unnamed = {number: np.full(50_000, number + 1, np.int32).tobytes().hex() for number in (7, 30)}
    assert found == [group or unnamed[number] for number, group in enumerate(groups)]
    # All prompts are 8 MB: of the two their bytes and their digits, and what is on the way to them.
    assert most < 2e6
    assert table.only([31, 30, 8]).groups() == ["g31", unnamed[30], "g8"]


def test_of_a_remote_store_the_arrays_are_fetched_once_and_the_tables_when_a_column_is_asked_for(tmp_path, s3):
    made = data(tmp_path / "data", preference=rows_of("preference", 20))
    expected = list(Table(made, "preference").examples)
    store = Store(f"{s3}/arrays", scratch=tmp_path / "scratch")
    stored = store.commit(made.path, {"stage": "prepare", "key": "k", "inputs": {}, "config": {}, "metrics": {}})

    def fetched():
        return {path.name: path.stat().st_ino for path in (tmp_path / "scratch").rglob("*") if path.is_file()}

    table = Table(stored, "preference")
    first = fetched()
    assert list(table.examples) == expected and set(first) == {"tokens.npy", "offsets.npy"}
    assert list(Table(stored, "preference").examples) == expected and fetched() == first
    assert table.column("margin") == [None] * 20 and set(fetched()) == {*first, "part-00000.parquet"}


@pytest.mark.parametrize("place", ["prompt_ids", "completion_ids"])
@pytest.mark.parametrize("part", ["sft", "heldout_sft"])
def test_a_token_that_the_model_has_no_row_for_is_refused_by_name(tmp_path, place, part):
    tokenizer = byte_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<|extra|>"])
    save_tokenizer(tokenizer, tmp_path / "base" / "tokenizer")
    splits = {"sft": rows_of("sft", 8), "heldout_sft": rows_of("sft", 8, 900)}
    splits[part][3][place] = [*splits[part][3][place], rows]
    made = data(tmp_path / "data", **splits)
    with pytest.raises(
        ValueError, match=rf"sft holds token {rows} \('<\|extra\|>'\), expected ids below .* {rows} rows"
    ):
        train_and_heldout(over(tmp_path, rows=rows), made, "sft", 0.0)
    assert len(train_and_heldout(over(tmp_path, rows=rows + 1), made, "sft", 0.0)[0]) == 8


@pytest.mark.parametrize("place", ["prompt_ids", "chosen_ids", "rejected_ids"])
def test_rows_beyond_the_positions_of_the_model_are_told(tmp_path, place):
    rows, lines = rows_of("preference", 8), []
    fits = max(len(row["prompt_ids"]) + len(row[name]) for row in rows for name in ("chosen_ids", "rejected_ids"))
    made = data(tmp_path / "fits", preference=rows)
    train_and_heldout(over(tmp_path, log=lines.append, max_position_embeddings=fits), made, "preference", 0.0)
    assert lines == []
    for row in rows[:3]:
        row[place] = [*row[place], *[5] * fits]
    longest = max(len(row["prompt_ids"]) + len(row[name]) for row in rows for name in ("chosen_ids", "rejected_ids"))
    made = data(tmp_path / "long", preference=rows)
    train_and_heldout(over(tmp_path, log=lines.append, max_position_embeddings=fits), made, "preference", 0.0)
    (line,) = lines
    assert line.startswith(f"preference: 3 of 8 rows have more tokens than the model's {fits} positions ({longest} in ")
    assert "data.max_prompt_tokens" in line and "data.max_completion_tokens" in line
    # A config may not say.
    train_and_heldout(over(tmp_path, log=lines.append), made, "preference", 0.0)
    assert lines == [line]
