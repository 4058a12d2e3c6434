"""Adapters as folders of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

Axes: R rank, I in, O out. PEFT stores A as [R, I] and B as [O, R]; here they are [I, R] and [R, O], layers stacked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from rlhf.tuning import multihost
from rlhf.tuning.models.lora import LoraConfig
from rlhf.tuning.models.mapping import PROJECTIONS as MODULES

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SCORE = f"{_PREFIX}score.weight"


def _name(path: tuple[Any, ...], layer: int) -> str:
    """The name of a factor of a layer."""
    return f"{_PREFIX}model.layers.{layer}.{MODULES[path[-3]]}.lora_{path[-1].upper()}.weight"


def load_adapter(folder: Path, shapes: Any) -> Any:
    """The trainable tree of `save_adapter`, on the host; `shapes` are those of `lora.trainable_shapes`."""
    tensors = load_file(folder / TENSORS)

    def value(path: tuple[Any, ...], like: Any) -> np.ndarray:
        if path == ("score",):
            return tensors[_SCORE][0].astype(like.dtype)
        return np.stack([tensors[_name(path, i)].T for i in range(like.shape[0])], dtype=like.dtype)

    flat = flatten_dict(nnx.to_pure_dict(shapes))
    # A copy, which is filled.
    tree = jax.tree.map(lambda x: x, shapes)
    nnx.replace_by_pure_dict(tree, unflatten_dict({path: value(path, like) for path, like in flat.items()}))
    return tree


def save_adapter(folder: Path, trainable: Any, lora: LoraConfig, base: str | None = None) -> None:
    """Writes a trainable tree of `lora.tune` in PEFT's format; `base` is the name or path of the model below it."""
    tensors: dict[str, np.ndarray] = {}
    scalar = False
    adapted: set[str] = set()
    for path, value in flatten_dict(nnx.to_pure_dict(trainable)).items():
        # An adapter's factor of all layers is no larger than one layer of the model.
        host = multihost.to_host(value)
        if path == ("score",):
            tensors[_SCORE], scalar = host[None], True
            continue
        adapted.add(path[-3])
        for i, matrix in enumerate(host):
            tensors[_name(path, i)] = np.ascontiguousarray(matrix.T)
    values = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": ["score"] if scalar else None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": [module.split(".")[1] for name, module in MODULES.items() if name in adapted],
        "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.use_rslora,
    }
    if not multihost.is_primary():
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
