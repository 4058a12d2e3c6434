"""A model folder read straight into the layout of decoding holds the weights that its parameters would."""

import dataclasses

import jax
import numpy as np
import pytest

from rlhf.tuning.models.config import UnsupportedModel
from rlhf.tuning.models.huggingface import load_decoder, random_params, save_decoder
from rlhf.tuning.rollout.engine import folder
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.requests import Request
from tests.tuning.tiny import CONFIG

QWEN = dataclasses.replace(CONFIG, family="qwen2", tie_embeddings=False, qkv_bias=True)


def saved(path, config, dtype="float32"):
    params = jax.tree.map(lambda x: x + 0.1, random_params(config, 3))
    save_decoder(path, config, params, {}, dtype=dtype)
    return path


LLAMA = dataclasses.replace(CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True)


@pytest.mark.parametrize("config", [CONFIG, QWEN, LLAMA], ids=["tied", "with a head", "with all biases"])
@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_the_weights_are_those_of_the_parameters(tmp_path, config, stored, dtype):
    read, loaded = Engine(config, dtype), Engine(config, dtype)
    folder.load_folder(read, saved(tmp_path, config, stored))
    loaded.load(load_decoder(tmp_path)[1])
    assert read.weights.now[0] == loaded.weights.now[0]
    assert jax.tree.map(lambda x: x.dtype, read.weights.now[1]) == jax.tree.map(
        lambda x: x.dtype, loaded.weights.now[1]
    )
    jax.tree.map(np.testing.assert_array_equal, read.weights.now[1], loaded.weights.now[1])


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_completions_are_those_of_the_parameters(tmp_path, quantization):
    requests = [Request([5, 6, 7], 6, counter=0), Request([8] * 9, 6, counter=1)]
    read, loaded = (Engine(CONFIG, limits=Limits(slots=2, chunks=(16,)), quantization=quantization) for _ in range(2))
    folder.load_folder(read, saved(tmp_path, CONFIG))
    loaded.load(load_decoder(tmp_path)[1])
    assert dict(read.run(requests)) == dict(loaded.run(requests))


def test_a_folder_of_another_model_is_refused(tmp_path):
    engine = Engine(dataclasses.replace(CONFIG, rope_theta=CONFIG.rope_theta + 1))
    with pytest.raises(UnsupportedModel, match="holds another model than this engine's"):
        folder.load_folder(engine, saved(tmp_path, CONFIG))


def test_a_folder_that_lacks_a_tensor_leaves_the_engine_the_weights_that_it_has(tmp_path):
    engine = Engine(CONFIG)
    folder.load_folder(engine, saved(tmp_path, CONFIG))
    before = engine.weights.now
    short = dataclasses.replace(CONFIG, num_layers=CONFIG.num_layers - 1)
    config = (tmp_path / "config.json").read_bytes()
    saved(tmp_path, short)
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(UnsupportedModel, match="tensors missing, first model.layers.1"):
        folder.load_folder(engine, tmp_path)
    assert engine.weights.now is before
