"""Read Llama weights and configuration out of a GGUF file, in Hugging Face names and layout.

Needs only numpy and the `gguf` package: no JAX, no torch. The file is memory-mapped and tensors are dequantised to
float32 one at a time, so the peak is the file's metadata plus the largest tensor.

Sources: the GGUF specification (ggml-org/ggml, docs/gguf.md) for the keys, and llama.cpp's convert_hf_to_gguf.py
(LlamaModel.permute) for the row order of the q and k projections that `tensors` undoes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf import GGUFReader

SUPPORTED_ARCHITECTURES: Final = ("llama",)

T = TypeVar("T")

# GGUF "blk.N.<key>.weight" to the Hugging Face "model.layers.N.<value>.weight".
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """A memory-mapped GGUF file with typed access to its metadata; any architecture.

    Attributes: `path`, and `reader`, the `gguf.GGUFReader`. Opening parses all metadata (1 to 2 s for a vocabulary of
    49,152 tokens, nearly all of it spent on the string arrays); tensor data stays on disk until it is read.

    Raises FileNotFoundError for a missing file, ValueError for one that is not GGUF or is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        from gguf import GGUFReader

        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file; give the path of a .gguf file")
        try:
            self.reader: GGUFReader = GGUFReader(self.path)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            # The reader indexes the map without bounds checks, so a cut file surfaces as any of these.
            raise ValueError(
                f"{self.path}: not a readable GGUF file ({error}); check that the download is complete"
            ) from error

    def get(self, key: str, kind: type[T]) -> T | None:
        """The metadata value of `key`, None if absent; ValueError if it is not a `kind` (int is accepted as float).

        A float32 value is returned as the shortest decimal that rounds to it, so 1e-5 reads 1e-05 and not
        9.99999974e-06.
        """
        from gguf import GGUFValueType

        field = self.reader.get_field(key)
        if field is None:
            return None
        value: Any = field.contents()
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        # bool is a subclass of int, and a flag is never a size.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{self.path}: metadata {key} is a {type(value).__name__}, expected {kind.__name__}")
        if isinstance(value, float) and field.types[-1] == GGUFValueType.FLOAT32:
            return cast(T, float(str(np.float32(value))))
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """As `get`, but an absent key is a ValueError."""
        value = self.get(key, kind)
        if value is None:
            raise ValueError(f"{self.path}: metadata {key} is missing; the file is incomplete or of another format")
        return value


