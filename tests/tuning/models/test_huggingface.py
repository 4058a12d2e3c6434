"""Folders that transformers and this project read alike."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from rlhf.tuning.axes import Axes
from rlhf.tuning.mesh import make_mesh
from rlhf.tuning.models import huggingface as hf
from rlhf.tuning.models import tensors
from rlhf.tuning.models.attention import packed_attention
from rlhf.tuning.models.config import DecoderConfig, UnsupportedModel
from rlhf.tuning.models.config_json import to_hugging_face
from rlhf.tuning.models.decoder import decoder_graph
from rlhf.tuning.models.identity import fingerprint
from rlhf.tuning.models.sharding import shardings
from tests.tuning.models.named import params_from_tensors, tensors_from_params

torch = pytest.importorskip("torch", reason="parity needs torch")


def config(tied: bool) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=101, hidden_size=48, intermediate_size=80, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=16,
        rope_theta=5000.0, norm_eps=1e-4, tie_embeddings=tied, max_positions=128,
    )  # fmt: skip


def saved(folder, tied=True, **options):
    """The parameters of a model that is written to the folder."""
    params = hf.random_params(config(tied), 1)
    hf.save_decoder(folder, config(tied), params, {}, **options)
    return params


TOKENS = np.random.default_rng(0).integers(0, 101, (2, 17))


def forward(graph, params, tokens):
    decoder = nnx.merge(graph, params)
    ones = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = decoder(tokens, positions, packed_attention(ones, 0 * ones))
    return hidden @ decoder.head_weight().T


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_with_a_head_of_its_own_computes_the_same(tied, tmp_path):
    params = hf.random_params(config(tied), 1)
    hf.save_decoder(tmp_path, *hf.untied(config(tied), params), {})
    cfg, again = hf.load_decoder(tmp_path)
    assert cfg == config(False)
    found = forward(decoder_graph(cfg), again, jnp.asarray(TOKENS))
    np.testing.assert_array_equal(found, forward(decoder_graph(config(tied)), params, jnp.asarray(TOKENS)))


def test_missing_and_foreign_tensors_are_named(tmp_path):
    params = hf.random_params(config(True), 1)
    named = tensors_from_params(config(True), nnx.to_pure_dict(params))
    gone = {k: v for k, v in named.items() if "layers.1.mlp.up" not in k}
    with pytest.raises(UnsupportedModel, match="1 tensors missing, first model.layers.1.mlp.up_proj.weight"):
        params_from_tensors(config(True), gone)
    with pytest.raises(UnsupportedModel, match="unexpected tensor model.layers.0.extra"):
        params_from_tensors(config(True), named | {"model.layers.0.extra": np.ones(2)})
    bent = named | {"model.layers.1.mlp.up_proj.weight": np.ones((3, 5), np.float32)}
    with pytest.raises(UnsupportedModel, match=r"up_proj.weight has shape \(3, 5\), the config asks for \(80, 48\)"):
        params_from_tensors(config(True), bent)


def test_another_type_is_saved_rounded_once_and_loads_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    params = saved(tmp_path, tied=False, dtype="bfloat16")
    _, again = hf.load_decoder(tmp_path)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert fingerprint(again) == fingerprint(rounded)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    kernel = nnx.to_pure_dict(rounded)["layers"]["q"]["kernel"][2]
    np.testing.assert_array_equal(model.model.layers[2].self_attn.q_proj.weight.float().detach().numpy().T, kernel)


def test_saving_again_replaces_shards_of_before(tmp_path):
    params = saved(tmp_path, shard_bytes=30_000)
    assert (tmp_path / tensors.INDEX).is_file()
    hf.save_decoder(tmp_path, config(True), params, {})
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["config.json", "model.safetensors"]


def test_a_shard_that_is_missing_is_named(tmp_path):
    saved(tmp_path, shard_bytes=30_000)
    gone = sorted(tmp_path.glob("model-00002-*"))[0]
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=f"names {gone.name}, which is not there"):
        hf.load_decoder(tmp_path)


def again_with(path, **changed):
    """Writes a file once more with other values of some tensors."""
    save_file(load_file(path) | changed, path)


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path):
    params = saved(tmp_path, shard_bytes=30_000)
    first = "model.layers.0.input_layernorm.weight"
    for path in tmp_path.glob("*.safetensors"):
        if first not in load_file(path):
            again_with(path, **{first: np.full(48, 9, np.float32)})
    assert fingerprint(hf.load_decoder(tmp_path)[1]) == fingerprint(params)


def test_a_tensor_that_two_files_have_is_refused_without_an_index(tmp_path):
    saved(tmp_path, shard_bytes=30_000)
    (tmp_path / tensors.INDEX).unlink()
    hf.load_decoder(tmp_path)
    again_with(sorted(tmp_path.glob("*.safetensors"))[0], **{"model.norm.weight": np.full(48, 9, np.float32)})
    with pytest.raises(UnsupportedModel, match="model.norm.weight is in another file of the folder too"):
        hf.load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-00002-of-00017.safetensors", "not a readable safetensors file"),
        (tensors.INDEX, "not readable as JSON"),
        ("config.json", "not readable as JSON"),
    ],
)
def test_a_file_that_was_cut_short_is_named(tmp_path, name, message):
    saved(tmp_path, shard_bytes=30_000)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        hf.load_decoder(tmp_path)


@pytest.mark.parametrize("files", [None, [], {"model.norm.weight": 1}, {"model.norm.weight": "../model.safetensors"}])
def test_an_index_names_files_of_its_folder(tmp_path, files):
    saved(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "model" / tensors.INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ValueError, match=f"{tensors.INDEX} has no readable weight_map"):
        hf.load_decoder(tmp_path / "model")


def test_a_classifier_of_several_labels_is_no_reward_model(tmp_path):
    hf.save_decoder(tmp_path, config(True), hf.scalar_head_params(config(True), hf.random_params(config(True), 1)), {})
    again_with(tmp_path / "model.safetensors", **{tensors.SCORE: np.ones((2, 48), np.float32)})
    with pytest.raises(UnsupportedModel, match=r"score.weight has shape \(2, 48\), a reward model has \(1, 48\)"):
        hf.load_scalar_head(tmp_path)


def test_files_beside_the_model_are_not_read(tmp_path):
    """Some repositories hold the weights twice, the second time under another layout's names."""
    params = saved(tmp_path)
    save_file({"tok_embeddings.weight": np.ones(2, np.float32)}, tmp_path / "consolidated.safetensors")
    assert fingerprint(hf.load_decoder(tmp_path)[1]) == fingerprint(params)


