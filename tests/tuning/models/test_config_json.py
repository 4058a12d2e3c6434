"""`config.json` of every family: transformers' defaults, both layouts, and a refusal by name of what is not known."""

import pytest

from rlhf.tuning.models.config import DecoderConfig, UnsupportedModel
from rlhf.tuning.models.config_json import from_hugging_face, to_hugging_face
from rlhf.tuning.models.rope import RopeScaling

SIZES = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 7, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CLASSES = {
    "llama": "Llama", "smollm3": "SmolLM3", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "olmo2": "Olmo2", "olmo3": "Olmo3", "granite": "Granite", "gemma": "Gemma", "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe", "gpt_oss": "GptOss",
    "phi3": "Phi3", "qwen2_moe": "Qwen2Moe", "glm4_moe": "Glm4Moe",
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


# Fields whose defaults are refused.
NEEDED = {"glm4_moe": {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}


def read(family: str, **changes) -> DecoderConfig:
    return from_hugging_face(SIZES | {"model_type": family} | NEEDED.get(family, {}) | changes, "here/config.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in CLASSES),
        ("llama", {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 3}),
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.02, "sliding_window": 9}),
        ("qwen3_moe", {"num_experts": 16, "norm_topk_prob": True, "output_router_logits": True}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("olmo3", {"rope_theta": 2e3, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}),
        ("granite", {"logits_scaling": 8.0, "residual_multiplier": 0.22}),
        ("phi3", {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16}),
        ("glm4_moe", {"use_qk_norm": True, "n_shared_experts": 3, "partial_rotary_factor": 0.25}),
        (
            "gemma3_text",
            {"rope_theta": 7e5, "rope_local_base_freq": 99.0, "rope_scaling": {"rope_type": "linear", "factor": 8}},
        ),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}),
    ],
)
def test_what_a_file_leaves_out_is_what_transformers_assumes(family, changes):
    """A short old file, and the whole of what transformers makes of it, mean the same."""
    transformers = pytest.importorskip("transformers")
    changes |= NEEDED.get(family, {})
    whole = getattr(transformers, f"{CLASSES[family]}Config")(**SIZES, **changes).to_dict()
    assert read(family, **changes) == from_hugging_face(whole, "whole")


@pytest.mark.parametrize("family", CLASSES)
def test_written_values_read_back_equal(family):
    config = read(family)
    assert from_hugging_face(to_hugging_face(config, bos_token_id=1), "again") == config


def test_gemma3_of_the_hub():
    """The values that differ from layer to layer, as google/gemma-3-270m and -1b have them."""
    config = read(
        "gemma3_text", head_dim=256, num_hidden_layers=12, sliding_window=512, sliding_window_pattern=6,
        rope_theta=1000000, rope_local_base_freq=10000, rope_scaling=None, query_pre_attn_scalar=256,
        attn_logit_softcapping=None, final_logit_softcapping=None, hidden_activation="gelu_pytorch_tanh",
        cache_implementation="hybrid", torch_dtype="bfloat16", eos_token_id=[1, 106],
    )  # fmt: skip
    assert config.sliding_layers == (True,) * 5 + (False,) + (True,) * 5 + (False,)
    assert (config.rope_theta, config.local_rope_theta, config.sliding_window) == (1e6, 1e4, 512)
    assert (config.query_scale, config.final_softcap, config.tie_embeddings) == (1 / 16, None, True)


