"""Public models by their shapes alone, as the `config.json` of each has them on the Hugging Face hub."""

from __future__ import annotations

from tuning.models.config import DecoderConfig
from tuning.models.config_json import from_hugging_face

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (hidden, inner, layers, heads), strict=True))


VALUES = {
    "llama-3-8b": _LLAMA | _sizes(4096, 14336, 32, 32),
    "llama-3-70b": _LLAMA | _sizes(8192, 28672, 80, 64),
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16) | {"tie_word_embeddings": True},
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32) | {"tie_word_embeddings": False},
    "qwen3-32b": _QWEN3 | _sizes(5120, 25600, 64, 64) | {"tie_word_embeddings": False},
    "gemma-2-9b": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    | _sizes(3584, 14336, 42, 16),
}
"""Values of `config.json` by name of the model."""


def public(name: str) -> DecoderConfig:
    """The model of this name. Raises ValueError, which lists them, for an unknown one."""
    if name not in VALUES:
        raise ValueError(f"--model {name} is unknown; there are {', '.join(VALUES)}, or a folder with a config.json")
    return from_hugging_face(VALUES[name], name)
