"""The positions of a model by its files alone, for checks before any work: without JAX or reading a whole file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.tuning.models.json_file import json_object

TINY = 512
"""Positions of the model `random:tiny`."""
HEADER = 1 << 16
"""Bytes of a GGUF file that hold its sizes; the vocabulary, which is long, follows them."""
_CONTEXT = re.compile(rb"\.context_length(?:\x04\0{3}(.{4})|\x0a\0{3}(.{8}))", re.DOTALL)


def positions_in(config: Mapping[str, Any]) -> int | None:
    """Positions by a `config.json`: those of its pretraining, where longer ones have other frequencies (longrope)."""
    found, original = config.get("max_position_embeddings"), "original_max_position_embeddings"
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if {scaling.get("rope_type"), scaling.get("type")} & {"longrope", "su"}:
        found = scaling.get(original, config.get(original, found))
    return found if isinstance(found, int) else None


def positions_of(path: Path) -> int | None:
    """Positions of the model in a GGUF file or a Hugging Face folder; None where its header or config has none."""
    if path.is_dir():
        config = path / "config.json"
        values = json_object(config) if config.is_file() else {}
        return positions_in(values)
    with path.open("rb") as file:
        # The key ARCHITECTURE.context_length, the number of its type (4: uint32, 10: uint64), its value.
        match = _CONTEXT.search(file.read(HEADER))
    return int.from_bytes(match[1] or match[2], "little") if match else None
