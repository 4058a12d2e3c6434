"""Named tensors of checkpoints into parameters: from files straight to the devices that hold them.

A tensor has a `Place`: the parameter, or the layer of one, that it fills. Files are read in slices by a few threads,
one device's part of one parameter at a time, so the host holds at most
that part in addition to the memory of its own devices.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, Sharding
from safetensors import SafetensorError, safe_open

from rlhf.tuning.models.config import DecoderConfig, UnsupportedModel
from rlhf.tuning.models.json_file import json_object
from rlhf.tuning.models.mapping import SCORE
from rlhf.tuning.models.sharding import shardings

INDEX = "model.safetensors.index.json"
KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of tensors that are read, by their names in safetensors files."""
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
    """Index into the parameter, such as (layer,); all of it by default."""
    transposed: bool = False


class Named(Protocol):
    """Tensors by their Hugging Face names, read one at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """The type of each, as one of `KINDS`."""

    @property
    def source(self) -> str:
        """Where they are from, for errors."""

    def read(self, name: str) -> np.ndarray:
        """One of them."""


class Tensors:
    """The tensors of a folder, open for reading by several threads; to be used in a `with` block.

    The files are those of `model.safetensors.index.json`, which says where a tensor is, else `model.safetensors`, else
    all `*.safetensors`.

    Raises FileNotFoundError naming a file that is not there, ValueError naming one that cannot be read, and
    UnsupportedModel for a tensor of a type that is not in `KINDS`, or that two files have and no index tells apart.
    """

    def __init__(self, folder: Path):
        self.folder, self._stack = folder, contextlib.ExitStack()
        self._files: dict[str, Any] = {}
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
                    if found.get_dtype() not in KINDS:
                        raise UnsupportedModel(
                            f"{path}: {name} is of type {found.get_dtype()}, supported are F64, F32, F16 and BF16"
                        )
                    self._files[name], self.kinds[name] = file, found.get_dtype()
                    self.shapes[name] = tuple(found.get_shape())
            self._stack = opened.pop_all()

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
        self._stack.close()

    def read(self, name: str, cut: Cut | None = None) -> np.ndarray:
        """A tensor, or a part of it, in its own type."""
        file = self._files[name]
        whole: np.ndarray = file.get_tensor(name) if cut is None else file.get_slice(name)[cut]
        return whole


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


def place_tensors(
    config: DecoderConfig,
    tensors: Iterable[tuple[str, np.ndarray]],
    source: str,
    state: Any,
    places: Mapping[str, Place],
) -> Any:
    """`state`, an nnx State of shapes and types, with the values that a stream of named tensors has at their `places`.

    A parameter is collected on the host and goes to the device after its last tensor.

    Raises UnsupportedModel for a tensor that is unknown, missing or of another shape.
    """
    shapes = flatten_dict(nnx.to_pure_dict(state))
    pending = dict(places)
    remaining = collections.Counter(place.path for place in places.values())
    host: dict[ParamPath, np.ndarray] = {}
    done: dict[ParamPath, jax.Array] = {}
    for name, tensor in tensors:
        if name not in pending:
            _check_unused(config, name, tensor.shape, source)
            continue
        path, part, transposed = pending.pop(name)
        if path not in host:
            host[path] = _aligned(shapes[path].shape, shapes[path].dtype)
        target = host[path][part]
        _check_shape(name, tensor.shape, target.shape, transposed, source)
        target[...] = tensor.T if transposed else tensor
        remaining[path] -= 1
        if not remaining[path]:
            done[path] = jax.device_put(host.pop(path))
            # A view would keep the host's copy alive.
            del target
    _check_missing(pending, source)
    nnx.replace_by_pure_dict(state, unflatten_dict(done))
    return state


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
    place is a layer or nothing. With `dtype` the `MATRICES` have that type.

    Raises UnsupportedModel, before anything is read, for a tensor that is unknown, missing or of another shape.
    """
    check(config, tensors, state, places)
    shapes = flatten_dict(nnx.to_pure_dict(state))
    where = {} if mesh is None else flatten_dict(nnx.to_pure_dict(shardings(state, mesh)))
    parts: dict[ParamPath, list[tuple[str, Place]]] = collections.defaultdict(list)
    for name, place in places.items():
        parts[place.path].append((name, place))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as threads:
        done = {
            path: _Parameter(
                tensors, shape.shape, dtype if dtype and path[-1] in MATRICES else shape.dtype, parts[path], threads
            ).put(where.get(path))
            for path, shape in shapes.items()
        }
    nnx.replace_by_pure_dict(state, unflatten_dict(done))
    return state


