"""Weights of an engine from a model folder."""

import dataclasses

import jax
import pytest

from rlhf.tuning.models.config import UnsupportedModel
from rlhf.tuning.models.huggingface import load_decoder, random_params, save_decoder
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.folder import load_folder
from rlhf.tuning.rollout.engine.limits import Limits
from rlhf.tuning.rollout.requests import Request
from tests.tuning.tiny import CONFIG


def saved(path, config):
    params = jax.tree.map(lambda x: x + 0.1, random_params(config, 3))
    save_decoder(path, config, params, {})
    return path


def test_completions_are_those_of_the_parameters(tmp_path):
    requests = [Request([5, 6, 7], 6, counter=0), Request([8] * 9, 6, counter=1)]
    read, loaded = (Engine(CONFIG, limits=Limits(slots=2, chunks=(16,))) for _ in range(2))
    load_folder(read, saved(tmp_path, CONFIG))
    loaded.load(load_decoder(tmp_path)[1])
    assert dict(read.run(requests)) == dict(loaded.run(requests))


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
