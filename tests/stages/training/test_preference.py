"""Preferences and distillation: the policy comes to prefer what is chosen, and nearer to its teacher."""

from typing import Any

import numpy as np
import pytest

from rlhf.stages import distill, preference, reward, sft
from rlhf.stages.distill import TokenizersDiffer
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import save_tokenizer
from tests.stages.training.support import Folder, data, lines_of, perform, rows_of, settings


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_preference_on_pairs(loss, base, memory, judged, tmp_path):
    inputs = {"policy": base, "data": judged, "tokenizer": base}
    inputs |= {"reference": base} if loss == "dpo" else {}
    metrics, made = perform(preference, settings(preference, loss=loss), tmp_path / loss, memory, **inputs)
    assert (metrics["examples"], metrics["heldout_pairs"]) == (32, 12)
    assert metrics["heldout_loss"] < metrics["heldout_loss_before"]
    assert metrics["heldout_accuracy"] == metrics["heldout_ranking"] == 1.0 > metrics["heldout_ranking_before"]
    assert metrics["heldout_margin"] > 0.02
    assert metrics["heldout_chosen_logps"] > metrics["heldout_rejected_logps"]
    if loss == "dpo":
        assert metrics["heldout_loss_before"] == pytest.approx(np.log(2), rel=1e-5)
        # The policy is its reference: every pair ties.
        assert metrics["heldout_accuracy_before"] == 0.5
    assert (tmp_path / loss / "work" / "reference-logps").exists() == (loss == "dpo")
    lines = lines_of(made)
    assert {"loss", "accuracy", "margin", "chosen_logps", "rejected_logps", "grad_norm"} <= set(lines[0])
    assert all(line["seconds"] > 0 and line["tokens_per_second"] > 0 and line["mfu"] >= 0 for line in lines)
    # A tiny model is far from what the device can do, but it does work.
    assert 0 < metrics["mfu"] < 1 and metrics["tokens_per_second"] > 0 and metrics["peak_memory_mb"] > 100
    assert lines[-1]["margin"] > lines[0]["margin"]
    assert (made.path / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_kto_on_labels_and_that_micro_batches_change_nothing(base, memory, judged, tmp_path):
    inputs = {"policy": base, "reference": base, "tokenizer": base, "labelled": judged}
    found = []
    for tokens in (64, 512):
        config = settings(preference, loss="kto", beta=2.0, compute={"tokens_per_micro_batch": tokens})
        found.append(perform(preference, config, tmp_path / str(tokens), memory, **inputs)[0])
    assert (found[0]["examples"], found[0]["heldout_completions"]) == (48, 24)
    assert found[0]["kl"] > 0.01
    assert found[0]["heldout_accuracy"] > 0.95
    for key in ("loss", "kl", "margin", "heldout_loss"):
        assert found[0][key] == pytest.approx(found[1][key], rel=1e-4, abs=1e-6), key


def test_kto_needs_both_kinds_and_several_prompts_also_to_measure_on(base, memory, tmp_path):
    inputs = {"policy": base, "reference": base, "tokenizer": base}
    rows = rows_of("labelled", 9)
    good, same = [r for r in rows if r["label"]], [r | {"prompt_ids": [5]} for r in rows]
    of_one = same[:6] + [r | {"prompt_ids": [6]} for r in rows[:6]]
    left = r"heldout_examples leaves \d completions, of \d prompts and \d kinds .*raise it"
    cases = [
        ({"labelled": good}, {"heldout_fraction": 0.0}, "all 6 labels are True"),
        ({"labelled": same}, {"heldout_fraction": 0.0}, "all prompts of the data agree"),
        ({"labelled": rows, "heldout_labelled": of_one}, {"heldout_examples": 6}, left),
        ({"labelled": rows, "heldout_labelled": good}, {"heldout_examples": 5}, left),
    ]
    for number, (tables, values, message) in enumerate(cases):
        found = data(tmp_path / f"d{number}", **tables)
        with pytest.raises(ValueError, match=message):
            config = settings(preference, loss="kto", **values)
            perform(preference, config, tmp_path / f"r{number}", memory, **inputs, labelled=found)


@pytest.mark.slow
def test_long_pairs_stay_pairs_in_reward_and_preference(base, memory, tmp_path):
    # The winner is the shorter one in some pairs and the longer one in others, so rows are filled in another order.
    def pair(i: int) -> dict[str, Any]:
        good, bad = [70] * (420 + 60 * (i % 3)), [90] * (540 - 50 * (i % 2))
        judged = {"chosen_ids": [*good, 2], "rejected_ids": [*bad, 2], "chosen": "c", "rejected": "r", "margin": None}
        return {"id": str(i), "prompt_ids": [20 + i] * 300, "prompt": "p", **judged}

    rows = [pair(i) for i in range(4)]
    assert min(len(r["prompt_ids"]) + len(r["chosen_ids"]) + len(r["rejected_ids"]) for r in rows) > 1024
    found = data(tmp_path / "data", preference=rows, heldout_preference=rows[:2])
    inputs = {"data": found, "tokenizer": base}
    config = settings(reward, examples_per_step=4, epochs=2)
    metrics, _ = perform(reward, config, tmp_path / "reward", memory, base=base, **inputs)
    assert metrics["accuracy"] == metrics["heldout_accuracy"] == 1.0
    config = settings(preference, loss="simpo", examples_per_step=4, epochs=2)
    metrics, _ = perform(preference, config, tmp_path / "preference", memory, policy=base, **inputs)
    assert metrics["accuracy"] == metrics["heldout_accuracy"] == 1.0


@pytest.mark.slow
def test_margins_ask_for_a_gap(base, memory, tmp_path):
    rows = [r | {"margin": 2.0} for r in rows_of("preference", 8)]
    table = data(tmp_path / "data", preference=rows, heldout_preference=rows[:2])
    inputs = {"base": base, "data": table, "tokenizer": base}
    first = {}
    for weight in (0.0, 1.0):
        config = settings(reward, margin_weight=weight, heldout_fraction=0.0, centering=0.0)
        metrics, made = perform(reward, config, tmp_path / str(weight), memory, **inputs)
        first[weight] = lines_of(made)[0]["loss"]
        # The head starts at zero: every gap is 0, and a tie is half right.
        assert metrics["heldout_accuracy_before"] == 0.5
    assert first[0.0] == pytest.approx(np.log(2), rel=1e-5)
    assert first[1.0] == pytest.approx(np.log1p(np.exp(2.0)), rel=1e-5)


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
