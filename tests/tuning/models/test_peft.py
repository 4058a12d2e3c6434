"""Adapter folders hold a trained tree bit for bit, under the names of PEFT."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from rlhf.tuning.models.huggingface import random_params, scalar_head_params
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.models.lora import LoraConfig, tune
from rlhf.tuning.models.peft import save_adapter
from tests.tuning.models.adapters import load_adapter
from tests.tuning.models.support import PARAMS, moved
from tests.tuning.tiny import CONFIG


@pytest.fixture
def folder(tmp_path):
    lora = LoraConfig(rank=3, alpha=5.0, targets=("q", "down"), use_rslora=True)
    save_adapter(tmp_path, moved(tune(CONFIG, "decoder", PARAMS, lora, seed=1)[0]), lora, "the-base")
    return tmp_path


def test_the_folder_has_the_names_and_shapes_of_peft(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == CONFIG.num_layers * 2 * 2
    prefix = "base_model.model.model.layers.1."
    assert tensors[prefix + "self_attn.q_proj.lora_A.weight"].shape == (3, CONFIG.hidden_size)
    assert tensors[prefix + "mlp.down_proj.lora_B.weight"].shape == (CONFIG.hidden_size, 3)
    values = json.loads((folder / "adapter_config.json").read_text())
    assert values["target_modules"] == ["q_proj", "down_proj"] and values["use_rslora"]
    assert (values["r"], values["lora_alpha"], values["base_model_name_or_path"]) == (3, 5.0, "the-base")


def test_joined_projections_are_targets_where_all_of_their_parts_are(tmp_path):
    config = dataclasses.replace(CONFIG, family="phi3", joined=True)
    params = random_params(config, 0)
    lora = LoraConfig(rank=2, targets=("q", "k", "v", "down"))
    trainable, _ = tune(config, "decoder", params, lora, seed=1)
    assert set(trainable["layers"]) == {"qkv", "down"}
    save_adapter(tmp_path, trainable, lora)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["down_proj", "qkv_proj"]
    with pytest.raises(
        ValueError, match="lora.targets: q, k, v are one projection of this model: name all of them or none"
    ):
        tune(config, "decoder", params, dataclasses.replace(lora, targets=("q", "v")), seed=1)


@pytest.mark.parametrize("role", ["decoder", "scalar"])
def test_a_folder_holds_the_adapter_bit_for_bit(role, tmp_path):
    params = PARAMS if role == "decoder" else scalar_head_params(CONFIG, PARAMS, jnp.arange(float(CONFIG.hidden_size)))
    lora = LoraConfig(rank=3, targets=("v", "o", "gate"))
    trainable = moved(tune(CONFIG, role, params, lora, seed=1)[0])
    save_adapter(tmp_path, trainable, lora)
    found, again = load_adapter(tmp_path, CONFIG)
    assert found == lora and fingerprint(again) == fingerprint(trainable)
    assert jax.tree.structure(again) == jax.tree.structure(trainable)
