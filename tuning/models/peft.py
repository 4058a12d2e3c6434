"""Adapters to and from PEFT's folders: `adapter_config.json` and `adapter_model.safetensors`.

Axes: R rank, I in, O out. PEFT stores A as [R, I] and B as [O, R]; here they are [I, R] and [R, O], layers stacked.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import safe_open
from safetensors.numpy import save_file

from tuning import multihost
from tuning.models.config import DecoderConfig, UnsupportedModel
from tuning.models.json_file import json_object
from tuning.models.lora import PROJECTIONS, LoraConfig, Role, trainable_shapes
from tuning.models.mapping import PROJECTIONS as MODULES
from tuning.precision import real

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SCORE = f"{_PREFIX}score.weight"
_NAMES = {module: name for name, module in MODULES.items()}
_KEY = re.compile(rf"{re.escape(_PREFIX)}model\.layers\.(\d+)\.(\w+\.\w+)\.lora_(A|B)\.weight")

# Fields of adapter_config.json that change what an adapter computes, with the values of an ordinary one.
_ORDINARY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "use_dora": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
}


def save_adapter(folder: Path, trainable: Any, lora: LoraConfig, base: str | None = None) -> None:
    """Writes a trainable tree of `lora.tune` in PEFT's format; `base` is the name or path of the model below it."""
    tensors: dict[str, np.ndarray] = {}
    scalar = False
    for path, value in flatten_dict(nnx.to_pure_dict(trainable)).items():
        # An adapter's factor of all layers is no larger than one layer of the model.
        host = multihost.to_host(value)
        if path == ("score",):
            tensors[_SCORE], scalar = host[None], True
            continue
        name, factor = path[-3], path[-1].upper()
        for i, matrix in enumerate(host):
            key = f"{_PREFIX}model.layers.{i}.{MODULES[name]}.lora_{factor}.weight"
            tensors[key] = np.ascontiguousarray(matrix.T)
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
        "target_modules": [MODULES[name].split(".")[1] for name in PROJECTIONS if name in lora.targets],
        "task_type": "SEQ_CLS" if scalar else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.use_rslora,
    }
    if not multihost.is_primary():
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def load_adapter(folder: Path, config: DecoderConfig) -> tuple[LoraConfig, Any]:
    """(LoraConfig, trainable tree) of a PEFT folder over a model of `config`; `quantize` is none.

    Raises FileNotFoundError for a missing file; UnsupportedModel, naming file and field or tensor, for an adapter
    that does not compute what Hu et al. (2021) define or does not fit the model.
    """
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing: an adapter folder holds {CONFIG} and {TENSORS}")
    values = json_object(folder / CONFIG)
    for name, ordinary in _ORDINARY.items():
        if name in values and values[name] not in ordinary:
            raise UnsupportedModel(f"{folder / CONFIG}: {name} is {values[name]!r}, supported is {ordinary[0]!r}")
    for name, expected in {"r": (int,), "lora_alpha": (int, float), "use_rslora": (bool,)}.items():
        value = values.get(name, False if name == "use_rslora" else None)
        # In Python a bool is an int.
        if type(value) not in expected:
            kinds = " or ".join(kind.__name__ for kind in expected)
            raise UnsupportedModel(f"{folder / CONFIG}: {name} is {value!r}, expected {kinds}")
    # NumPy has no bfloat16, in which adapters are often stored; JAX has.
    with safe_open(folder / TENSORS, framework="flax") as f:
        tensors = {name: np.asarray(f.get_tensor(name).astype(real())) for name in f.keys()}  # noqa: SIM118
    score = tensors.pop(_SCORE, None)
    role: Role = "decoder" if score is None else "scalar"
    matches = {name: _KEY.fullmatch(name) for name in tensors}
    strange = sorted(name for name, match in matches.items() if match is None or match[2] not in _NAMES)
    if strange:
        raise UnsupportedModel(f"{folder / TENSORS}: unexpected tensor {strange[0]} {tensors[strange[0]].shape}")
    present = {_NAMES[match[2]] for match in matches.values() if match is not None}
    lora = LoraConfig(
        rank=values["r"],
        alpha=float(values["lora_alpha"]),
        targets=tuple(name for name in PROJECTIONS if name in present),
        use_rslora=values.get("use_rslora", False),
    )
    return lora, _trainable(folder / TENSORS, config, role, lora, tensors, score)


def _trainable(
    path: Path, config: DecoderConfig, role: Role, lora: LoraConfig, tensors: dict[str, np.ndarray], score: Any
) -> Any:
    shapes = trainable_shapes(config, role, lora)
    arrays: dict[tuple[str, ...], Any] = {}
    for ours, shape in flatten_dict(nnx.to_pure_dict(shapes)).items():
        if ours == ("score",):
            arrays[ours] = jnp.asarray(score[0])
            continue
        layers = []
        for i in range(shape.shape[0]):
            key = f"{_PREFIX}model.layers.{i}.{MODULES[ours[-3]]}.lora_{ours[-1].upper()}.weight"
            if key not in tensors:
                raise UnsupportedModel(f"{path}: {key} is missing")
            # [R, I] to [I, R], [O, R] to [R, O].
            layers.append(tensors.pop(key).T)
            if layers[-1].shape != shape.shape[1:]:
                raise UnsupportedModel(
                    f"{path}: {key} has shape {layers[-1].T.shape}, "
                    f"rank {lora.rank} and the model ask for {shape.shape[:0:-1]}"
                )
        arrays[ours] = jnp.asarray(np.stack(layers))
    if tensors:
        raise UnsupportedModel(f"{path}: {sorted(tensors)[0]} is of a layer that the model does not have")
    nnx.replace_by_pure_dict(shapes, unflatten_dict(arrays))
    return jax.tree.map(jnp.asarray, shapes)
