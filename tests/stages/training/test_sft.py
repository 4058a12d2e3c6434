"""SFT measures what is held out, ends early, and reads a step after the next one has begun (values: the oracle)."""

import itertools

import numpy as np
import pytest

from rlhf.stages import sft
from rlhf.stages.contract.definition import Context
from rlhf.stages.training.fit import Task, fit
from rlhf.tuning.algorithms.supervised import sft_loss, sft_summary
from rlhf.tuning.data.reading import Examples
from rlhf.tuning.models.decoder import decoder_graph
from tests.stages.training.support import FAST, data, lines_of, perform, rows_of, settings
from tests.tuning.tiny import CONFIG, PARAMS

pytestmark = pytest.mark.slow


def test_the_loss_on_examples_kept_out_is_measured_before_between_and_after(base, memory, tmp_path):
    table = data(tmp_path / "data", sft=rows_of("sft", 16), heldout_sft=rows_of("sft", 8, 500))
    inputs = {"base": base, "data": table, "tokenizer": base}
    config = settings(sft, epochs=2, heldout_every=2, checkpoint_every=1)
    metrics, made = perform(sft, config, tmp_path / "sft", memory, **inputs)
    lines = lines_of(made)
    held = [(line["step"], line["heldout_loss"]) for line in lines if "heldout_loss" in line]
    assert [step for step, _ in held] == [1, 3] and metrics["heldout_loss"] == held[-1][1] < held[0][1]
    assert metrics["heldout_loss_before"] == lines[0]["heldout_loss_before"] > held[0][1]
    # The same model before its first step, on as many tokens of the same kind.
    assert metrics["heldout_loss_before"] == pytest.approx(lines[0]["loss"], rel=0.05)
    assert metrics["examples"] == 16
    # Three checkpoints of parameters and two moments.
    assert metrics["checkpoint_bytes"] > 3 * 3 * 4 * 50_000


def test_no_examples_is_said(base, memory, tmp_path):
    table = data(tmp_path / "data", sft=[])
    with pytest.raises(ValueError, match="sft has 0 rows .* give more data"):
        perform(sft, settings(sft), tmp_path / "sft", memory, base=base, data=table, tokenizer=base)


def test_training_ends_when_the_held_out_loss_no_longer_falls(base, memory, tmp_path):
    """A rate at which it grows from some step on; the two measurements after the least end the stage."""
    table = data(tmp_path / "data", sft=rows_of("sft", 16), heldout_sft=rows_of("sft", 8, 500))
    inputs = {"base": base, "data": table, "tokenizer": base}
    fast = FAST | {"learning_rate": 0.3}
    config = settings(sft, epochs=20, early_stopping_every=1, early_stopping_patience=2, optimizer=fast)
    metrics, made = perform(sft, config, tmp_path / "sft", memory, **inputs)
    losses = [line["heldout_loss"] for line in lines_of(made)]
    assert metrics["steps"] == len(losses) < 40 and min(losses[-2:]) >= min(losses[:-2])
    assert all(min(losses[i - 2 : i]) < min(losses[: i - 2]) for i in range(3, len(losses)))
    assert metrics["heldout_loss"] == losses[-1]
    with pytest.raises(ValueError, match="early_stopping_every needs held-out examples"):
        alone = inputs | {"data": data(tmp_path / "alone", sft=rows_of("sft", 16))}
        perform(sft, config, tmp_path / "none", memory, **alone)


def test_a_step_is_read_after_the_next_one_has_begun(tmp_path):
    events = []

    class Seen(Examples):
        def __getitem__(self, index):
            events.append("begun")
            return super().__getitem__(index)

    def summary(sums):
        events.append("read")
        return sft_summary(sums)

    starts = np.arange(8)[:, None] * 6
    table = Seen(np.arange(48, dtype=np.int32) % 90, None, starts + [0, 3], (starts + [3, 6])[:, None])
    task = Task(lambda compute: sft_loss(decoder_graph(CONFIG), compute), table, summary)
    lines = []
    ctx = Context(
        config=None, inputs={}, out=tmp_path, work=tmp_path / "work", seed=3, log=print, memory={},
        progress=lambda done, *_, **metrics: lines.append((done, metrics["loss"])),
    )  # fmt: skip
    fit(ctx, task, PARAMS, settings(sft, examples_per_step=2, checkpoint_every=100))
    # Of the four steps the first two begin before one is read; the last two are read together.
    assert [name for name, _ in itertools.groupby(events)] == ["begun", "read"] * 3 and events.count("read") == 4
    assert [done for done, _ in lines] == [1, 2, 3, 4] and lines[3][1] < lines[0][1]
