"""A model folder read straight into the layout of decoding gives the weights of its parameters, and holds them once."""

import dataclasses
import gc

import jax
import numpy as np
import pytest

from rlhf.tuning.models import tensors
from rlhf.tuning.models.config import UnsupportedModel
from rlhf.tuning.models.huggingface import load_decoder, random_params, save_decoder
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.folder import load_folder
from rlhf.tuning.rollout.engine.paged.engine import PagedEngine
from tests.tuning.tiny import CONFIG

QWEN = dataclasses.replace(CONFIG, family="qwen2", tie_embeddings=False, qkv_bias=True)
LLAMA = dataclasses.replace(CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True)


def saved(path, config, dtype="float32"):
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), random_params(config, 3))
    save_decoder(path, config, params, {}, dtype=dtype)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, QWEN, LLAMA], ids=["tied", "with a head", "with all biases"])
@pytest.mark.parametrize("kind", [Engine, PagedEngine], ids=["rolled", "unrolled"])
@pytest.mark.parametrize(
    ("stored", "dtype", "quantization"),
    [
        ("float32", "float32", "none"),
        ("float32", "float32", "int8"),
        ("float32", "bfloat16", "none"),
        ("bfloat16", "bfloat16", "none"),
    ],
)
def test_the_weights_are_those_of_the_parameters(tmp_path, config, kind, stored, dtype, quantization):
    read, loaded = (kind(config, dtype, quantization=quantization) for _ in range(2))
    load_folder(read, saved(tmp_path, config, stored))
    loaded.load(load_decoder(tmp_path)[1])
    assert read.weights.now[0] == loaded.weights.now[0]
    assert types(read) == types(loaded)
    jax.tree.map(np.testing.assert_array_equal, read.weights.now[1], loaded.weights.now[1])


def types(engine):
    return jax.tree.map(lambda x: (x.shape, x.dtype), engine.weights.now[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Engine, PagedEngine], ids=["rolled", "unrolled"])
def test_memory_holds_the_weights_once(tmp_path, kind, monkeypatch):
    engine, folder, read, seen = kind(CONFIG), saved(tmp_path, CONFIG), tensors._read, []
    gc.collect()
    beside = held()

    def watched(*arguments):
        seen.append(held() - beside)
        return read(*arguments)

    monkeypatch.setattr(tensors, "_read", watched)
    gc.disable()
    try:
        # The second time there are weights before.
        for _ in range(2):
            load_folder(engine, folder)
            assert held() - beside == engine.weights.nbytes
    finally:
        gc.enable()
    assert 0 < max(seen) < engine.weights.nbytes


def held():
    return sum(x.nbytes for x in jax.live_arrays())


def test_a_folder_of_another_model_is_refused(tmp_path):
    engine = Engine(dataclasses.replace(CONFIG, rope_theta=CONFIG.rope_theta + 1))
    with pytest.raises(UnsupportedModel, match="holds another model than this engine's"):
        load_folder(engine, saved(tmp_path, CONFIG))


def test_a_folder_that_lacks_a_tensor_leaves_the_engine_the_weights_that_it_has(tmp_path):
    engine = Engine(CONFIG)
    load_folder(engine, saved(tmp_path, CONFIG))
    before = engine.weights.now
    short = dataclasses.replace(CONFIG, num_layers=CONFIG.num_layers - 1)
    config = (tmp_path / "config.json").read_bytes()
    saved(tmp_path, short)
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(UnsupportedModel, match="tensors missing, first model.layers.1"):
        load_folder(engine, tmp_path)
    assert engine.weights.now is before


def test_a_head_that_is_not_the_engines_is_refused(tmp_path):
    engine = Engine(CONFIG)
    saved(tmp_path, dataclasses.replace(CONFIG, tie_embeddings=False))
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.raises(UnsupportedModel, match="holds another model than this engine's"):
        load_folder(engine, tmp_path)
