"""Reads an adapter's folder as PEFT defines it, for comparison with the tree that training left."""

import json
import re

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file

from rlhf.tuning.models.lora import PROJECTIONS, LoraConfig, trainable_shapes
from rlhf.tuning.models.mapping import PROJECTIONS as MODULES

PREFIX = "base_model.model."


def load_adapter(folder, config):
    """(LoraConfig, trainable tree) of the folder over a model of `config`; all tensors are used."""
    values = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    modules = {re.split(r"\.lora_|layers\.\d+\.", name)[1] for name in tensors if "lora_" in name}
    targets = tuple(name for name in PROJECTIONS if MODULES[name] in modules)
    lora = LoraConfig(values["r"], float(values["lora_alpha"]), targets, use_rslora=values["use_rslora"])
    role = "scalar" if f"{PREFIX}score.weight" in tensors else "decoder"
    shapes = trainable_shapes(config, role, lora)
    arrays = {}
    for path, shape in flatten_dict(nnx.to_pure_dict(shapes)).items():
        if path == ("score",):
            arrays[path] = jnp.asarray(tensors.pop(f"{PREFIX}score.weight")[0])
            continue
        name = f"{PREFIX}model.layers.{{}}.{MODULES[path[-3]]}.lora_{path[-1].upper()}.weight"
        arrays[path] = jnp.stack([tensors.pop(name.format(i)).T for i in range(shape.shape[0])])
        assert arrays[path].shape == shape.shape
    assert not tensors
    nnx.replace_by_pure_dict(shapes, unflatten_dict(arrays))
    return lora, jax.tree.map(jnp.asarray, shapes)
