"""SFT trains the tokens that the mask says, and fills its steps with whole examples."""

from __future__ import annotations

import json

import pytest

from stages import sft
from tests.stages.training.support import data, perform, rows_of, settings


@pytest.mark.slow
def test_masked_tokens_are_not_trained(base, memory, tmp_path):
    rows = rows_of("sft", 16)
    for row in rows:
        row["completion_mask"] = [0] * (len(row["completion_ids"]) - 1) + [1]
    inputs = {"base": base, "data": data(tmp_path / "data", sft=rows), "tokenizer": base}
    metrics, made = perform(sft, settings(sft, epochs=4), tmp_path / "sft", memory, **inputs)
    assert metrics["tokens"] == 8
    # Every trained token is the end of the turn.
    first = json.loads((made.path / "logs" / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["loss"] < 0.6 * first["loss"]


@pytest.mark.slow
def test_a_step_takes_the_examples_that_fit_its_tokens(base, memory, tmp_path):
    table = data(tmp_path / "data", sft=rows_of("sft", 40))
    sizes = [len(r["prompt_ids"]) + len(r["completion_ids"]) for r in rows_of("sft", 40)]
    config = settings(sft, epochs=2, tokens_per_step=64)
    metrics, made = perform(sft, config, tmp_path / "sft", memory, base=base, data=table, tokenizer=base)
    lines = [json.loads(line) for line in (made.path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert metrics["steps"] == len(lines) and sum(line["row_tokens"] for line in lines) == 2 * sum(sizes)
    assert all(line["row_tokens"] <= 64 for line in lines) and lines[0]["row_tokens"] + max(sizes) > 64


@pytest.mark.slow
def test_no_examples_is_said(base, memory, tmp_path):
    table = data(tmp_path / "data", sft=[])
    with pytest.raises(ValueError, match="no examples to train on; the data's card.html says"):
        perform(sft, settings(sft), tmp_path / "sft", memory, base=base, data=table, tokenizer=base)
