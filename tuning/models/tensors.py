"""Named tensors of checkpoints into parameters: from files straight to the devices that hold them.

A tensor has a `Place`: the parameter, or the layer of one, that it fills. Files are read in slices by a few threads,
one device's part of one parameter at a time, so the host holds at most
that part in addition to the memory of its own devices.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from rlhf.tuning.models.config import DecoderConfig, UnsupportedModel
from rlhf.tuning.models.json_file import json_object
from rlhf.tuning.models.mapping import SCORE
from rlhf.tuning.models.sharding import path_names, shardings

if TYPE_CHECKING:
    from rlhf.tuning.models.gguf import GGUFCheckpoint

INDEX = "model.safetensors.index.json"
KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of tensors that are read, by their names in safetensors files."""
MXFP4 = ("_blocks", "_scales")
"""Ends of the names of a matrix in MXFP4: pairs of numbers in 4 bits, and one scale for 32 of them."""
THREADS = 4
"""Slices that are read at a time."""
MATRICES = ("kernel", "embedding", "head")
"""Parameters that the decoder casts to the type of computation before it uses them, by the end of their path."""

ParamPath = tuple[Any, ...]
"""The path of a parameter in a tree."""
Cut = tuple[slice, ...]
"""A part of an array: a range of each dimension."""


class Place(NamedTuple):
    """The parameter, or part of one, that a tensor of a checkpoint fills."""

    path: ParamPath
    """The parameter."""
    part: tuple[Any, ...] = ()
    """Index into the parameter, such as (layer,) or (layer, expert); all of it by default."""
    transposed: bool = False


