"""What runs inside other people's servers: it brings nothing of this project, and reads again what a model holds."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tests.support import python
from tuning.rollout.inside.rlhf_weights.arriving import Arriving, PushRefused
from tuning.rollout.inside.rlhf_weights.frames import Fingerprint, Kind, buckets
from tuning.rollout.servers.kinds import KINDS
from tuning.rollout.servers.vllm import INSIDE

TENSORS = {
    "a": np.arange(24, dtype=np.float32).reshape(6, 4),
    "b": np.arange(5, dtype=np.float32),
    "c": np.ones((3, 2), np.float32),
}


def test_it_is_imported_by_its_own_name_and_loads_neither_this_project_nor_jax(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", KINDS["vllm"].environment(streams=True)["PYTHONPATH"])
    code = "import sys, rlhf_weights.routes, rlhf_weights.arriving; "
    code += "print(sorted({m.partition('.')[0] for m in sys.modules} & {'tuning', 'stages', 'flows', 'jax', 'httpx'}))"
    process = python(code)
    out, error = process.communicate()
    assert process.returncode == 0, error
    assert out.strip() == "[]"


def test_pythonpath_of_a_started_server_keeps_what_the_worker_has(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert KINDS["vllm"].environment(streams=True)["PYTHONPATH"] == f"{INSIDE}:/mine"
    assert "PYTHONPATH" not in KINDS["vllm"].environment()


@pytest.mark.parametrize("most", [16, 40, 10**6])
def test_tensors_are_put_together_from_buckets_of_any_size(most):
    seen, arriving, found = Fingerprint(), Arriving("1", "policy"), {}
    for bucket in buckets(TENSORS.items(), most, seen):
        found |= {name: (kind, bytes(data)) for name, kind, data in arriving.add(bucket)}
    assert found == {n: (Kind("float32", v.shape), v.tobytes()) for n, v in TENSORS.items()}
    arriving.check(seen.hexdigest())
    assert arriving.given["b"] == (Kind("float32", (5,)), hashlib.sha256(TENSORS["b"].tobytes()).hexdigest())
    with pytest.raises(PushRefused, match="the fingerprint of what came is"):
        arriving.check("0" * 64)


def test_half_a_tensor_is_no_whole_push():
    arriving = Arriving("1", "policy")
    arriving.add(next(buckets(TENSORS.items(), 16)))
    with pytest.raises(PushRefused, match="a ends with row 1 of 6: push again"):
        arriving.check("")


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def model(torch):
    """Two layers as vLLM has them: one fused, one plain with a padded vocabulary; and what they were given."""

    class Method:
        def process_weights_after_loading(self, layer):
            layer.weight = torch.nn.Parameter(torch.empty(0))

    class Made(torch.nn.Module):
        packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    made, layer = Made(), torch.nn.Module()
    layer.qkv_proj = torch.nn.Linear(4, 8)
    layer.qkv_proj.output_sizes = [4, 2, 2]
    layer.qkv_proj.quant_method = Method()
    made.layer, made.embed = layer, torch.nn.Embedding(8, 4)
    given = {"embed.weight": made.embed.weight[:6]}
    for leaf in ("weight", "bias"):
        parts = getattr(layer.qkv_proj, leaf).split([4, 2, 2])
        given |= {f"layer.{name}.{leaf}": x for name, x in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True)}
    return made, {name: told(torch, value) for name, value in given.items()}


def told(torch, value):
    data = value.detach().contiguous()
    digest = hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy()).hexdigest()
    return Kind("float32", tuple(data.shape)), digest


@pytest.mark.parametrize("packed", [False, True])
def test_fused_and_padded_tensors_are_read_again_before_a_platform_packs_them(torch, model, packed):
    from tuning.rollout.inside.rlhf_weights.vllm import Held

    made, given = model
    held, projection = Held(made), made.layer.qkv_proj
    end = held.watch(given)
    if packed:
        projection.quant_method.process_weights_after_loading(projection)
        assert projection.weight.numel() == 0
    end()
    assert vars(projection.quant_method) == {}
    assert held.apart(given) == (7, [])


@pytest.mark.parametrize("packed", [False, True])
def test_one_number_that_is_another_is_named(torch, model, packed):
    from tuning.rollout.inside.rlhf_weights.vllm import Held

    made, given = model
    held, projection = Held(made), made.layer.qkv_proj
    with torch.no_grad():
        projection.weight[5, 1] += 1
    end = held.watch(given)
    if packed:
        projection.quant_method.process_weights_after_loading(projection)
    end()
    assert held.apart(given) == (7, ["layer.k_proj.weight"])


def test_a_worker_of_several_compares_what_it_has_whole(torch, model):
    from tuning.rollout.inside.rlhf_weights.vllm import Held

    made, given = model
    made.layer.qkv_proj.tp_size = 2
    assert Held(made).apart(given) == (1, [])


def test_layers_are_known_by_their_parameters_whatever_these_are_called():
    pytest.importorskip("torch")
    from tuning.rollout.inside.rlhf_weights.vllm import layers_of

    quantised = ["model.layers.0.mlp.down_proj.weight_scale", "model.layers.11.mlp.down_proj.qweight", "lm_head.weight"]
    assert layers_of(quantised) == {0, 11}
    assert layers_of(["model.layers.1.input_layernorm.weight", "model.language.layers.2.norm.weight"]) == {1, 2}


def test_a_commit_that_a_worker_is_asked_again_is_told_apart_and_another_is_refused():
    pytest.importorskip("torch")
    from tuning.rollout.inside.rlhf_weights.vllm import Worker

    worker = Worker()
    worker.rlhf_last, worker.rlhf_given = ("number", "policy"), "print"
    assert worker.rlhf_commit("number", "print") == {"policy": "policy", "again": True}
    for number, fingerprint in (("number", "other"), ("other", "print")):
        assert worker.rlhf_commit(number, fingerprint)["status"] == 404
    # Weights have come in another way since.
    assert worker.rlhf_drop() == {"intact": False}
    assert worker.rlhf_commit("number", "print")["status"] == 404
