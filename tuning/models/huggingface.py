"""Decoder parameters to and from Hugging Face folders (safetensors and config.json)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import safe_open
from safetensors.numpy import save_file

from tuning.models.config import DecoderConfig, UnsupportedModel
from tuning.models.config_json import from_hugging_face, to_hugging_face
from tuning.models.decoder import Decoder, ScalarHead, abstract_decoder
from tuning.models.mapping import SCORE, tensor_names
from tuning.precision import real

INDEX = "model.safetensors.index.json"
ParamPath = tuple[Any, ...]
"""The path of a parameter in a tree."""
SHARD_BYTES = 5_000_000_000
"""The largest file that is written, unless one tensor is larger."""


def random_params(config: DecoderConfig, seed: int) -> Any:
    """Random parameters: matrices normal with deviation 0.02, factors of norms one, biases zero."""
    return nnx.state(Decoder(config, rngs=nnx.Rngs(seed)), nnx.Param)


class Place(NamedTuple):
    """The parameter, or part of one, that a tensor of a checkpoint fills."""

    path: ParamPath
    """The parameter."""
    part: tuple[Any, ...] = ()
    """Index into the parameter, such as (layer,); all of it by default."""
    transposed: bool = False


def params_from_tensors(
    config: DecoderConfig, tensors: Iterable[tuple[str, np.ndarray]], source: str, shardings: Any = None
) -> Any:
    """Decoder parameters (an nnx State of `precision.real`) from named Hugging Face tensors, taken one at a time.

    In the order of `_places`, at most one parameter is on the host at a time. Otherwise like `place_tensors`.
    """
    return place_tensors(config, tensors, source, abstract_decoder(config)[1], _places(config), shardings)


def place_tensors(
    config: DecoderConfig,
    tensors: Iterable[tuple[str, np.ndarray]],
    source: str,
    state: Any,
    places: Mapping[str, Place],
    shardings: Any = None,
) -> Any:
    """`state`, an nnx State of shapes and types, with the values that named tensors have at their `places`.

    A parameter is collected on the host and goes to the device after its last tensor. `shardings` is a pytree
    of the parameters' structure (a state or a pure dict) with a `jax.sharding.Sharding` for each.

    Raises UnsupportedModel for a tensor that is unknown, missing or of another shape.
    """
    shapes = flatten_dict(nnx.to_pure_dict(state))
    placed = {} if shardings is None else flatten_dict(_pure(shardings))
    pending = dict(places)
    remaining = collections.Counter(place.path for place in places.values())
    host: dict[ParamPath, np.ndarray] = {}
    done: dict[ParamPath, jax.Array] = {}
    for name, tensor in tensors:
        if name not in pending:
            # Some checkpoints repeat a tied head or store rotary frequencies; `load_scalar_head` reads score heads.
            tied_copy = name == "lm_head.weight" and config.tie_embeddings
            if tied_copy or name == SCORE or name.endswith("rotary_emb.inv_freq"):
                continue
            raise UnsupportedModel(f"{source}: unexpected tensor {name} {tensor.shape}")
        path, part, transposed = pending.pop(name)
        if path not in host:
            host[path] = _aligned(shapes[path])
        target = host[path][part]
        value = tensor.T if transposed else tensor
        if target.shape != value.shape:
            expected = target.T.shape if transposed else target.shape
            raise UnsupportedModel(f"{source}: {name} has shape {tensor.shape}, the config asks for {expected}")
        target[...] = value
        remaining[path] -= 1
        if not remaining[path]:
            done[path] = jax.device_put(host.pop(path), placed.get(path))
            # A view would keep the host's copy alive.
            del target
    if pending:
        raise UnsupportedModel(f"{source}: {len(pending)} tensors missing, first {sorted(pending)[0]}")
    nnx.replace_by_pure_dict(state, unflatten_dict(done))
    return state


def _aligned(like: Any) -> np.ndarray:
    """An array of this shape and type at a multiple of 64 bytes, where XLA on CPU takes it without a copy."""
    size = like.size * like.dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(like.dtype).reshape(like.shape)


def _places(config: DecoderConfig) -> dict[str, Place]:
    """Places in a decoder's parameters; the tensors of one parameter follow each other."""
    shapes = flatten_dict(nnx.to_pure_dict(abstract_decoder(config)[1]))
    return {
        tensor: Place(path, (layer,) if names.stacked else (), names.transposed)
        for path, names in tensor_names(shapes, config.num_layers).items()
        for layer, tensor in enumerate(names.tensors)
    }


def _pure(tree: Any) -> dict[str, Any]:
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def tensors_from_params(pure: dict[str, Any], dtype: Any = np.float32) -> Iterator[tuple[str, np.ndarray]]:
    """Named Hugging Face tensors of decoder parameters, given as a pure dict, one at a time."""
    for name, _, make in _lazy_tensors(pure, dtype):
        yield name, make()


