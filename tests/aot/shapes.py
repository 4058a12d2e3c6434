"""Models by their shapes, and places of shapes on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.aot.cases import Case
from tuning.fit.shapes import public
from tuning.models.config import DecoderConfig
from tuning.models.config_json import from_hugging_face

MODELS = {
    # Wide enough for the kernels of attention and for each axis to be cut, and no wider.
    "small": {
        "model_type": "qwen3",
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "gemma-3-12b": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "rope_theta": 1e6,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
"""Values of `config.json` of models that `tuning.fit.shapes` does not have."""


def model_of(case: Case, layers: int | None = None) -> DecoderConfig:
    """The case's model, with so many layers in place of its own."""
    values = MODELS.get(case.model)
    config = public(case.model) if values is None else from_hugging_face(values, case.model)
    if layers is None:
        return config
    flags = {n: getattr(config, n)[:layers] for n in ("rope_layers", "sliding_layers")}
    return dataclasses.replace(config, num_layers=layers, **flags)


def kernels(config: DecoderConfig) -> int:
    """Weights of a layer's matrices."""
    heads = config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    return config.hidden_size * (heads + 3 * config.intermediate_size)


def placed(tree: Any, where: Any) -> Any:
    """Shapes with their shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where)


def on_all(tree: Any, mesh: Any) -> Any:
    """Shapes of arrays that each device has whole."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype, sharding=sharding), tree)