def narrowed(params: Any, dtype: Any) -> Any:
    """Parameters that are only read, with the `MATRICES` in the type of computation, as `load_tensors` returns them.

    Arrays that already have that type are shared.
    """

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        # Paths of nnx states and of pure dicts have keys of different types.
        names = [str(getattr(k, "key", getattr(k, "name", k))) for k in path]
        last = next(n for n in reversed(names) if n != "value")
        return leaf.astype(dtype) if last in MATRICES and leaf.dtype != dtype else leaf

    return jax.tree_util.tree_map_with_path(one, params)


class _Parameter:
    """A parameter that is being read."""

    def __init__(
        self,
        tensors: Tensors,
        shape: tuple[int, ...],
        dtype: Any,
        parts: Sequence[tuple[str, Place]],
        threads: ThreadPoolExecutor,
    ):
        self.tensors, self.shape, self.dtype, self.parts, self.threads = tensors, shape, dtype, parts, threads

    def put(self, sharding: Sharding | None) -> jax.Array:
        """The parameter on its devices; without a sharding on the default one."""
        # One part at a time is on the host: it has left before the next is read.
        if sharding is None:
            return jax.block_until_ready(jax.device_put(self.read(None)))
        holders: dict[tuple[tuple[int, int], ...], list[Any]] = collections.defaultdict(list)
        for device, index in sharding.addressable_devices_indices_map(self.shape).items():
            assert index is not None
            holders[tuple(s.indices(size)[:2] for s, size in zip(index, self.shape, strict=True))].append(device)
        shards = []
        for ranges, devices in holders.items():
            part = self.read(tuple(slice(start, stop) for start, stop in ranges))
            shards += jax.block_until_ready([jax.device_put(part, device) for device in devices])
        return jax.make_array_from_single_device_arrays(self.shape, sharding, shards)

    def read(self, cut: Cut | None) -> np.ndarray:
        """A part of the parameter on the host; all of it without a cut."""
        shape = self.shape if cut is None else tuple(s.stop - s.start for s in cut)
        out = _aligned(shape, self.dtype)

        def fill(entry: tuple[str, Place]) -> None:
            name, place = entry
            target, wanted = (out[place.part], None) if cut is None else _within(out, place, cut)
            if target is not None:
                value = self.tensors.read(name, wanted if wanted is None or not place.transposed else wanted[::-1])
                target[...] = value.T if place.transposed else value

        # The result is read for the sake of errors.
        collections.deque(self.threads.map(fill, self.parts), maxlen=0)
        return out


def _within(out: np.ndarray, place: Place, cut: Cut) -> tuple[np.ndarray | None, Cut]:
    """The position of a tensor in `out` (the part `cut` of a parameter), and its part, in the parameter's order.

    None: nothing of it is in the cut.
    """
    if not place.part:
        return out, cut
    (layer,) = place.part
    inside = cut[0].start <= layer < cut[0].stop
    return (out[layer - cut[0].start] if inside else None), cut[1:]


def check(config: DecoderConfig, tensors: Named, state: Any, places: Mapping[str, Place]) -> None:
    """Raises UnsupportedModel for a tensor that is unknown, missing or of another shape than its place in `state`."""
    source, shapes = tensors.source, flatten_dict(nnx.to_pure_dict(state))
    for name, shape in tensors.shapes.items():
        if name not in places:
            _check_unused(config, name, shape, source)
            continue
        place = places[name]
        # Of no size: only its shape is looked at.
        parameter = np.broadcast_to(np.empty((), np.bool_), shapes[place.path].shape)
        _check_shape(name, shape, parameter[place.part].shape, place.transposed, source)
    _check_missing([name for name in places if name not in tensors.shapes], source)


def _check_unused(config: DecoderConfig, name: str, shape: tuple[int, ...], source: str) -> None:
    # Some checkpoints repeat a tied head or store rotary frequencies; `load_scalar_head` reads score heads.
    tied_copy = name == "lm_head.weight" and config.tie_embeddings
    if not (tied_copy or name == SCORE or name.endswith("rotary_emb.inv_freq")):
        raise UnsupportedModel(f"{source}: unexpected tensor {name} {shape}")


def _check_shape(name: str, shape: tuple[int, ...], target: tuple[int, ...], transposed: bool, source: str) -> None:
    expected = target[::-1] if transposed else target
    if expected != shape:
        raise UnsupportedModel(f"{source}: {name} has shape {shape}, the config asks for {expected}")


def _check_missing(names: Iterable[str], source: str) -> None:
    missing = sorted(names)
    if missing:
        raise UnsupportedModel(f"{source}: {len(missing)} tensors missing, first {missing[0]}")


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of this shape and type at a multiple of 64 bytes, where XLA on CPU takes it without a copy."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)
