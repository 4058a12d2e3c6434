"""Decoder parameters to and from Hugging Face folders (safetensors and config.json)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import safe_open
from safetensors.numpy import save_file

from tuning.models.config import DecoderConfig, UnsupportedModel, from_hugging_face, to_hugging_face
from tuning.models.decoder import Decoder, ScalarHead

SCORE = "score.weight"

# our path in a layer -> (Hugging Face name in a layer, transposed)
_LAYER = {
    ("attention_norm",): ("input_layernorm", False),
    ("q", "kernel"): ("self_attn.q_proj", True),
    ("k", "kernel"): ("self_attn.k_proj", True),
    ("v", "kernel"): ("self_attn.v_proj", True),
    ("o", "kernel"): ("self_attn.o_proj", True),
    ("mlp_norm",): ("post_attention_layernorm", False),
    ("gate", "kernel"): ("mlp.gate_proj", True),
    ("up", "kernel"): ("mlp.up_proj", True),
    ("down", "kernel"): ("mlp.down_proj", True),
}
_TOP = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_FROM_LAYER = {hf: (ours, transposed) for ours, (hf, transposed) in _LAYER.items()}
_FROM_TOP = {hf: ours for ours, hf in _TOP.items()}


def abstract_decoder(config: DecoderConfig) -> tuple[Any, Any]:
    """Graph and parameter shapes of a decoder, without making the parameters."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def random_params(config: DecoderConfig, seed: int) -> Any:
    """Fresh parameters (normal, 0.02)."""
    return nnx.state(Decoder(config, rngs=nnx.Rngs(seed)), nnx.Param)


def params_from_tensors(config: DecoderConfig, tensors: Iterable[tuple[str, np.ndarray]], source: str) -> Any:
    """Decoder parameters (an nnx State, float32) from named Hugging Face tensors, taken one at a time.

    Raises UnsupportedModel for a tensor that is unknown, missing or of another shape.
    """
    _, shapes = abstract_decoder(config)
    pure = nnx.to_pure_dict(shapes)
    top = {k: np.empty(v.shape, np.float32) for k, v in pure.items() if k != "layers"}
    layers = {k: np.empty(v.shape, np.float32) for k, v in flatten_dict(pure["layers"]).items()}
    wanted = {_TOP[k] for k in top} | {
        f"model.layers.{i}.{hf}.weight" for i in range(config.num_layers) for hf, _ in _LAYER.values()
    }
    for name, tensor in tensors:
        if name not in wanted:
            tied_copy = name == "lm_head.weight" and config.tie_embeddings
            if tied_copy or name == SCORE or name.endswith("rotary_emb.inv_freq"):
                continue
            raise UnsupportedModel(f"{source}: unexpected tensor {name} {tensor.shape}")
        wanted.discard(name)
        if name in _FROM_TOP:
            target, value = top[_FROM_TOP[name]], tensor
        else:
            _, _, index, rest = name.split(".", 3)
            ours, transposed = _FROM_LAYER[rest.removesuffix(".weight")]
            target, value = layers[ours][int(index)], tensor.T if transposed else tensor
        if target.shape != value.shape:
            raise UnsupportedModel(f"{source}: {name} has shape {tensor.shape}, the config asks for {target.shape}")
        target[...] = value
    if wanted:
        raise UnsupportedModel(f"{source}: {len(wanted)} tensors missing, first {sorted(wanted)[0]}")
    arrays = jax.tree.map(jnp.asarray, top | {"layers": unflatten_dict(layers)})
    nnx.replace_by_pure_dict(shapes, arrays)
    return shapes


def tensors_from_params(pure: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Named Hugging Face tensors (float32) of decoder parameters, given as a pure dict."""
    for ours, value in pure.items():
        if ours != "layers":
            yield _TOP[ours], np.asarray(value, np.float32)
    for ours, value in flatten_dict(pure["layers"]).items():
        hf, transposed = _LAYER[ours]
        stacked = np.asarray(value, np.float32)
        for i in range(stacked.shape[0]):
            yield f"model.layers.{i}.{hf}.weight", np.ascontiguousarray(stacked[i].T if transposed else stacked[i])


def read_config(folder: Path) -> DecoderConfig:
    """The decoder config of a Hugging Face folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: a model folder holds config.json and *.safetensors")
    return from_hugging_face(json.loads(path.read_text()), str(path))


def read_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of a folder, single or sharded safetensors, one at a time, as float32."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.safetensors")
    for path in paths:
        # The numpy reader of safetensors has no bfloat16; the flax one gives jax arrays of any type.
        with safe_open(path, framework="flax") as f:
            for name in f.keys():  # noqa: SIM118 (no mapping)
                yield name, np.asarray(f.get_tensor(name).astype(jnp.float32))


def load_decoder(folder: Path) -> tuple[DecoderConfig, Any]:
    """Config and parameters of a model folder."""
    config = read_config(folder)
    return config, params_from_tensors(config, read_tensors(folder), str(folder))


def load_scalar_head(folder: Path) -> tuple[DecoderConfig, Any]:
    """Config and parameters of a reward model or critic folder (`score.weight` [1, D] beside the decoder)."""
    config = read_config(folder)
    score: dict[str, np.ndarray] = {}

    def decoder_tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in read_tensors(folder):
            if name == SCORE:
                score["value"] = tensor
            else:
                yield name, tensor

    decoder = params_from_tensors(config, decoder_tensors(), str(folder))
    if "value" not in score:
        raise UnsupportedModel(f"{folder} has no {SCORE}: it is no reward model")
    return config, scalar_head_params(config, decoder, jnp.asarray(score["value"][0]))


def scalar_head_params(config: DecoderConfig, decoder: Any, score: jax.Array | None = None) -> Any:
    """Parameters of a ScalarHead over given decoder parameters; a new head starts at zero."""
    shapes = nnx.state(nnx.eval_shape(lambda: ScalarHead(config, rngs=nnx.Rngs(0))), nnx.Param)
    values: dict[str, Any] = {"decoder": nnx.to_pure_dict(decoder)}
    values["score"] = jnp.zeros(config.hidden_size) if score is None else score
    nnx.replace_by_pure_dict(shapes, values)
    return shapes


def save_decoder(folder: Path, config: DecoderConfig, params: Any, token_ids: dict[str, Any]) -> None:
    """Writes config.json and model.safetensors; a ScalarHead becomes a sequence classifier of one label."""
    folder.mkdir(parents=True, exist_ok=True)
    values = to_hugging_face(config, **token_ids)
    pure = nnx.to_pure_dict(params)
    if "decoder" in pure:
        tensors = dict(tensors_from_params(pure["decoder"]))
        tensors[SCORE] = np.asarray(pure["score"], np.float32)[None]
        values |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    else:
        tensors = dict(tensors_from_params(pure))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def fingerprint(params: Any) -> str:
    """SHA-256 over names, shapes and bytes of the parameters: which policy this is."""
    h = hashlib.sha256()
    for path, leaf in sorted(jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params)), key=lambda x: str(x[0])):
        array = np.ascontiguousarray(leaf)
        h.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        h.update(array.reshape(-1).view(np.uint8).data)
    return h.hexdigest()
