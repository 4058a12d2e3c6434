"""Models by their shapes, and places of shapes on a mesh."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from rlhf.tuning.axes import Axes
from rlhf.tuning.mesh import axis_sizes
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.config_json import from_hugging_face
from rlhf.tuning.models.lora import PROJECTIONS, LoraConfig
from tests.aot.cases import Case

_LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
}  # fmt: skip
_GEMMA = {
    "num_key_value_heads": 8,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}


def _sizes(hidden: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (hidden, inner, layers, heads), strict=True))


MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA | _sizes(4096, 14336, 32, 32),
    "llama-3-70b": _LLAMA | _sizes(8192, 28672, 80, 64),
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16) | {"tie_word_embeddings": True},
    "qwen3-32b": _QWEN3 | _sizes(5120, 25600, 64, 64) | {"tie_word_embeddings": False},
    "qwen3-30b-a3b": _QWEN3
    | _sizes(2048, 6144, 48, 32)
    | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "tie_word_embeddings": False}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    # Wide enough for the kernels of attention and for each axis to be cut, and no wider.
    "small": _QWEN3
    | _sizes(512, 1024, 2, 4)
    | {"vocab_size": 8192, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True},
    "gemma-2-9b": _GEMMA
    | _sizes(3584, 14336, 42, 16)
    | {"model_type": "gemma2", "vocab_size": 256000, "rope_theta": 1e4}
    | {"max_position_embeddings": 8192, "sliding_window": 4096},
    "gemma-3-12b": _GEMMA
    | _sizes(3840, 15360, 48, 16)
    | {"model_type": "gemma3_text", "vocab_size": 262208, "rope_theta": 1e6}
    | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "max_position_embeddings": 131072}
    | {"sliding_window": 1024, "sliding_window_pattern": 6},
}
"""Values of `config.json` by name of the model, as those of public ones are on the Hugging Face hub."""


def public(name: str) -> DecoderConfig:
    """The model of this name."""
    return from_hugging_face(MODELS[name], name)


def model_of(case: Case, layers: int | None = None) -> DecoderConfig:
    """The case's model, with so many layers in place of its own."""
    config = public(case.model)
    if layers is None:
        return config
    flags = {n: getattr(config, n)[:layers] for n in ("rope_layers", "sliding_layers")}
    return dataclasses.replace(config, num_layers=layers, **flags)


def adapter_of(case: Case) -> LoraConfig | None:
    """The adapter that is trained; experts have none."""
    if not case.lora:
        return None
    return LoraConfig(rank=case.lora, targets=("q", "k", "v", "o") if public(case.model).num_experts else PROJECTIONS)


def kernels(config: DecoderConfig) -> int:
    """Weights of a layer's matrices that a token meets."""
    heads = config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    inner = 3 * config.intermediate_size * (config.experts_per_token or 1)
    return config.hidden_size * (heads + inner + config.num_experts)


def abstract_mesh(axes: Axes, count: int) -> AbstractMesh:
    """The mesh of so many devices without them."""
    sizes = axis_sizes(axes, count)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def placed(tree: Any, where: Any) -> Any:
    """Shapes with their shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where)


def on_all(tree: Any, mesh: Any) -> Any:
    """Shapes of arrays that each device has whole."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=sharding), tree)
