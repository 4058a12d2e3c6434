"""The ways to tune, each stage by itself on a model of under a million parameters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages import base as base_model
from stages import distill, preference, reward, sft
from stages.common.compilation import configure_jax
from stages.contract.definition import Context
from stages.distill import TokenizersDiffer
from tuning.data.pipeline import SCHEMAS
from tuning.models.byte_tokenizer import byte_tokenizer
from tuning.models.tokenizer import save_tokenizer


@dataclasses.dataclass
class Folder:
    """Stands in for an artifact."""

    path: Path
    digest: str
    stage: str = "base"
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    url = "somewhere"

    def local(self, part: str = "") -> Path:
        return self.path / part

    def has(self, part: str) -> bool:
        return (self.path / part).exists()

    def part_digest(self, parts: tuple[str, ...]) -> str:
        return self.digest


def perform(module: Any, config: Any, folder: Path, memory: dict[str, Any], **inputs: Folder) -> tuple[Any, Folder]:
    """Runs a stage; returns its metrics and what it made."""
    out, work = folder / "out", folder / "work"
    out.mkdir(parents=True)
    work.mkdir(exist_ok=True)
    logs: list[str] = []
    ctx = Context(
        config=config, inputs=inputs, out=out, work=work, seed=3, progress=lambda *a, **k: None, log=logs.append,
        memory=memory,
    )  # fmt: skip
    return module.run(ctx), Folder(out, str(folder), module.STAGE.name, {"config": config.model_dump()})


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What these tests compile is kept for the next session, as in a worker."""
    configure_jax()


@pytest.fixture(scope="module")
def memory() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def base(tmp_path_factory, memory) -> Folder:
    config = base_model.Config(source="random:tiny")
    return perform(base_model, config, tmp_path_factory.mktemp("base"), memory)[1]


TOKENIZER = byte_tokenizer()
GOOD, BAD = "abcab", "zyxzyxzy"


def ids(text: str, end: bool = True) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False) + [TOKENIZER.eos_token_id] * end


def rows_of(name: str, count: int, start: int = 0) -> list[dict[str, Any]]:
    """Prompts of their own, whose good answers look alike, as do the bad ones."""
    found = []
    for i in range(start, start + count):
        row = {"id": f"{i:04d}", "prompt_ids": ids(f"{i * 37 % 1000}?", end=False), "prompt": str(i)}
        good, bad = GOOD[: 2 + i % 4], BAD[: 3 + i % 5]
        if "labelled" in name:
            kind = i % 3 > 0
            found.append(row | {"completion_ids": ids(good if kind else bad), "label": kind, "completion": "c"})
        elif "preference" in name:
            pair = {"chosen_ids": ids(good), "rejected_ids": ids(bad), "chosen": "c", "rejected": "r"}
            found.append(row | pair | {"margin": None})
        else:
            found.append(row | {"completion_ids": ids(good), "completion": "c", "completion_mask": None})
    return found


def data(folder: Path, **tables: list[dict[str, Any]]) -> Folder:
    for name, rows in tables.items():
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(SCHEMAS[name].items()))), folder / name / "a.parquet")
    return Folder(folder, str(folder))


@pytest.fixture
def judged(tmp_path) -> Folder:
    names = {"preference": 32, "heldout_preference": 12, "labelled": 48, "heldout_labelled": 24, "sft": 32}
    return data(tmp_path / "data", **{n: rows_of(n, c, 500 * n.startswith("heldout")) for n, c in names.items()})


FAST = {"learning_rate": 3e-3, "schedule": "constant", "warmup_steps": 0}


def settings(module: Any, **values: Any) -> Any:
    values = {"optimizer": FAST} | ({} if "tokens_per_step" in values else {"examples_per_step": 8}) | values
    return module.Config.model_validate_json(json.dumps(values))


@pytest.mark.parametrize("loss", ["dpo", pytest.param("orpo", marks=pytest.mark.slow)])
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
    assert (tmp_path / loss / "work" / "reference-logps").exists() == (loss == "dpo")
    lines = [json.loads(line) for line in (made.path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "accuracy", "margin", "chosen_logps", "rejected_logps", "grad_norm"} <= set(lines[0])
    assert all(line["seconds"] > 0 and line["tokens_per_second"] > 0 and line["mfu"] >= 0 for line in lines)
    # A tiny model is far from what the device can do, but it does work.
    assert 0 < metrics["mfu"] < 1 and metrics["tokens_per_second"] > 0 and metrics["peak_memory_mb"] > 100
    assert lines[-1]["margin"] > lines[0]["margin"]
    assert (made.path / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_kto_on_pairs_taken_apart(base, memory, judged, tmp_path):
    inputs = {"policy": base, "reference": base, "tokenizer": base, "data": judged}
    metrics, _ = perform(preference, settings(preference, loss="kto"), tmp_path / "kto", memory, **inputs)
    assert (metrics["examples"], metrics["heldout_completions"]) == (64, 24)
    assert metrics["heldout_loss_before"] == pytest.approx(0.5, rel=1e-5)
    assert metrics["heldout_loss"] < 0.49
    assert metrics["heldout_accuracy"] > 0.95 and metrics["heldout_margin"] > 0.02


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


def test_kto_needs_both_kinds_and_several_prompts(base, memory, tmp_path):
    inputs = {"policy": base, "reference": base, "tokenizer": base}
    good = [r for r in rows_of("labelled", 9) if r["label"]]
    same = [r | {"prompt_ids": [5]} for r in rows_of("labelled", 9)]
    for number, (rows, message) in enumerate(
        [(good, "all 6 labels are True"), (same, "all prompts of the data agree")]
    ):
        config = settings(preference, loss="kto", heldout_fraction=0.0)
        with pytest.raises(ValueError, match=message):
            found = data(tmp_path / f"d{number}", labelled=rows)
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


def test_margins_ask_for_a_gap(base, memory, tmp_path):
    rows = [r | {"margin": 2.0} for r in rows_of("preference", 8)]
    inputs = {"base": base, "data": data(tmp_path / "data", preference=rows), "tokenizer": base}
    first = {}
    for weight in (0.0, 1.0):
        config = settings(reward, margin_weight=weight, heldout_fraction=0.0, centering=0.0)
        _, made = perform(reward, config, tmp_path / str(weight), memory, **inputs)
        first[weight] = json.loads((made.path / "logs" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    # The head starts at zero: every gap is 0.
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
    lines = [json.loads(line) for line in (made.path / "logs" / "metrics.jsonl").read_text().splitlines()]
    # A model that knows little seldom stops: its own completions are longer than those of the data.
    longest = 8 * max(len(r["completion_ids"]) for r in rows_of("sft", 32))
    kinds = {line["tokens"] > longest for line in lines}
    assert kinds == {True, False}


def test_a_teacher_with_other_tokens_is_refused_by_name(base, memory, judged, tmp_path):
    other = byte_tokenizer()
    other.add_tokens(["<think>"])
    save_tokenizer(other, tmp_path / "t" / "tokenizer")
    stranger = Folder(tmp_path / "t", "other", "base", {"config": {"source": "models/stranger"}})
    inputs = {"policy": base, "teacher": stranger, "data": judged, "tokenizer": base}
    with pytest.raises(TokenizersDiffer, match="teacher models/stranger .*260 and 259 tokens.*'<think>' is number 259"):
        perform(distill, settings(distill), tmp_path / "distill", memory, **inputs)


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
