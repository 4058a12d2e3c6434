"""Stages that train an adapter: what they keep, and that the merged model is base and adapter together."""

import jax
import numpy as np
import pytest

from rlhf.stages import distill, preference, reward, sft
from rlhf.stages.common.settings import Lora
from rlhf.stages.training.adapters import lora_config
from rlhf.tuning.models import huggingface
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.models.lora import PROJECTIONS, merge
from tests.stages.training.support import FAST, data, lines_of, perform, rows_of, settings
from tests.tuning.models.adapters import load_adapter

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 8.0, "targets": ["down", "q", "v"]}
# An adapter starts at zero and is small: it takes larger steps than all parameters.
QUICK = FAST | {"learning_rate": 3e-2}


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("kind", ["none", "nf4"])
def test_sft_keeps_the_adapter_alone_and_hands_on_the_merged_model(kind, base, memory, tmp_path):
    table = data(tmp_path / "data", sft=rows_of("sft", 32))
    config = settings(sft, epochs=3, optimizer=QUICK, lora=LORA | {"quantize": kind})
    metrics, made = perform(sft, config, tmp_path / "sft", memory, base=base, data=table, tokenizer=base)
    lines = lines_of(made)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    model, start = huggingface.load_decoder(base.path / "model")
    assert not (made.path / "model").exists()
    _, after = memory["decoder:new"]
    lora, trained = load_adapter(made.path / "adapter", model)
    assert (lora.rank, lora.scale, lora.targets) == (4, 2.0, ("q", "v", "down"))
    wanted = merge(model, "decoder", start, trained, lora_config(config.lora))
    assert fingerprint(after) == fingerprint(wanted)
    count, whole = sum(x.size for x in leaves(trained)), sum(x.nbytes for x in leaves(start))
    assert metrics["trained_parameters"] == count < 0.2 * sum(x.size for x in leaves(start))
    assert metrics["frozen_bytes"] == whole if kind == "none" else metrics["frozen_bytes"] < 0.6 * whole
    assert not (tmp_path / "sft" / "work" / "model").exists()
    # Another seed starts another adapter; the same one gives the same bits.
    again = perform(sft, config, tmp_path / "again", memory, base=base, data=table, tokenizer=base)[1]
    one, two = (at.local("adapter/adapter_model.safetensors").read_bytes() for at in (made, again))
    assert one == two


def test_a_reward_model_trains_its_adapter_and_its_head(base, memory, judged, tmp_path):
    config = settings(reward, epochs=3, optimizer=QUICK, lora=LORA)
    metrics, made = perform(reward, config, tmp_path / "reward", memory, base=base, data=judged, tokenizer=base)
    assert metrics["heldout_accuracy"] > 0.9
    model, after = memory["scorer:new"]
    lora, trained = load_adapter(made.path / "adapter", model)
    np.testing.assert_array_equal(trained["score"][...], after["score"][...])
    assert np.abs(trained["score"][...]).max() > 1e-3
    start = huggingface.scalar_head_params(model, huggingface.load_decoder(base.path / "model")[1])
    assert fingerprint(merge(model, "scalar", start, trained, lora)) == fingerprint(after)


@pytest.mark.parametrize("stage", ["kto", "distill"])
def test_what_a_stage_computes_or_samples_on_the_way_is_of_the_tuned_model(stage, base, memory, judged, tmp_path):
    values = {"optimizer": QUICK, "lora": LORA}
    inputs = {"policy": base, "data": judged, "tokenizer": base}
    if stage == "kto":
        config = settings(preference, loss="kto", beta=2.0, heldout_fraction=0.0, **values)
        metrics, made = perform(preference, config, tmp_path / "kto", memory, **inputs, reference=base)
        # The reference point is the policy's distance from where it started: 0 while the adapter is.
        lines = lines_of(made)
        assert lines[0]["kl"] == 0.0 and metrics["kl"] > 1e-3
    else:
        table = data(tmp_path / "d", sft=rows_of("sft", 32))
        teacher = perform(sft, settings(sft), tmp_path / "teacher", memory, base=base, data=table, tokenizer=base)[1]
        config = settings(distill, on_policy=1.0, max_tokens=4, heldout_fraction=0.25, **values)
        metrics, made = perform(distill, config, tmp_path / "distill", memory, **inputs, teacher=teacher)
        assert metrics["heldout_divergence"] < 0.9 * metrics["heldout_divergence_before"]
    assert (made.path / "adapter" / "adapter_model.safetensors").is_file()
    assert metrics["trained_parameters"] < 20_000


def test_a_killed_stage_goes_on_with_its_adapter(base, memory, tmp_path):
    table = data(tmp_path / "data", sft=rows_of("sft", 32))
    inputs = {"base": base, "data": table, "tokenizer": base}
    config = settings(sft, optimizer=QUICK, lora=LORA, checkpoint_every=2)
    whole = perform(sft, config, tmp_path / "whole", memory, **inputs)[1]
    merged = fingerprint(memory["decoder:new"][1])
    # Checkpoints of the first try; the second finds them under `work`.
    second = tmp_path / "second"
    second.mkdir()
    (tmp_path / "whole" / "work").rename(second / "work")
    resumed = perform(sft, config, second, memory, **inputs)[1]
    name = "adapter/adapter_model.safetensors"
    assert (resumed.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert fingerprint(memory["decoder:new"][1]) == merged


def test_settings_of_an_adapter():
    assert lora_config(Lora()).targets == PROJECTIONS
    assert lora_config(Lora(targets=["v", "q"], rank=9, use_rslora=True)).scale == pytest.approx(32 / 3)
    with pytest.raises(ValueError, match="targets"):
        Lora(targets=["query"])
    with pytest.raises(ValueError, match="rank"):
        Lora(rank=0)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_with_quantised_kernels_the_reference_is_the_quantised_model(kind, base, memory, judged, tmp_path):
    inputs = {"policy": base, "data": judged, "tokenizer": base, "reference": base}
    config = settings(preference, optimizer=QUICK, lora=LORA | {"quantize": kind})
    metrics, made = perform(preference, config, tmp_path / "dpo", memory, **inputs)
    lines = lines_of(made)
    # Before the first step the policy is the reference: every margin is 0.
    assert metrics["heldout_loss_before"] == pytest.approx(np.log(2), rel=1e-5)
    assert lines[0]["loss"] == pytest.approx(np.log(2), rel=1e-5) and abs(lines[0]["margin"]) < 1e-5