def test_quantised_tensors_are_refused(tmp_path):
    saved(tmp_path)
    save_file({"model.norm.weight": np.ones(48, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="model.norm.weight is of type I8"):
        hf.load_decoder(tmp_path)


def test_parameters_land_where_the_mesh_says(tmp_path):
    params = saved(tmp_path, tied=False)
    mesh = make_mesh(Axes(), jax.devices()[:1])
    _, placed = hf.load_decoder(tmp_path, mesh)
    where = jax.tree.leaves(shardings(params, mesh))
    assert [x.sharding for x in jax.tree.leaves(placed)] == where
    assert fingerprint(placed) == fingerprint(params)


def test_matrices_may_be_loaded_in_the_type_of_computation(tmp_path):
    saved(tmp_path, tied=False)
    _, wide = hf.load_decoder(tmp_path)
    _, narrow = hf.load_decoder(tmp_path, dtype="bfloat16")
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(narrow)):
        kind = jnp.float32 if "norm" in jax.tree_util.keystr(path) else jnp.bfloat16
        assert leaf.dtype == kind, path
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), narrow, wide)


def test_loading_holds_one_parameter_on_the_host(tmp_path, monkeypatch):
    saved(tmp_path, tied=False, shard_bytes=30_000)
    held, most = set(), []

    def aligned(shape, dtype):
        array = np.zeros(shape, dtype)
        held.add(id(array))
        most.append(len(held))
        return array

    def put(array):
        held.remove(id(array))
        return jnp.array(array)

    monkeypatch.setattr(tensors, "_aligned", aligned)
    monkeypatch.setattr(tensors.jax, "device_put", put)
    hf.load_decoder(tmp_path)
    assert len(most) == 12 and max(most) == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only memory of the host can be taken as it is")
def test_what_is_read_is_not_copied_again_on_cpu(tmp_path, monkeypatch):
    saved(tmp_path, tied=False)
    same, put = [], jax.device_put

    def device_put(array):
        placed = put(array)
        same.append(placed.unsafe_buffer_pointer() == array.ctypes.data)
        return placed

    monkeypatch.setattr(tensors.jax, "device_put", device_put)
    hf.load_decoder(tmp_path)
    assert same == [True] * 12


def test_a_folder_without_a_model_says_what_it_lacks(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        hf.load_decoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(config(True))))
    with pytest.raises(FileNotFoundError, match="holds no"):
        hf.load_decoder(tmp_path)


def test_a_copied_folder_keeps_the_type_of_each_tensor_and_drops_what_is_not_read(tmp_path):
    source, copied = tmp_path / "source", tmp_path / "copied"
    saved(source, dtype="bfloat16")
    with tensors.Tensors(source) as read:
        named = {name: read.read(name) for name in read.shapes}
    norms = {name: value.astype(np.float32) for name, value in named.items() if "norm" in name}
    more = {"lm_head.weight": named["model.embed_tokens.weight"], "x.rotary_emb.inv_freq": np.ones(2, np.float32)}
    save_file(named | norms | more, source / "model.safetensors")
    cfg, count = hf.copy_decoder(source, copied, {"eos_token_id": 2}, shard_bytes=30_000)
    assert cfg == config(True) and count == sum(x.size for x in named.values())
    assert len(list(copied.glob("*.safetensors"))) > 2
    about = json.loads((copied / "config.json").read_text())
    assert about["torch_dtype"] == "bfloat16" and about["eos_token_id"] == 2
    with tensors.Tensors(copied) as read:
        assert read.kinds == {name: "F32" if name in norms else "BF16" for name in named}
    assert fingerprint(hf.load_decoder(copied)[1]) == fingerprint(hf.load_decoder(source)[1])


def test_a_folder_that_lacks_a_tensor_is_not_copied(tmp_path):
    saved(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 4}))
    with pytest.raises(UnsupportedModel, match="9 tensors missing, first model.layers.3.input_layernorm.weight"):
        hf.copy_decoder(tmp_path, tmp_path / "copied", {})
    assert not (tmp_path / "copied").exists()


def test_each_tensor_is_written_in_the_type_that_it_has_elsewhere(tmp_path):
    decoder = config(True)
    params = hf.random_params(decoder, 0)
    wide = {name: "float32" for name in tensors_from_params(decoder, nnx.to_pure_dict(params)) if "norm" in name}
    hf.save_decoder(tmp_path, decoder, params, {}, dtype="bfloat16", types=wide)
    with tensors.Tensors(tmp_path) as written:
        kinds = dict(written.kinds)
        assert {kinds[name] for name in wide} == {"F32"} and {k for n, k in kinds.items() if n not in wide} == {"BF16"}
        for name, values in tensors_from_params(decoder, nnx.to_pure_dict(params)).items():
            np.testing.assert_array_equal(written.read(name), values.astype(jnp.dtype(wide.get(name, "bfloat16"))))
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
