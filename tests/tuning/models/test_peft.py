"""Adapter folders: bit for bit there and back, and a refusal of what would be guessed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.tuning.models.support import PARAMS, moved
from tests.tuning.tiny import CONFIG
from tuning.models.config import UnsupportedModel
from tuning.models.huggingface import scalar_head_params
from tuning.models.identity import fingerprint
from tuning.models.lora import LoraConfig, tune
from tuning.models.peft import load_adapter, save_adapter


@pytest.fixture
def folder(tmp_path):
    lora = LoraConfig(rank=3, alpha=5.0, targets=("q", "down"), use_rslora=True)
    save_adapter(tmp_path, moved(tune(CONFIG, "decoder", PARAMS, lora, seed=1)[0]), lora, "the-base")
    return tmp_path


def change(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_folder_has_the_names_and_shapes_of_peft(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == CONFIG.num_layers * 2 * 2
    prefix = "base_model.model.model.layers.1."
    assert tensors[prefix + "self_attn.q_proj.lora_A.weight"].shape == (3, CONFIG.hidden_size)
    assert tensors[prefix + "mlp.down_proj.lora_B.weight"].shape == (CONFIG.hidden_size, 3)
    values = json.loads((folder / "adapter_config.json").read_text())
    assert values["target_modules"] == ["q_proj", "down_proj"] and values["use_rslora"]
    assert (values["r"], values["lora_alpha"], values["base_model_name_or_path"]) == (3, 5.0, "the-base")


@pytest.mark.parametrize("role", ["decoder", "scalar"])
def test_an_adapter_comes_back_bit_for_bit(role, tmp_path):
    params = PARAMS if role == "decoder" else scalar_head_params(CONFIG, PARAMS, jnp.arange(float(CONFIG.hidden_size)))
    lora = LoraConfig(rank=3, targets=("v", "o", "gate"))
    trainable = moved(tune(CONFIG, role, params, lora, seed=1)[0])
    save_adapter(tmp_path, trainable, lora)
    found, again = load_adapter(tmp_path, CONFIG)
    assert found == lora and fingerprint(again) == fingerprint(trainable)
    assert jax.tree.structure(again) == jax.tree.structure(trainable)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', supported is 'LORA'"),
        ({"use_dora": True}, "adapter_config.json: use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
        ({"r": "3"}, "adapter_config.json: r is '3', expected int"),
        ({"lora_alpha": "5"}, "lora_alpha is '5', expected int or float"),
        ({"use_rslora": "false"}, "use_rslora is 'false', expected bool"),
        ({"r": 4}, r"down_proj.lora_A.weight has shape \(3, 128\), rank 4 and the model ask for \(4, 128\)"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(folder, values, message):
    change(folder, **values)
    with pytest.raises(UnsupportedModel, match=message):
        load_adapter(folder, CONFIG)


def test_missing_and_foreign_tensors_are_named(folder, tmp_path):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    key = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    for bent, message in [
        ({k: v for k, v in tensors.items() if k != key}, "layers.1.mlp.down_proj.lora_B.weight is missing"),
        (tensors | {key.replace("layers.1", "layers.9"): tensors[key]}, "layers.9.* does not have"),
        (
            tensors | {"base_model.model.lm_head.lora_A.weight": np.ones((3, 2), np.float32)},
            "unexpected tensor .*lm_head",
        ),
    ]:
        save_file(bent, path)
        with pytest.raises(UnsupportedModel, match=message):
            load_adapter(folder, CONFIG)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="adapter_model.safetensors is missing"):
        load_adapter(folder, CONFIG)
