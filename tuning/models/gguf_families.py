"""Differences between the architectures of GGUF files: names of tensors, their storage, and the metadata.

Sources: llama.cpp's converters (conversion of Hugging Face models) for names, row order and shifts, and its loaders
(src/models) for facts without a key: the query scales of the largest Gemmas, SmolLM3's layers without positions, and
the window pattern and local theta of Gemma 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

import numpy as np

T = TypeVar("T")


class Metadata(Protocol):
    """Typed metadata of a file (`rlhf.tuning.models.gguf.GGUFFile`)."""

    path: Any

    def get(self, key: str, kind: type[T]) -> T | None: ...

    def require(self, key: str, kind: type[T]) -> T: ...


Values = dict[str, Any]

# "blk.N.<key>" to the Hugging Face "model.layers.N.<value>".
_PROJECTIONS: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS: Final = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS: Final = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


# Keys of other models that share an architecture's name, and that change what it computes.
_CHANGES: Final = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One `general.architecture`."""

    model_type: str
    """As config.json names it."""
    classes: str
    """Name of the class in transformers."""
    norms: Mapping[str, str]
    """Norms of a layer."""
    more: Callable[[Metadata, str, Values], Values] = lambda file, prefix, values: {}
    """(metadata, prefix of its keys, values so far) -> values of config.json that only this family has."""
    permuted: bool = False
    """Rows of q and k are in the order of interleaved rotary pairs."""
    biased: tuple[str, ...] = ()
    """Projections with a bias."""
    windowed: bool = False
    norm_shift: float = 0.0
    """Added to the weights of norms in the file."""

    @property
    def layer(self) -> dict[str, str]:
        """All tensors of a layer by their name in the file, with `.weight` or `.bias`."""
        weights = {f"{n}.weight": f"{hf}.weight" for n, hf in (_PROJECTIONS | dict(self.norms)).items()}
        return weights | {f"{n}.bias": f"{_PROJECTIONS[n]}.bias" for n in self.biased}


def _plain(file: Metadata, prefix: str, values: Values) -> Values:
    return {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}


def _qwen(file: Metadata, prefix: str, values: Values) -> Values:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _smollm3(file: Metadata, prefix: str, values: Values) -> Values:
    return _plain(file, prefix, values) | {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _gemma(file: Metadata, prefix: str, values: Values, largest: int) -> Values:
    """What Gemma 2 and 3 share; `largest` is the number of layers of the 27B model, which no key identifies."""
    # The 27B models scale queries by the size that hidden / heads would have.
    per_head = values["hidden_size"] // values["num_attention_heads"]
    return {
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if values["num_hidden_layers"] == largest else values["head_dim"],
        "sliding_window": file.require(f"{prefix}.attention.sliding_window", int),
        "final_logit_softcapping": file.get(f"{prefix}.final_logit_softcapping", float),
    }


def _gemma2(file: Metadata, prefix: str, values: Values) -> Values:
    cap = file.require(f"{prefix}.attn_logit_softcapping", float)
    return _gemma(file, prefix, values, 46) | {"attn_logit_softcapping": cap}


def _gemma3(file: Metadata, prefix: str, values: Values) -> Values:
    # Older files lack both keys; the numbers are llama.cpp's.
    every = file.get(f"{prefix}.attention.sliding_window_pattern", int)
    local = file.get(f"{prefix}.rope.freq_base_swa", float)
    return _gemma(file, prefix, values, 62) | {
        "sliding_window_pattern": 6 if every is None else every,
        "rope_local_base_freq": 10000.0 if local is None else local,
    }


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _NORMS, _plain, permuted=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _NORMS, _smollm3, permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _NORMS, _qwen, biased=("attn_q", "attn_k", "attn_v")),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _NORMS | _QK_NORMS, _qwen),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _GEMMA_NORMS, _gemma2, windowed=True, norm_shift=1.0),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _GEMMA_NORMS | _QK_NORMS, _gemma3, windowed=True, norm_shift=1.0
    ),
}
"""Architectures by name. Mistral models are stored as `llama`."""


