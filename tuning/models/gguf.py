"""Read weights and configuration out of a GGUF file, in Hugging Face names and layout; families in `gguf_families`.

Needs only numpy and the `gguf` package: no JAX, no torch. The file is memory-mapped and tensors are dequantised to
float32 one at a time, so the peak is the file's metadata plus the largest tensor.

Sources: the GGUF specification (ggml-org/ggml, docs/gguf.md) for the keys, and llama.cpp's convert_hf_to_gguf.py
(LlamaModel.permute) for the row order of the q and k projections that `tensors` undoes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlhf.tuning.models.families import FAMILIES
from rlhf.tuning.models.gguf_families import ARCHITECTURES, PERMUTED, expected_tensors, layer_tensors, read_config
from rlhf.tuning.models.gguf_file import GGUFFile

ROPE_FACTORS: Final = "rope_freqs.weight"


class GGUFCheckpoint:
    """Weights and configuration of a GGUF model, as Hugging Face names and layout.

    Names, shapes and metadata are checked on opening; tensor data is only read by `read`. Give an open
    `GGUFFile` in place of the path to share it with `rlhf.tuning.models.tokenizer.tokenizer_from_gguf`: opening is
    slow.

    Raises ValueError, naming the file and the field, for an architecture outside ARCHITECTURES, for a
    tensor that is unknown, missing or of an unexpected shape, and for a variant that this reader does not implement
    (other scaled or partial rotary embeddings, mixture of experts, sizes that differ per layer, foreign byte order).
    FileNotFoundError and ValueError as in `GGUFFile`.
    """

    def __init__(self, path: str | Path | GGUFFile) -> None:
        self._file = path if isinstance(path, GGUFFile) else GGUFFile(path)
        self.path = self._file.path
        self._name = self._file.require("general.architecture", str)
        if self._name not in ARCHITECTURES:
            raise ValueError(
                f"{self.path}: general.architecture is {self._name!r}; supported: {', '.join(ARCHITECTURES)}"
            )
        if self._file.reader.byte_order != "I":
            raise ValueError(f"{self.path}: the file's byte order is not this machine's; supported: native order")
        self._tensors = {tensor.name: tensor for tensor in self._file.reader.tensors}
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise ValueError(f"{self.path}: tensor token_embd.weight is missing; a split file must be merged first")
        # Part of the configuration, not a weight: it must not be among the tensors that are checked and read.
        factors = self._tensors.pop(ROPE_FACTORS, None)
        self._config = read_config(
            self._file,
            self._name,
            # GGUF dimensions are innermost first: (hidden, vocab).
            vocab_size=int(embedding.shape[-1]),
            tied="output.weight" not in self._tensors,
            rope_factors=None if factors is None else np.asarray(factors.data, np.float32),
        )
        self._layout = expected_tensors(self._name, self._config)
        self._check_tensors()
        self._own_names = {hf_name: name for name, (hf_name, _) in self._layout.items()}

    def config(self) -> dict[str, Any]:
        """A new dict of values for the family's Hugging Face config class (`transformers.LlamaConfig(**config)`).

        bos, eos and pad ids are None where the metadata has none. tie_word_embeddings is true where the file holds no
        output.weight. vocab_size is the number of embedding rows.
        """
        return copy.deepcopy(self._config)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by its Hugging Face name: of matrices (out, in), of embeddings (vocab, hidden)."""
        return dict(self._layout[name] for name in self._tensors)

    @property
    def kinds(self) -> dict[str, str]:
        """The type in which each tensor is read, by its name in safetensors."""
        return dict.fromkeys(self.shapes, "F32")

    @property
    def source(self) -> str:
        """The file, for errors."""
        return str(self.path)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor of a Hugging Face name, contiguous and owned by the caller.

        Raises ValueError for a quantisation that the `gguf` package cannot decode, KeyError for an unknown name.
        """
        from gguf.quants import dequantize

        name = self._own_names[name]
        heads = {"attn_q": self._config["num_attention_heads"], "attn_k": self._config["num_key_value_heads"]}
        tensor, (_, shape) = self._tensors[name], self._layout[name]
        try:
            data = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, KeyError) as error:
            raise ValueError(
                f"{self.path}: tensor {name} has type {tensor.tensor_type.name}, which gguf cannot decode; "
                "use a file of another quantisation, such as Q8_0 or F16"
            ) from error
        kind = name.split(".")[-2]
        # In the file weights of norms are factors, around 1.
        shift = FAMILIES[ARCHITECTURES[self._name]].traits.get("norm_offset")
        if self._name in PERMUTED and kind in heads:
            data = _unpermute(data, heads[kind])
        elif shift and kind.endswith("norm"):
            data = data - np.float32(shift)
        elif np.may_share_memory(data, tensor.data):
            # A tensor stored as F32 comes back as a view, which is read-only and keeps the file mapped.
            data = data.copy()
        return data.reshape(shape)

    def _check_tensors(self) -> None:
        unknown = sorted(set(self._tensors) - set(self._layout))
        if unknown:
            raise ValueError(
                f"{self.path}: {len(unknown)} unknown tensors, first {unknown[0]}; supported for {self._name}: "
                f"token_embd, output_norm, output, blk.N.({'|'.join(layer_tensors(self._name))}) for N below "
                f"{self._config['num_hidden_layers']}"
            )
        missing = sorted(set(self._layout) - set(self._tensors))
        if missing:
            raise ValueError(
                f"{self.path}: {len(missing)} tensors missing, first {missing[0]}; a split file must be merged first"
            )
        for name, (_, expected) in self._layout.items():
            # Dimensions are innermost first in the file.
            shape = tuple(int(size) for size in reversed(self._tensors[name].shape))
            if shape != expected:
                raise ValueError(f"{self.path}: tensor {name} has shape {shape}, but the metadata implies {expected}")


def _unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order: per head, interleaved rotary pairs back to the two halves that HF rotates.

    (heads * head_dim, in) to the same shape; always a new array. Rows of a head of size 6, a and b the two halves:

        GGUF          a0 b0 a1 b1 a2 b2
        Hugging Face  a0 a1 a2 b0 b1 b2
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
