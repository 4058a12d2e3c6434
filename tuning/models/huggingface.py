"""Decoder parameters to and from Hugging Face folders (safetensors and config.json)."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from rlhf.tuning import multihost
from rlhf.tuning.models.config import DecoderConfig, UnsupportedModel
from rlhf.tuning.models.config_json import from_hugging_face, to_hugging_face
from rlhf.tuning.models.decoder import Decoder, ScalarHead, abstract_decoder
from rlhf.tuning.models.json_file import json_object
from rlhf.tuning.models.mapping import SCORE, tensor_names
from rlhf.tuning.models.tensors import INDEX, KINDS, Place, Tensors, check, load_tensors
from rlhf.tuning.precision import real

if TYPE_CHECKING:
    from rlhf.tuning.models.gguf import GGUFCheckpoint

SHARD_BYTES = 5_000_000_000
"""The largest file that is written, unless one tensor is larger."""
_ROWS = 4096
Lazy = tuple[str, int, Callable[[], np.ndarray]]
"""Name, size in bytes and maker of a tensor."""


def random_params(config: DecoderConfig, seed: int) -> Any:
    """Random parameters: matrices normal with deviation 0.02, factors of norms one, biases zero."""
    return nnx.state(Decoder(config, rngs=nnx.Rngs(seed)), nnx.Param)


def _places(config: DecoderConfig) -> dict[str, Place]:
    """Places in a decoder's parameters; the tensors of one parameter follow each other."""
    shapes = flatten_dict(nnx.to_pure_dict(abstract_decoder(config)[1]))
    return {
        tensor: Place(path, at, names.transposed)
        for path, names in tensor_names(shapes, config).items()
        for at, tensor in names.tensors.items()
    }


def _pure(tree: Any) -> dict[str, Any]:
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def _lazy_tensors(
    config: DecoderConfig, pure: dict[str, Any], dtype: Any, types: Mapping[str, str] | None = None
) -> Iterator[Lazy]:
    """The tensors of parameters, of this type, or of those in `types` by their names. A tensor leaves the device when
    its maker is called."""
    flat = flatten_dict(pure)
    for path, names in tensor_names(flat, config).items():
        leaf = flat[path]
        for at, name in names.tensors.items():
            kind = jnp.dtype((types or {}).get(name, dtype))
            size = leaf.size // len(names.tensors) * kind.itemsize
            yield name, size, functools.partial(_tensor, leaf, at, names.transposed, kind)


def _tensor(leaf: Any, at: tuple[int, ...], transposed: bool, dtype: Any) -> np.ndarray:
    # JAX keeps a copy on the host for as long as an array lives: here for as long as a slice or a copy does.
    part = leaf[at] if at else jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
    value = multihost.to_host(part)
    return np.ascontiguousarray((value.T if transposed else value).astype(dtype))


def read_config(folder: Path) -> DecoderConfig:
    """The decoder config of a Hugging Face folder.

    Raises FileNotFoundError, ValueError for an invalid JSON file, UnsupportedModel naming the field.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: a model folder holds config.json and *.safetensors")
    return from_hugging_face(json_object(path), str(path))


def load_decoder(folder: Path, mesh: Mesh | None = None, dtype: str | None = None) -> tuple[DecoderConfig, Any]:
    """Config and parameters of a model folder, each parameter's part straight on the device of the mesh that keeps it.

    Parameters are of `precision.real`. With `dtype` those of `tensors.MATRICES` have that type: for weights that are
    not trained, in the type of computation, to which the decoder casts them anyway.
    """
    config = read_config(folder)
    with Tensors(folder) as tensors:
        config = as_stored(config, tensors)
        return config, load_tensors(config, tensors, abstract_decoder(config)[1], _places(config), mesh, dtype)


def as_stored(config: DecoderConfig, tensors: Tensors) -> DecoderConfig:
    """The config, untied if the files hold an LM head that differs from the embeddings.

    transformers 5 and vLLM read such folders in this way too.
    """
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    shape = tensors.shapes.get(head)
    if not config.tie_embeddings or shape is None or shape != tensors.shapes.get(table):
        return config
    # Some rows at a time: the two matrices are the largest of a model.
    cuts = (np.s_[row : min(row + _ROWS, shape[0]), :] for row in range(0, shape[0], _ROWS))
    same = all(np.array_equal(tensors.read(head, cut), tensors.read(table, cut)) for cut in cuts)
    return config if same else dataclasses.replace(config, tie_embeddings=False)


def load_scalar_head(folder: Path, mesh: Mesh | None = None, dtype: str | None = None) -> tuple[DecoderConfig, Any]:
    """As `load_decoder`, of a reward model or critic folder (`score.weight` [1, D] next to the decoder)."""
    config = read_config(folder)
    with Tensors(folder) as tensors:
        _check_head(config, tensors, folder)
        decoder = load_tensors(config, tensors, abstract_decoder(config)[1], _places(config), mesh, dtype)
        score = tensors.read(SCORE)[0].astype(real())
    head = jnp.asarray(score)
    if mesh is not None:
        head = jax.make_array_from_callback(score.shape, NamedSharding(mesh, PartitionSpec()), lambda at: score[at])
    return config, scalar_head_params(config, decoder, head)


def _check_head(config: DecoderConfig, tensors: Tensors, folder: Path) -> None:
    shape, wanted = tensors.shapes.get(SCORE), (1, config.hidden_size)
    if shape != wanted:
        # Of several labels the first would be taken for the score.
        raise UnsupportedModel(f"{folder}: {SCORE} has shape {shape}, a reward model has {wanted}")


def scalar_head_shapes(config: DecoderConfig) -> Any:
    """Parameter shapes of a ScalarHead."""
    return nnx.state(nnx.eval_shape(lambda: ScalarHead(config, rngs=nnx.Rngs(0))), nnx.Param)


def scalar_head_params(config: DecoderConfig, decoder: Any, score: jax.Array | None = None) -> Any:
    """Parameters of a ScalarHead over given decoder parameters; a new head starts at zero."""
    shapes = scalar_head_shapes(config)
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
    types: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and safetensors of the given type (None: of `precision.real`).

    types: of tensors by their Hugging Face names, where they have others.

    A ScalarHead becomes a sequence classifier of one label.

    Models larger than `shard_bytes` become several files with an index; one file's tensors are on the host at a time.
    """
    kind = jnp.dtype(dtype or real())
    pure = _pure(params)
    scalar = "decoder" in pure
    tensors = list(_lazy_tensors(config, pure["decoder"] if scalar else pure, kind, types))
    if scalar:
        score = multihost.to_host(pure["score"])[None].astype(kind)
        tensors.append((SCORE, score.nbytes, lambda: score))
    _write(folder, tensors, shard_bytes)
    write_config(folder, config, scalar, token_ids, kind.name)


