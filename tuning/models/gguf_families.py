"""Differences between the architectures of GGUF files: names of tensors, their storage, and the metadata.

Sources: llama.cpp's converters (conversion of Hugging Face models) for names, row order and shifts, and its loaders
(src/models) for facts without a key: the query scales of the largest Gemmas, SmolLM3's layers without positions, and
the window pattern and local theta of Gemma 3. All else about a family is in `families`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from rlhf.tuning.models.families import FAMILIES
from rlhf.tuning.models.gguf_file import GGUFFile
from rlhf.tuning.models.mapping import NORMS, POST_NORMS, PROJECTIONS

Values = dict[str, Any]


ARCHITECTURES: Final = {name: name for name in ("llama", "smollm3", "qwen2", "qwen3", "gemma2")} | {
    "gemma3": "gemma3_text"
}
"""The `model_type` of each `general.architecture`. Mistral models are stored as `llama`."""
PERMUTED: Final = ("llama", "smollm3")
"""Architectures with the rows of q and k in the order of interleaved rotary pairs."""

# "blk.N.<key>" to the parameter's name in a decoder's layer.
_KERNELS: Final = {
    **{f"attn_{name}": name for name in "qkv"},
    "attn_output": "o",
    **{f"ffn_{name}": name for name in ("gate", "up", "down")},
}
_NORMS: Final = {"attn_norm": "attention_norm", "ffn_norm": "mlp_norm"}
_QK_NORMS: Final = {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}
_POST_NORMS: Final = {"post_attention_norm": "attention_post_norm", "post_ffw_norm": "mlp_post_norm"}
# Keys of other models that share an architecture's name, and that change what it computes.
_CHANGES: Final = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
_LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, which no key identifies."""


def layer_tensors(name: str) -> dict[str, str]:
    """The tensors of a layer by their names in the file: their names below "model.layers.N" of Hugging Face."""
    traits = FAMILIES[ARCHITECTURES[name]].traits
    post = traits.get("post_norms", False)
    norms = _NORMS | (_POST_NORMS if post else {}) | (_QK_NORMS if traits.get("qk_norm") else {})
    hf = PROJECTIONS | (POST_NORMS if post else NORMS)
    weights = {f"{tensor}.weight": f"{hf[own]}.weight" for tensor, own in (_KERNELS | norms).items()}
    biased = "qkv" if traits.get("qkv_bias") else ""
    return weights | {f"attn_{own}.bias": f"{hf[own]}.bias" for own in biased}


def read_config(file: GGUFFile, name: str, vocab_size: int, tied: bool, rope_factors: np.ndarray | None) -> Values:
    """The config.json of the model, from its metadata and from its embedding, output and rope_freqs tensors.

    Raises ValueError, naming the file and the key, for a value that is missing, inconsistent or not supported.
    """
    family, path = FAMILIES[ARCHITECTURES[name]], file.path
    experts = file.get(f"{name}.expert_count", int)
    if experts:
        raise ValueError(f"{path}: {name}.expert_count is {experts}; supported: dense models only")
    for key in _CHANGES if family.softcaps else (*_CHANGES, "attention.sliding_window"):
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
    values: Values = {
        "architectures": [f"{family.classes}ForCausalLM"],
        "model_type": ARCHITECTURES[name],
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
    values |= dict.fromkeys(family.biases, False)
    values |= {field: allowed[0] for field, allowed in family.fixed.items() if allowed[0] is not None}
    if family.windows == "switch":
        values["use_sliding_window"] = False
    if family.softcaps:
        # The 27B models scale queries by the size that hidden / heads would have.
        largest = values["num_hidden_layers"] == _LARGEST_GEMMA[name]
        values["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
        values["sliding_window"] = file.require(f"{name}.attention.sliding_window", int)
        values["final_logit_softcapping"] = file.get(f"{name}.final_logit_softcapping", float)
    if name == "gemma2":
        values["attn_logit_softcapping"] = file.require(f"{name}.attn_logit_softcapping", float)
    if name == "gemma3":
        # Older files lack both keys; the family's defaults are llama.cpp's numbers.
        pattern = file.get(f"{name}.attention.sliding_window_pattern", int)
        local = file.get(f"{name}.rope.freq_base_swa", float)
        own = {"sliding_window_pattern": pattern, "rope_local_base_freq": local}
        values |= {field: value for field, value in own.items() if value is not None}
    values["rope_scaling"] = _rope_scaling(file, name, values, rope_factors)
    return values


def _rope_scaling(file: GGUFFile, name: str, values: Values, factors: np.ndarray | None) -> Values | None:
    kind = file.get(f"{name}.rope.scaling.type", str)
    if kind not in (None, "none", "linear"):
        raise ValueError(f"{file.path}: {name}.rope.scaling.type is {kind!r}; supported: none, linear")
    if factors is not None:
        return _llama3_scaling(file, values, factors)
    if kind != "linear":
        return None
    return {"rope_type": "linear", "factor": file.require(f"{name}.rope.scaling.factor", float)}


def _llama3_scaling(file: GGUFFile, values: Values, factors: np.ndarray) -> Values:
    """The scaling of Llama 3.1 and 3.2 whose divisors the tensor rope_freqs.weight holds, checked against all of them.

    The tensor does not say from which context the model was extended, nor the bounds; all releases share them.
    """
    from rlhf.tuning.models.config_json import ROPE_FIELDS
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
    _, *numbers = dataclasses.astuple(scaling)
    return {"rope_type": "llama3"} | dict(zip(ROPE_FIELDS["llama3"], numbers, strict=False))


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
        for tensor, hf in layer_tensors(name).items():
            layout[f"blk.{layer}.{tensor}"] = (f"model.layers.{layer}.{hf}", shape(tensor))
    return layout
