"""The architecture of a decoder, read from and written to Hugging Face `config.json` values."""

from __future__ import annotations

import dataclasses
from typing import Any


class UnsupportedModel(ValueError):
    """A config value that this code would have to guess about."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A Llama-family decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    max_positions: int


# Values that the decoder implements in one way only; anything else is refused by name.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "attention_dropout": (0, 0.0),
    "rope_interleaved": (False,),
}


def from_hugging_face(values: dict[str, Any], source: str) -> DecoderConfig:
    """The config in `values` (the content of a `config.json`), or UnsupportedModel naming `source` and the field."""
    for name, allowed in _FIXED.items():
        if name in values and values[name] not in allowed:
            raise UnsupportedModel(f"{source}: {name} is {values[name]!r}, supported is {allowed[0]!r}")
    rope = dict(values.get("rope_parameters") or {})
    scaling = values.get("rope_scaling")
    kind = rope.get("rope_type", "default")
    if kind != "default" or (scaling and scaling.get("rope_type", scaling.get("type")) != "default"):
        raise UnsupportedModel(f"{source}: rope scaling {scaling or rope!r} is not supported")
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in required if name not in values]
    if missing:
        raise UnsupportedModel(f"{source}: {', '.join(missing)} missing")
    heads = values["num_attention_heads"]
    return DecoderConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        rope_theta=float(values.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        max_positions=values.get("max_position_embeddings", 2048),
    )


def to_hugging_face(config: DecoderConfig, **token_ids: Any) -> dict[str, Any]:
    """The values of a `config.json` that transformers loads; `token_ids` adds bos, eos and pad ids."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    } | token_ids


def tiny(vocab_size: int) -> DecoderConfig:
    """A decoder of under a million parameters for tests: every part in place, nothing to wait for."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10000.0,
        norm_eps=1e-5,
        tie_embeddings=True,
        max_positions=512,
    )