def copy_decoder(
    source: Path, folder: Path, token_ids: dict[str, Any], *, scalar: bool = False, shard_bytes: int = SHARD_BYTES
) -> tuple[DecoderConfig, int]:
    """`write_decoder` of a model folder; with `scalar` of a sequence classifier of one label, with its head.

    A head that differs from the embeddings is kept although config.json says that they are tied. Raises as
    `load_decoder` and `load_scalar_head` do.
    """
    config = read_config(source)
    with Tensors(source) as tensors:
        if scalar:
            _check_head(config, tensors, source)
            # Classifiers have no LM head, tied or not.
            config = dataclasses.replace(config, tie_embeddings="lm_head.weight" not in tensors.shapes)
        else:
            config = as_stored(config, tensors)
        return config, write_decoder(folder, config, tensors, token_ids, scalar=scalar, shard_bytes=shard_bytes)


def write_decoder(
    folder: Path,
    config: DecoderConfig,
    tensors: Tensors | GGUFCheckpoint,
    token_ids: dict[str, Any],
    *,
    scalar: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Writes tensors as `save_decoder` does, each in its own type and on no device; returns the number of parameters.

    scalar: with the head of a reward model.

    One file's tensors are on the host at a time. Raises UnsupportedModel for tensors that are not the config's.
    """
    shapes, places = abstract_decoder(config)[1], _places(config)
    check(config, tensors, shapes, places)
    sizes = {name: math.prod(tensors.shapes[name]) for name in (*places, *([SCORE] if scalar else []))}
    held: dict[str, int] = collections.Counter()
    lazy = []
    for name, size in sizes.items():
        kind = jnp.dtype(KINDS[tensors.kinds[name]])
        held[kind.name] += size
        lazy.append((name, size * kind.itemsize, functools.partial(tensors.read, name)))
    _write(folder, lazy, shard_bytes)
    # Of most of the weights: some models have norms in a wider type than matrices.
    write_config(folder, config, scalar, token_ids, max(held, key=lambda kind: held[kind]))
    return sum(sizes.values())


def _write(folder: Path, tensors: Sequence[Lazy], shard_bytes: int) -> None:
    """Writes tensors as one safetensors file, or as several with an index. Every process of a group makes the tensors,
    one at a time; process 0 writes them."""
    if not multihost.is_primary():
        for _, _, make in tensors:
            make()
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Files of an earlier model with more shards would be read along with the new ones.
    for stale in [*folder.glob("model*.safetensors"), *folder.glob(INDEX)]:
        stale.unlink()
    shards: list[list[Lazy]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor[1] > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor[1]
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        save_file({key: make() for key, _, make in shard}, folder / name, metadata={"format": "pt"})
        file_of |= {key: name for key, _, _ in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(size for _, size, _ in tensors)}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_config(folder: Path, config: DecoderConfig, scalar: bool, token_ids: dict[str, Any], dtype: str) -> None:
    """Writes config.json, on process 0; `dtype` is that of the weights."""
    if not multihost.is_primary():
        return
    values = to_hugging_face(config, scalar=scalar, **token_ids | {"torch_dtype": dtype})
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def untied(config: DecoderConfig, params: Any) -> tuple[DecoderConfig, Any]:
    """The same decoder with a separate LM head, as (config, pure dict); unchanged if it has one already."""
    pure = _pure(params)
    if not config.tie_embeddings:
        return config, pure
    return dataclasses.replace(config, tie_embeddings=False), pure | {"head": pure["embedding"]}