def read_config(file: Metadata, name: str, vocab_size: int, tied: bool, rope_factors: np.ndarray | None) -> Values:
    """The config.json of the model, from its metadata and from its embedding, output and rope_freqs tensors.

    Raises ValueError, naming the file and the key, for a value that is missing, inconsistent or not supported.
    """
    known, path = ARCHITECTURES[name], file.path
    experts = file.get(f"{name}.expert_count", int)
    if experts:
        raise ValueError(f"{path}: {name}.expert_count is {experts}; supported: dense models only")
    for key in _CHANGES if known.windowed else (*_CHANGES, "attention.sliding_window"):
        if (value := file.get(f"{name}.{key}", object)) is not None:
            raise ValueError(f"{path}: {name}.{key} is {value}; supported: files without it")
    hidden = file.require(f"{name}.embedding_length", int)
    heads = file.require(f"{name}.attention.head_count", int)
    kv_heads = file.get(f"{name}.attention.head_count_kv", int) or heads
    if heads <= 0 or heads % kv_heads:
        raise ValueError(f"{path}: {name}.attention.head_count {heads} is not a multiple of head_count_kv {kv_heads}")
    head_dim = file.get(f"{name}.attention.key_length", int) or hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        size = file.get(f"{name}.{key}", int)
        if size is not None and size != head_dim:
            raise ValueError(f"{path}: {name}.{key} is {size}; supported: the head size, {head_dim}")
    theta = file.get(f"{name}.rope.freq_base", float)
    values = {
        "architectures": [known.classes],
        "model_type": known.model_type,
        "attention_dropout": 0.0,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
        "head_dim": head_dim,
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": file.require(f"{name}.feed_forward_length", int),
        "max_position_embeddings": file.require(f"{name}.context_length", int),
        "num_attention_heads": heads,
        "num_hidden_layers": file.require(f"{name}.block_count", int),
        "num_key_value_heads": kv_heads,
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", int),
        "rms_norm_eps": file.require(f"{name}.attention.layer_norm_rms_epsilon", float),
        # llama.cpp's default where the key is absent.
        "rope_theta": 10000.0 if theta is None else theta,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": vocab_size,
    }
    values["rope_scaling"] = _rope_scaling(file, name, values, rope_factors)
    return values | known.more(file, name, values)


def _rope_scaling(file: Metadata, name: str, values: Values, factors: np.ndarray | None) -> Values | None:
    kind = file.get(f"{name}.rope.scaling.type", str)
    if kind not in (None, "none", "linear"):
        raise ValueError(f"{file.path}: {name}.rope.scaling.type is {kind!r}; supported: none, linear")
    if factors is not None:
        return _llama3_scaling(file, values, factors)
    if kind != "linear":
        return None
    return {"rope_type": "linear", "factor": file.require(f"{name}.rope.scaling.factor", float)}


def _llama3_scaling(file: Metadata, values: Values, factors: np.ndarray) -> Values:
    """The scaling of Llama 3.1 and 3.2 whose divisors the tensor rope_freqs.weight holds, checked against all of them.

    The tensor does not say from which context the model was extended, nor the bounds; all releases share them.
    """
    from rlhf.tuning.models.rope import RopeScaling, frequencies

    scaling = RopeScaling("llama3", float(factors.max()), 1.0, 4.0, 8192)
    plain = frequencies(values["head_dim"], values["rope_theta"])
    divisors = plain / frequencies(values["head_dim"], values["rope_theta"], scaling)
    # The file holds float32 values that the converter computed in float32.
    if factors.shape != divisors.shape or not np.allclose(factors, divisors, rtol=1e-4):
        raise ValueError(
            f"{file.path}: tensor rope_freqs.weight is not the scaling of Llama 3.1 (bounds 1 and 4, 8192 positions), "
            "the only one supported; convert from the Hugging Face folder instead, where config.json names it"
        )
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_positions,
    }


def expected_tensors(name: str, config: Values) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name in the file to (Hugging Face name, shape in Hugging Face order)."""
    hidden: int = config["hidden_size"]
    ffn, vocab, head = config["intermediate_size"], config["vocab_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    outputs: dict[str, int] = {"attn_q": query, "attn_k": key, "attn_v": key, "attn_output": hidden}
    outputs |= {"ffn_gate": ffn, "ffn_up": ffn, "ffn_down": hidden}
    inputs: dict[str, int] = {"attn_output": query, "ffn_down": ffn}

    def shape(tensor: str) -> tuple[int, ...]:
        kernel, _, kind = tensor.partition(".")
        if kernel not in outputs:
            return (head if kernel in _QK_NORMS else hidden,)
        if kind == "bias":
            return (outputs[kernel],)
        return outputs[kernel], inputs.get(kernel, hidden)

    layout: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        layout["output.weight"] = ("lm_head.weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        for tensor, hf in ARCHITECTURES[name].layer.items():
            layout[f"blk.{layer}.{tensor}"] = (f"model.layers.{layer}.{hf}", shape(tensor))
    return layout