def test_llama3_falls_back_to_the_models_context():
    assert read("llama", rope_scaling=LLAMA3).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mamba", {}, "here/config.json: model_type is 'mamba', supported is llama, smollm3, mistral"),
        ("llama", {"hidden_act": "gelu"}, "here/config.json: hidden_act is 'gelu'"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp is 2"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0, supported is a positive number"),
        ("qwen2", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_scaling.rope_type is 'longrope'"),
        ("qwen2", {"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor missing, with rope_type 'yarn'"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": "4"}}, "rope_scaling.factor is '4'"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4, "truncate": 1}}, "rope_scaling.truncate is 1"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0, supported is a positive number"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type is 'dynamic'"),
        ("llama", {"rope_scaling": LLAMA3 | {"beta": 2}}, "rope_scaling.beta is 2"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor missing, with rope_type 'linear'"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "rope_scaling.low_freq_factor is 4.0"),
        (
            "llama",
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling is .* supported is the value of rope_parameters",
        ),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta is 10000.0"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention is",
        ),
        ("qwen3", {"layer_types": ["chunked_attention"] * 7, "use_sliding_window": True}, "layer_types is"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 6, "use_sliding_window": True}, "layer_types is"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 7}, "layer_types is .* without use_sliding_window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1}, "sliding_window is 0"),
        ("mistral", {"layer_types": ["full_attention"] * 7}, "layer_types is"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, supported is None"),
        ("glm4_moe", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1, supported is 0"),
        ("glm4_moe", {"n_group": 2}, "n_group is 2, supported is 1"),
        (
            "glm4_moe",
            {"partial_rotary_factor": 0.3, "head_dim": 10},
            "partial_rotary_factor is 0.3, supported is an even",
        ),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias is False, supported is True"),
        ("phi3", {"rope_scaling": LLAMA3}, "rope_scaling.rope_type is 'llama3', supported is default, longrope"),
        (
            "phi3",
            {"rope_scaling": LONGROPE},
            r"lengths of rope_scaling.short_factor and long_factor is \[2, 2\].*4 pairs",
        ),
        ("phi3", {"rope_scaling": LONGROPE | {"factor": 4.0}}, "rope_scaling.factor is 4.0, supported is absence"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "rope_scaling.short_factor is None, supported is a list of numbers"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0, supported is 7.0"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias is False, supported is True"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is 'gptq'.*'mxfp4'"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config is 'mxfp4'"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, supported is 0.0"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, supported is at most 8"),
        (
            "mixtral",
            {"num_local_experts": 10**6},
            "num_local_experts is 1000000, supported is at most 14285 of a layer",
        ),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, supported is 1"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], supported is \[\]"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is True, supported is False"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1, supported is true or false"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1, 1, 1, 1]}, "no_rope_layers is"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads is 4, supported is a divisor"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, supported is at most 10000"),
        ("llama", {"vocab_size": 10**12}, "vocab_size is 1000000000000, supported is a positive integer"),
        ("llama", {"vocab_size": "many"}, "vocab_size is 'many', supported is a positive integer"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ("llama", {"attention_bias": "no"}, "attention_bias is 'no'"),
        ("llama", {"model_type": ["llama"]}, r"model_type is \['llama'\], supported is a string"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', supported is an object"),
        ("gemma3_text", {"rope_parameters": [1]}, r"rope_parameters is \[1\], supported is an object"),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types is 'full_attention', supported is a list"),
        ("qwen3", {"layer_types": [["full_attention"]] * 7, "use_sliding_window": True}, "layer_types is"),
        ("smollm3", {"no_rope_layers": 4}, "no_rope_layers is 4, supported is a list"),
        ("qwen2", {"use_sliding_window": "false"}, "use_sliding_window is 'false', supported is true or false"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta is nan, supported is a positive number"),
        ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, supported is a positive number"),
    ],
)
def test_what_would_be_guessed_is_refused_by_file_and_field(family, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        read(family, **changes)


def test_longrope_ends_with_the_original_context():
    phi = {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16}
    config = read("phi3", **phi)
    assert (config.max_positions, config.rotary_dim) == (16, 4)
    written = to_hugging_face(config)
    assert (written["max_position_embeddings"], written["rope_scaling"]) == (64, LONGROPE)
    assert (
        "attention_factor"
        in to_hugging_face(read("phi3", **phi | {"rope_scaling": LONGROPE | {"attention_factor": 2}}))["rope_scaling"]
    )


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "model_type"])
def test_a_missing_field_is_named(name):
    values = {k: v for k, v in (SIZES | {"model_type": "qwen2"}).items() if k != name}
    with pytest.raises(UnsupportedModel, match=f"^here: {name} missing"):
        from_hugging_face(values, "here")


def test_a_config_that_its_family_cannot_express_is_not_written():
    import dataclasses

    with pytest.raises(UnsupportedModel, match="family llama cannot express sliding_window"):
        to_hugging_face(dataclasses.replace(read("llama"), sliding_window=4))
