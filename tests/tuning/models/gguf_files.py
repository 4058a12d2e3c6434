"""GGUF files as llama.cpp's own package writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(
    path: Path,
    settings: dict[str, Any],
    tensors: dict[str, np.ndarray],
    architecture: str = "llama",
    dtype: gguf.GGMLQuantizationType | None = None,
    order: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """`settings` maps a method of GGUFWriter, such as add_expert_count, to its argument; dtype: of matrices."""
    writer = gguf.GGUFWriter(path, architecture, endianess=order)
    for method, value in settings.items():
        if value is not None:
            getattr(writer, method)(value)
    for name, weight in tensors.items():
        narrow = dtype is not None and weight.ndim == 2
        writer.add_tensor(
            name, gguf.quants.quantize(weight, dtype) if narrow else weight, raw_dtype=dtype if narrow else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
