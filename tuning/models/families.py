"""The model families, one table each: how their `config.json` files differ, and the meaning for the decoder.

Defaults of missing fields are those of the family's config class in transformers 5.23.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

# Features of no family, or of those with a default for them alone, with the values that switch them off.
EVERYWHERE: Final[dict[str, tuple[Any, ...]]] = {
    "attention_dropout": (0, 0.0, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "use_bidirectional_attention": (False, None),
}
MULTIPLIERS: Final = {
    "embedding_multiplier": "embed_scale",
    "attention_multiplier": "query_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logits_divisor",
    "routed_scaling_factor": "expert_scale",
}
"""Factors by their names in config.json: the fields of `DecoderConfig`, of families with a default for them."""
_SILU: Final[dict[str, tuple[Any, ...]]] = {"hidden_act": ("silu",)}
_GELU: Final[dict[str, tuple[Any, ...]]] = {"hidden_activation": ("gelu_pytorch_tanh",)}
# Fields of DecoderConfig that all Gemmas share, and those after the first.
_GEMMA1: Final[dict[str, Any]] = {"activation": "gelu_tanh", "norm_offset": 1.0}
_GEMMA: Final[dict[str, Any]] = _GEMMA1 | {"post_norms": True}


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`."""

    classes: str
    """Prefix of the class names in transformers: `...ForCausalLM`, `...ForSequenceClassification`."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Fields implemented in one way only, with the allowed values; the first is written."""
    defaults: Mapping[str, Any]
    """Values that transformers assumes for missing fields."""
    traits: Mapping[str, Any]
    """Fields of DecoderConfig that are the same for every member."""
    biases: tuple[str, ...] = ()
    """Those of `attention_bias` and `mlp_bias` that the family reads."""
    windows: str = "none"
    """`all`: every layer where `sliding_window` is set; `switch`: with `use_sliding_window`; `pattern`: some."""
    softcaps: bool = False
    """Reads `attn_logit_softcapping` and `final_logit_softcapping`."""
    sizes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Sizes that other families lack or name differently: fields of DecoderConfig by their names in config.json."""
    layered_rope: bool = False
    """Writes the rotary parameters of each type of layer apart."""
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Modules with names of their own, by the parameter's name in a layer; `{}` is the number of an expert. By a whole
    path in a layer: tensors that are stored as the parameter is."""


_PLAIN: Final = {"rope_theta": 10_000.0, "tie_word_embeddings": False}
_WINDOWED: Final = _PLAIN | {"sliding_window": 4096}
_QWEN: Final = _WINDOWED | {"max_window_layers": 28}
_GEMMA_DEFAULTS: Final = _WINDOWED | {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256}
_BOTH: Final = ("attention_bias", "mlp_bias")
_OLMO: Final = {"rms_norm_eps": 1e-5, "num_key_value_heads": None, "max_position_embeddings": 2048}
_OLMO_TRAITS: Final = {"qk_norm_joint": True, "input_norms": False, "post_norms": True}
_EXPERTS: Final = {"num_experts": "num_experts", "num_experts_per_tok": "experts_per_token"}
_LOCAL_EXPERTS: Final = {"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"}
_IN_MLP: Final = {"router": "mlp.gate.weight"} | {n: f"mlp.experts.{{}}.{n}_proj" for n in ("gate", "up", "down")}
_MOE_SIZES: Final = {"moe_intermediate_size": "intermediate_size"} | _EXPERTS
# Layers of one stack are alike: all of them have experts.
_ALL_ROUTED: Final[dict[str, tuple[Any, ...]]] = (
    {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None), "use_sliding_window": (False, None)}
)  # fmt: skip
_ROUTED: Final = {"router_aux_loss_coef": 0.001, "output_router_logits": False}

FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(
        "Llama",
        _SILU | {"pretraining_tp": (1,), "rope_interleaved": (False,)},
        _PLAIN | {"num_key_value_heads": None, "max_position_embeddings": 2048},
        {},
        biases=_BOTH,
    ),
    "smollm3": Family(
        "SmolLM3",
        _SILU,
        {"rope_theta": 2_000_000.0, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
        {},
        biases=_BOTH,
        windows="switch",
    ),
    "mistral": Family("Mistral", _SILU | {"layer_types": (None,)}, _WINDOWED, {}, windows="all"),
    "qwen2": Family("Qwen2", _SILU, _QWEN, {"qkv_bias": True}, windows="switch"),
    "qwen3": Family(
        "Qwen3", _SILU, _QWEN | {"head_dim": 128}, {"qk_norm": True}, biases=("attention_bias",), windows="switch"
    ),
    "olmo2": Family("Olmo2", _SILU, _PLAIN | _OLMO, _OLMO_TRAITS, biases=("attention_bias",)),
    "olmo3": Family(
        "Olmo3",
        _SILU,
        # Windowed layers of a file without `rope_parameters` ignore its theta, as those of Gemma 3.
        _WINDOWED | _OLMO | {"rope_theta": 5e5, "rope_local_base_freq": 5e5, "sliding_window_pattern": 4},
        _OLMO_TRAITS,
        biases=("attention_bias",),
        windows="pattern",
        layered_rope=True,
    ),
    "granite": Family(
        "Granite",
        _SILU,
        _PLAIN
        | {"num_key_value_heads": None, "max_position_embeddings": 2048}
        | {"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
        {},
        biases=_BOTH,
    ),
    "gemma": Family(
        "Gemma",
        # The first releases say gelu, and transformers takes it for this.
        {"hidden_act": ("gelu_pytorch_tanh", "gelu")},
        _PLAIN | {"tie_word_embeddings": True, "head_dim": 256},
        _GEMMA1,
        biases=("attention_bias",),
    ),
    "gemma2": Family(
        "Gemma2",
        _GELU,
        _GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _GEMMA,
        biases=("attention_bias",),
        windows="pattern",
        softcaps=True,
    ),
    "gemma3_text": Family(
        "Gemma3",
        # transformers' attention of this family does not apply the cap that its config can hold.
        _GELU | {"attn_logit_softcapping": (None,)},
        _GEMMA_DEFAULTS | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
        _GEMMA | {"qk_norm": True},
        biases=("attention_bias",),
        windows="pattern",
        softcaps=True,
    ),
    "mixtral": Family(
        "Mixtral",
        _SILU | {"router_jitter_noise": (0.0,)},
        _PLAIN
        | {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "sliding_window": None}
        | {"num_local_experts": 8, "num_experts_per_tok": 2}
        | _ROUTED,
        {"normalise_experts": True},
        windows="all",
        sizes=_LOCAL_EXPERTS,
        tensors={
            "router": "block_sparse_moe.gate.weight",
            "gate": "block_sparse_moe.experts.{}.w1",
            "up": "block_sparse_moe.experts.{}.w3",
            "down": "block_sparse_moe.experts.{}.w2",
        },
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        _SILU | _ALL_ROUTED,
        _PLAIN
        | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False}
        | _ROUTED,
        {"qk_norm": True},
        biases=("attention_bias",),
        sizes=_MOE_SIZES,
        tensors=_IN_MLP,
    ),
    "olmoe": Family(
        "Olmoe",
        _SILU | {"clip_qkv": (None,)},
        _PLAIN
        | {"rms_norm_eps": 1e-5, "num_key_value_heads": None, "max_position_embeddings": 4096}
        | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}
        | _ROUTED
        | {"router_aux_loss_coef": 0.01},
        {"qk_norm_joint": True},
        biases=("attention_bias",),
        sizes=_EXPERTS,
        tensors=_IN_MLP,
    ),
    "phi3": Family(
        "Phi3",
        _SILU | {"resid_pdrop": (0, 0.0), "embd_pdrop": (0, 0.0)},
        _PLAIN
        | {"rms_norm_eps": 1e-5, "num_key_value_heads": None, "sliding_window": None, "partial_rotary_factor": 1.0}
        | {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        {"joined": True},
        windows="all",
    ),
    "qwen2_moe": Family(
        "Qwen2Moe",
        _SILU | _ALL_ROUTED | {"qkv_bias": (True,)},
        _PLAIN
        | {"num_key_value_heads": 16, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | {"num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False, "max_position_embeddings": 32_768}
        | _ROUTED,
        {"qkv_bias": True, "shared_switch": True},
        sizes=_MOE_SIZES | {"shared_expert_intermediate_size": "shared_size"},
        tensors=_IN_MLP
        | {"shared_switch": "mlp.shared_expert_gate.weight"}
        | {f"shared_{n}": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")},
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        _SILU
        # Layers of one stack are alike: all of them have experts.
        | {"first_k_dense_replace": (0,), "n_group": (1,), "topk_group": (1,), "output_router_logits": (False,)}
        | {"num_nextn_predict_layers": (0,)},
        _PLAIN
        | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 131_072}
        | {"moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1}
        | {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_qk_norm": False}
        | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        {"sigmoid_router": True, "score_bias": True, "output_bias": False},
        biases=("attention_bias",),
        sizes={"moe_intermediate_size": "intermediate_size", "n_routed_experts": "num_experts"}
        | {"num_experts_per_tok": "experts_per_token"},
        tensors=_IN_MLP
        | {"score_bias": "mlp.gate.e_score_correction_bias"}
        | {f"shared_{n}": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
    ),
    "gpt_oss": Family(
        "GptOss",
        _SILU
        | {"attention_bias": (True,), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)}
        | {"quantization_config": (None, "mxfp4")},
        _PLAIN
        | {"head_dim": 64, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "sliding_window": 128}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "max_position_embeddings": 131_072}
        | _ROUTED
        | {
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
            | {"truncate": False, "original_max_position_embeddings": 4096}
        },
        dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "router_bias", "sinks", "paired_experts"), True)
        | {"activation": "clamped_swiglu", "normalise_experts": True},
        windows="pattern",
        sizes=_LOCAL_EXPERTS,
        tensors={"router": "mlp.router.weight", "router_bias": "mlp.router.bias", "sinks": "self_attn.sinks"}
        | {f"{n}.kernel": f"mlp.experts.{n}_proj" for n in ("gate_up", "down")}
        | {f"{n}.bias": f"mlp.experts.{n}_proj_bias" for n in ("gate_up", "down")},
    ),
}