def _lazy_tensors(pure: dict[str, Any], dtype: Any) -> Iterator[tuple[str, int, Callable[[], np.ndarray]]]:
    """Name, size in bytes and maker of each tensor. A tensor leaves the device when its maker is called."""
    flat = flatten_dict(pure)
    layers = max((leaf.shape[0] for path, leaf in flat.items() if path[0] == "layers"), default=0)
    for path, names in tensor_names(flat, layers).items():
        leaf, transposed = flat[path], names.transposed
        size = leaf.size // len(names.tensors) * np.dtype(dtype).itemsize
        for layer, name in enumerate(names.tensors):
            yield name, size, functools.partial(_tensor, leaf, layer if names.stacked else None, transposed, dtype)


def _tensor(leaf: Any, layer: int | None, transposed: bool, dtype: Any) -> np.ndarray:
    value = np.asarray(leaf if layer is None else leaf[layer])
    return np.ascontiguousarray((value.T if transposed else value).astype(dtype))


def read_config(folder: Path) -> DecoderConfig:
    """The decoder config of a Hugging Face folder. Raises FileNotFoundError, or UnsupportedModel naming the field."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: a model folder holds config.json and *.safetensors")
    return from_hugging_face(json.loads(path.read_text()), str(path))


def read_tensors(folder: Path, first: Iterable[str] = ()) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of a folder, one at a time, in their own type: those named in `first` in that order, then the rest.

    The files are those of `model.safetensors.index.json`, else `model.safetensors`, else all `*.safetensors`.
    """
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.is_file():
        paths = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"{index} names {missing[0]}, which is not there; {len(missing)} files missing")
    else:
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.safetensors")
    with contextlib.ExitStack() as stack:
        place: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            file = stack.enter_context(safe_open(path, framework="numpy"))
            place |= dict.fromkeys(file.keys(), (path, file))
        for name in dict.fromkeys([*(n for n in first if n in place), *place]):
            path, file = place[name]
            kind = file.get_slice(name).get_dtype()
            if kind not in ("F64", "F32", "F16", "BF16"):
                raise UnsupportedModel(f"{path}: {name} is of type {kind}, supported are F64, F32, F16 and BF16")
            yield name, file.get_tensor(name)


def load_decoder(folder: Path, shardings: Any = None) -> tuple[DecoderConfig, Any]:
    """Config and parameters (of `precision.real`) of a model folder; `shardings` as in `params_from_tensors`."""
    config = read_config(folder)
    return config, params_from_tensors(config, read_tensors(folder, _places(config)), str(folder), shardings)


def load_scalar_head(folder: Path) -> tuple[DecoderConfig, Any]:
    """Config and parameters of a reward model or critic folder (`score.weight` [1, D] beside the decoder)."""
    config = read_config(folder)
    score: dict[str, np.ndarray] = {}

    def decoder_tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in read_tensors(folder, _places(config)):
            if name == SCORE:
                score["value"] = tensor.astype(real())
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
    values["score"] = jnp.zeros(config.hidden_size, real()) if score is None else score
    nnx.replace_by_pure_dict(shapes, values)
    return shapes


def save_decoder(
    folder: Path,
    config: DecoderConfig,
    params: Any,
    token_ids: dict[str, Any],
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and safetensors of the given type (None: of `precision.real`).

    A ScalarHead becomes a sequence classifier of one label.

    Models larger than `shard_bytes` become several files with an index; one file's tensors are on the host at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = jnp.dtype(dtype or real())
    pure = _pure(params)
    scalar = "decoder" in pure
    tensors = list(_lazy_tensors(pure["decoder"] if scalar else pure, kind))
    if scalar:
        score = np.asarray(pure["score"])[None].astype(kind)
        tensors.append((SCORE, score.nbytes, lambda: score))
    # Files of an earlier model with more shards would be read along with the new ones.
    for stale in [*folder.glob("model*.safetensors"), *folder.glob(INDEX)]:
        stale.unlink()
    shards = _shards(tensors, shard_bytes)
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        save_file({tensor: make() for tensor, _, make in shard}, folder / name, metadata={"format": "pt"})
        file_of |= {tensor: name for tensor, _, _ in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(size for _, size, _ in tensors)}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    values = to_hugging_face(config, scalar=scalar, **token_ids | {"torch_dtype": kind.name})
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _shards(tensors: list[Any], limit: int) -> list[list[Any]]:
    """The (name, bytes, maker) of each file, in order."""
    shards: list[list[Any]] = [[]]
    used = 0
    for entry in tensors:
        if shards[-1] and used + entry[1] > limit:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += entry[1]
    return shards


def untied(config: DecoderConfig, params: Any) -> tuple[DecoderConfig, Any]:
    """The same decoder with a separate LM head, as (config, pure dict); unchanged if it has one already."""
    pure = _pure(params)
    if not config.tie_embeddings:
        return config, pure
    return dataclasses.replace(config, tie_embeddings=False), pure | {"head": pure["embedding"]}


def fingerprint(params: Any) -> str:
    """SHA-256 over names, types, shapes and bytes of the parameters: the identity of a policy."""
    h = hashlib.sha256()
    for path, leaf in sorted(jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params)), key=lambda x: str(x[0])):
        array = np.ascontiguousarray(leaf)
        h.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        h.update(array.reshape(-1).view(np.uint8).data)
    return h.hexdigest()
