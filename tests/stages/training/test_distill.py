"""Distillation: the policy comes nearer to its teacher, which must have the same tokens."""

import pytest

from rlhf.stages import distill, sft
from rlhf.stages.distill import TokenizersDiffer
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import save_tokenizer
from tests.stages.training.support import Folder, data, lines_of, perform, rows_of, settings


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, base, memory) -> Folder:
    folder = tmp_path_factory.mktemp("teacher")
    rows = data(folder / "data", sft=rows_of("sft", 64))
    metrics, made = perform(sft, settings(sft, epochs=2), folder, memory, base=base, data=rows, tokenizer=base)
    assert metrics["loss"] < 3.0
    return made


@pytest.mark.slow
def test_distillation_lowers_the_divergence(base, memory, teacher, judged, tmp_path):
    config = settings(distill, divergence="jsd", on_policy=0.5, max_tokens=12, epochs=2)
    inputs = {"policy": base, "teacher": teacher, "data": judged, "tokenizer": base}
    metrics, made = perform(distill, config, tmp_path / "distill", memory, **inputs)
    assert metrics["heldout_divergence"] < 0.7 * metrics["heldout_divergence_before"]
    lines = lines_of(made)
    # A model that knows little seldom stops: its own completions are longer than those of the data.
    longest = 8 * max(len(r["completion_ids"]) for r in rows_of("sft", 32))
    assert {line["tokens"] > longest for line in lines} == {True, False}


def test_a_teacher_with_other_tokens_is_refused_by_name(base, memory, judged, tmp_path):
    other = byte_tokenizer()
    other.add_tokens(["<think>"])
    save_tokenizer(other, tmp_path / "t" / "tokenizer")
    stranger = Folder(tmp_path / "t", "other", "base", {"config": {"source": "models/stranger"}})
    inputs = {"policy": base, "teacher": stranger, "data": judged, "tokenizer": base}
    with pytest.raises(TokenizersDiffer, match="teacher models/stranger .*260 and 259 tokens.*'<think>' is number 259"):
        perform(distill, settings(distill), tmp_path / "distill", memory, **inputs)