class Tensors:
    """The tensors of a folder, open for reading by several threads; to be used in a `with` block.

    The files are those of `model.safetensors.index.json`, which says where a tensor is, else `model.safetensors`, else
    all `*.safetensors`. A pair of `NAME_blocks` and `NAME_scales` is read as NAME: a matrix in MXFP4 of each expert,
    [E, in, out], as bfloat16, which holds its values exactly.

    Raises FileNotFoundError naming a file that is not there, ValueError naming one that cannot be read, and
    UnsupportedModel for a tensor of a type that is not in `KINDS`, or in two files without an index.
    """

    def __init__(self, folder: Path):
        self.folder, self._stack = folder, contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._pairs: dict[str, list[Any]] = {}
        packed: dict[str, Any] = {}
        self.kinds: dict[str, str] = {}
        """The type of each tensor, as one of `KINDS`."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """The shape of each tensor."""
        homes, paths = _files(folder)
        with contextlib.ExitStack() as opened:
            for path in paths:
                file = opened.enter_context(_opened(path))
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    if homes.get(name, path.name) != path.name:
                        continue
                    if name in self._files:
                        raise UnsupportedModel(
                            f"{path}: {name} is in another file of the folder too; keep one model's files there"
                        )
                    found = file.get_slice(name)
                    if found.get_dtype() == "U8" and name.endswith(MXFP4):
                        packed[name] = file
                        continue
                    if found.get_dtype() not in KINDS:
                        raise UnsupportedModel(
                            f"{path}: {name} is of type {found.get_dtype()}, supported are F64, F32, F16 and BF16"
                        )
                    self._files[name], self.kinds[name] = file, found.get_dtype()
                    self.shapes[name] = tuple(found.get_shape())
            self._unpack(packed)
            self._stack = opened.pop_all()

    def _unpack(self, packed: Mapping[str, Any]) -> None:
        """Adds the matrices of the pairs in MXFP4 among these tensors."""
        for name in sorted({name.rpartition("_")[0] for name in packed}):
            pair = [packed.get(name + end) for end in MXFP4]
            shapes = [
                () if file is None else tuple(file.get_slice(name + end).get_shape())
                for file, end in zip(pair, MXFP4, strict=True)
            ]
            if len(shapes[0]) != 4 or shapes[0] != (*shapes[1], 16):
                raise UnsupportedModel(
                    f"{self.folder}: {name} has blocks {shapes[0]} and scales {shapes[1]}, supported are "
                    "[experts, out, in / 32, 16] and [experts, out, in / 32]"
                )
            experts, out, groups, _ = shapes[0]
            self._pairs[name], self.kinds[name] = pair, "BF16"
            self.shapes[name] = experts, 32 * groups, out

    @property
    def source(self) -> str:
        """The folder, for errors."""
        return str(self.folder)

    @property
    def types(self) -> dict[str, str]:
        """The type of each tensor, as NumPy names it."""
        return {name: KINDS[kind] for name, kind in self.kinds.items()}

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.clear()
        self._pairs.clear()
        self._stack.close()

    def read(self, name: str, cut: Cut | None = None) -> np.ndarray:
        """A tensor, or a part of it, in its own type."""
        if name in self._pairs:
            return self._dequantized(name, cut or (slice(None),) * 3)
        file = self._files[name]
        whole: np.ndarray = file.get_tensor(name) if cut is None else file.get_slice(name)[cut]
        return whole

    def _dequantized(self, name: str, cut: Cut) -> np.ndarray:
        blocks, scales = (file.get_slice(name + end) for file, end in zip(self._pairs[name], MXFP4, strict=True))
        experts, into, outs = (range(size)[part] for size, part in zip(self.shapes[name], cut, strict=True))
        value = np.empty((len(experts), len(into), len(outs)), KINDS["BF16"])
        # One expert at a time: its numbers in float32 are four times as large as those stored.
        for row, expert in zip(value, experts, strict=True):
            codes, scale = (file[expert : expert + 1, cut[2]][0] for file in (blocks, scales))
            # The first number of a byte is in its low bits.
            pairs = np.stack([codes & 15, codes >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn)
            grouped = pairs.reshape(*scale.shape, 32).astype(np.float32)
            whole = grouped * scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
            row[...] = whole.reshape(len(outs), -1)[:, cut[1]].T
        return value


def _files(folder: Path) -> tuple[dict[str, str], list[Path]]:
    """The file of each tensor, where an index names it, and the files of a folder."""
    index, single = folder / INDEX, folder / "model.safetensors"
    homes: dict[str, str] = {}
    if index.is_file():
        homes = _weight_map(index)
        paths = [folder / name for name in sorted(set(homes.values()))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"{index} names {missing[0]}, which is not there; {len(missing)} files missing")
    else:
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.safetensors")
    return homes, paths


def _weight_map(index: Path) -> dict[str, str]:
    found = json_object(index).get("weight_map")
    # Files of the folder by their names: a path would lead out of it.
    if not isinstance(found, dict) or not all(isinstance(n, str) and Path(n).name == n for n in found.values()):
        raise ValueError(f"{index} has no readable weight_map; check that the download is complete")
    return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        # The library does not say which file it was.
        raise ValueError(
            f"{path}: not a readable safetensors file ({error}); check that the download is complete"
        ) from error


def load_tensors(
    config: DecoderConfig,
    tensors: Tensors,
    state: Any,
    places: Mapping[str, Place],
    mesh: Mesh | None = None,
    dtype: Any = None,
) -> Any:
    """`state`, an nnx State of shapes and types, with the values that the tensors of a folder have at their `places`.

    On a mesh each parameter is sharded as `models.sharding` says, and a device gets its part alone; there a part of a
    place is one index of some first axes, or nothing. With `dtype` the `MATRICES` have that type.

    Raises UnsupportedModel, before anything is read, for a tensor that is unknown, missing or of another shape.
    """
    check(config, tensors, state, places)
    shapes = flatten_dict(nnx.to_pure_dict(state))
    where = {} if mesh is None else flatten_dict(nnx.to_pure_dict(shardings(state, mesh)))
    parts: dict[ParamPath, list[tuple[str, Place]]] = collections.defaultdict(list)
    for name, place in places.items():
        parts[place.path].append((name, place))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as threads:

        def put(path: ParamPath, like: Any) -> jax.Array:
            kind = dtype if dtype and path[-1] in MATRICES else like.dtype
            read = functools.partial(_read, tensors, like.shape, kind, parts[path], threads)
            # One part at a time is on the host: it has left before the next is read.
            if mesh is None:
                return jax.block_until_ready(jax.device_put(read(None)))
            holders: dict[tuple[tuple[int, int], ...], list[Any]] = collections.defaultdict(list)
            for device, index in where[path].addressable_devices_indices_map(like.shape).items():
                holders[tuple(s.indices(size)[:2] for s, size in zip(index, like.shape, strict=True))].append(device)
            shards = []
            for ranges, devices in holders.items():
                part = read(tuple(slice(*ends) for ends in ranges))
                shards += jax.block_until_ready([jax.device_put(part, device) for device in devices])
            return jax.make_array_from_single_device_arrays(like.shape, where[path], shards)

        nnx.replace_by_pure_dict(state, unflatten_dict({path: put(path, like) for path, like in shapes.items()}))
    return state


def _read(
    tensors: Tensors,
    shape: tuple[int, ...],
    dtype: Any,
    parts: Sequence[tuple[str, Place]],
    threads: ThreadPoolExecutor,
    cut: Cut | None,
) -> np.ndarray:
    """A part of a parameter on the host; all of it without a cut."""
    out = _aligned(shape if cut is None else tuple(s.stop - s.start for s in cut), dtype)

    def fill(entry: tuple[str, Place]) -> None:
        name, (_, part, transposed) = entry
        target, wanted = (out[part], None) if cut is None else (out, cut)
        if cut is not None and part:
            at = tuple(i - s.start for i, s in zip(part, cut, strict=False))
            if not all(0 <= i < n for i, n in zip(at, out.shape, strict=False)):
                return
            target, wanted = out[at], cut[len(at) :]
        value = tensors.read(name, wanted[::-1] if wanted is not None and transposed else wanted)
        target[...] = value.T if transposed else value

    # The result is read for the sake of errors.
    collections.deque(threads.map(fill, parts), maxlen=0)
    return out


def narrowed(params: Any, dtype: Any) -> Any:
    """Parameters that are only read, with the `MATRICES` in the type of computation, as `load_tensors` returns them.

    Arrays that already have that type are shared.
    """

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        narrow = path_names(path)[-1] in MATRICES and leaf.dtype != dtype
        return leaf.astype(dtype) if narrow else leaf

    return jax.tree_util.tree_map_with_path(one, params)


def check(config: DecoderConfig, tensors: Tensors | GGUFCheckpoint, state: Any, places: Mapping[str, Place]) -> None:
    """Raises UnsupportedModel for a tensor that is unknown, missing or of another shape than its place in `state`."""
    source, shapes = tensors.source, flatten_dict(nnx.to_pure_dict(state))
    for name, shape in tensors.shapes.items():
        if name not in places:
            # Some checkpoints repeat a tied head or store rotary frequencies; `load_scalar_head` reads score heads.
            tied_copy = name == "lm_head.weight" and config.tie_embeddings
            if not (tied_copy or name == SCORE or name.endswith("rotary_emb.inv_freq")):
                raise UnsupportedModel(f"{source}: unexpected tensor {name} {shape}")
            continue
        path, part, transposed = places[name]
        # An array without memory: only the shape of the part counts.
        target = np.broadcast_to(np.False_, shapes[path].shape)[part].shape
        expected = target[::-1] if transposed else target
        if expected != shape:
            raise UnsupportedModel(f"{source}: {name} has shape {shape}, the config asks for {expected}")
    missing = sorted(name for name in places if name not in tensors.shapes)
    if missing:
        raise UnsupportedModel(f"{source}: {len(missing)} tensors missing, first {missing[0]}")


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of this shape and type at a multiple of 64 bytes, where XLA on CPU takes it without a copy."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)