class GGUFCheckpoint:
    """Weights and configuration of a GGUF Llama, as Hugging Face names and layout.

    Names, shapes and metadata are checked on opening; tensor data is only read by `tensors`. Give an open `GGUFFile`
    in place of the path to share it with `tuning.models.tokenizer.tokenizer_from_gguf`: opening is the slow part.

    Raises ValueError, naming the file and the field, for an architecture outside SUPPORTED_ARCHITECTURES, for a
    tensor that is unknown, missing or of an unexpected shape, and for a variant that this reader would get wrong
    (scaled or partial rotary embeddings, mixture of experts, sizes that differ per layer, foreign byte order).
    FileNotFoundError and ValueError as in `GGUFFile`.
    """

    def __init__(self, path: str | Path | GGUFFile) -> None:
        self._file = path if isinstance(path, GGUFFile) else GGUFFile(path)
        self.path = self._file.path
        architecture = self._file.require("general.architecture", str)
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise ValueError(
                f"{self.path}: general.architecture is {architecture!r}; "
                f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        if self._file.reader.byte_order != "I":
            raise ValueError(f"{self.path}: the file's byte order is not this machine's; supported: native order")
        self._tensors = {tensor.name: tensor for tensor in self._file.reader.tensors}
        self._config = self._read_config()
        self._layout = _expected_tensors(self._config)
        self._check_tensors()

    def config(self) -> dict[str, Any]:
        """A new Hugging Face LlamaConfig dict (`transformers.LlamaConfig(**config)`).

        bos, eos and pad ids are None where the metadata has none. tie_word_embeddings is true where the file holds no
        output.weight. vocab_size is the number of embedding rows.
        """
        config = dict(self._config)
        config["architectures"] = list(config["architectures"])
        return config

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Yield (Hugging Face parameter name, float32 array), one tensor at a time, in the file's order.

        Matrices are (out, in), norms (hidden,), embeddings (vocab, hidden). Arrays are owned by the caller and
        contiguous. With tied embeddings no lm_head.weight is yielded.

        Raises ValueError for a quantisation that the `gguf` package cannot decode.
        """
        from gguf.quants import dequantize

        head_counts = {
            "attn_q": self._config["num_attention_heads"],
            "attn_k": self._config["num_key_value_heads"],
        }
        for name, tensor in self._tensors.items():
            hf_name, shape = self._layout[name]
            try:
                data = dequantize(tensor.data, tensor.tensor_type)
            except (NotImplementedError, KeyError) as error:
                raise ValueError(
                    f"{self.path}: tensor {name} has type {tensor.tensor_type.name}, which gguf cannot decode; "
                    "use a file of another quantisation, such as Q8_0 or F16"
                ) from error
            kind = name.split(".")[-2]
            if kind in head_counts:
                data = _unpermute(data, head_counts[kind])
            elif np.may_share_memory(data, tensor.data):
                # A tensor stored as F32 comes back as a view, which is read-only and keeps the file mapped.
                data = data.copy()
            yield hf_name, data.reshape(shape)

    def _read_config(self) -> dict[str, Any]:
        file, prefix = self._file, "llama"
        self._refuse_variants()
        hidden = file.require(f"{prefix}.embedding_length", int)
        heads = file.require(f"{prefix}.attention.head_count", int)
        kv_heads = file.get(f"{prefix}.attention.head_count_kv", int) or heads
        if heads <= 0 or heads % kv_heads:
            raise ValueError(
                f"{self.path}: {prefix}.attention.head_count {heads} is not a multiple of head_count_kv {kv_heads}"
            )
        head_dim = file.get(f"{prefix}.attention.key_length", int) or hidden // heads
        for key in ("attention.value_length", "rope.dimension_count"):
            found = file.get(f"{prefix}.{key}", int)
            if found is not None and found != head_dim:
                raise ValueError(f"{self.path}: {prefix}.{key} is {found}; supported: the head size, {head_dim}")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise ValueError(f"{self.path}: tensor token_embd.weight is missing; a split file must be merged first")
        theta = file.get(f"{prefix}.rope.freq_base", float)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
            "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": file.require(f"{prefix}.feed_forward_length", int),
            "max_position_embeddings": file.require(f"{prefix}.context_length", int),
            "mlp_bias": False,
            "num_attention_heads": heads,
            "num_hidden_layers": file.require(f"{prefix}.block_count", int),
            "num_key_value_heads": kv_heads,
            "pad_token_id": file.get("tokenizer.ggml.padding_token_id", int),
            "rms_norm_eps": file.require(f"{prefix}.attention.layer_norm_rms_epsilon", float),
            "rope_scaling": None,
            # llama.cpp's default where the key is absent.
            "rope_theta": 10000.0 if theta is None else theta,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "torch_dtype": "float32",
            "use_cache": True,
            # GGUF dimensions are innermost first: (hidden, vocab).
            "vocab_size": int(embedding.shape[-1]),
        }

    def _refuse_variants(self) -> None:
        """Raise for metadata that changes the computation and that LlamaConfig as written here would not carry."""
        if any(name.startswith("rope_f") for name in self._tensors):  # rope_freqs, rope_factors_long and _short
            raise ValueError(
                f"{self.path}: tensor rope_freqs.weight or rope_factors_*.weight (scaled rotary embeddings, as in "
                "Llama 3.1) is not supported; convert from the Hugging Face folder instead, where the scaling is "
                "in config.json"
            )
        scaling = self._file.get("llama.rope.scaling.type", str)
        if scaling not in (None, "none"):
            raise ValueError(f"{self.path}: llama.rope.scaling.type is {scaling!r}; supported: none")
        experts = self._file.get("llama.expert_count", int)
        if experts:
            raise ValueError(f"{self.path}: llama.expert_count is {experts}; supported: dense models only")

    def _check_tensors(self) -> None:
        unknown = sorted(set(self._tensors) - set(self._layout))
        if unknown:
            raise ValueError(
                f"{self.path}: {len(unknown)} unknown tensors, first {unknown[0]}; supported for llama: "
                f"token_embd, output_norm, output, blk.N.({'|'.join(_LAYER_NAMES)}), each .weight, for N below "
                f"{self._config['num_hidden_layers']}"
            )
        missing = sorted(set(self._layout) - set(self._tensors))
        if missing:
            raise ValueError(
                f"{self.path}: {len(missing)} tensors missing, first {missing[0]}; a split file must be merged first"
            )
        for name, (_, expected) in self._layout.items():
            found = tuple(int(size) for size in reversed(self._tensors[name].shape))
            if found != expected:
                raise ValueError(f"{self.path}: tensor {name} has shape {found}, but the metadata implies {expected}")


def _unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order: per head, interleaved rotary pairs back to the two halves that HF rotates.

    (heads * head_dim, in) to the same shape; always a new array.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _expected_tensors(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF tensor name to (Hugging Face name, shape in Hugging Face order)."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
        "ffn_norm": (hidden,),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    layout: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        layout["output.weight"] = ("lm_head.weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        for name, hf_name in _LAYER_NAMES.items():
            layout[f"blk.{layer}.{name}.weight"] = (f"model.layers.{layer}.{hf_name}.weight", shapes[name])
    return layout
