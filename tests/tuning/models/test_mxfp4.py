"""Checkpoints of gpt-oss with experts in MXFP4: their numbers, a folder of them, and refusals."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf.tuning.models.config import UnsupportedModel
from rlhf.tuning.models.config_json import from_hugging_face
from rlhf.tuning.models.huggingface import copy_decoder, load_decoder, random_params, save_decoder
from rlhf.tuning.models.tensors import Tensors

SIZES = {
    "model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 3,
    "num_experts_per_tok": 2, "sliding_window": 8,
}  # fmt: skip
NAME = "model.layers.1.mlp.experts.gate_up_proj"


def packed(experts, size_in, size_out):
    draw = np.random.default_rng(size_out).integers
    blocks = draw(0, 256, (experts, size_out, size_in // 32, 16), np.uint8)
    return {"_blocks": blocks, "_scales": draw(110, 130, (experts, size_out, size_in // 32), np.uint8)}


@pytest.fixture
def folder(tmp_path):
    """A folder as OpenAI publishes them."""
    config = from_hugging_face(SIZES, "here")
    save_decoder(tmp_path, config, random_params(config, 0), {}, dtype="bfloat16")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors |= {name + end: part for end, part in packed(*tensors.pop(name).shape).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (tmp_path / "config.json").write_text(json.dumps(values | quantization))
    return tmp_path


def test_numbers_are_those_of_transformers(folder):
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = load_file(folder / "model.safetensors")
    parts = [torch.tensor(stored[NAME + end]) for end in ("_blocks", "_scales")]
    expected = convert_moe_packed_tensors(*parts).float().numpy()
    with Tensors(folder) as tensors:
        assert (tensors.kinds[NAME], tensors.shapes[NAME]) == ("BF16", (3, 32, 128))
        np.testing.assert_array_equal(tensors.read(NAME).astype(np.float32), expected)
        for cut in (np.s_[1:3, 5:20, :], np.s_[:1, :, 64:], np.s_[2:3, 31:32, 7:9]):
            np.testing.assert_array_equal(tensors.read(NAME, cut).astype(np.float32), expected[cut])


def test_a_folder_becomes_one_of_bfloat16_with_the_same_numbers(folder, tmp_path):
    config, count = copy_decoder(folder, tmp_path / "copy", {})
    assert "quantization_config" not in json.loads((tmp_path / "copy" / "config.json").read_text())
    (first, params), (second, again) = load_decoder(folder), load_decoder(tmp_path / "copy")
    assert first == second == config
    assert count == sum(x.size for x in jax.tree.leaves(params))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), params, again))


def test_incomplete_pairs_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors[NAME + "_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=rf"{NAME} has blocks \(3, 128, 1, 16\) and scales \(\)"):
        Tensors(folder)
