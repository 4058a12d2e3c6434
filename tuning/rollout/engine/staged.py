"""A policy that arrives tensor by tensor while an engine goes on with its own: staged on the host, then taken whole.

The host holds the staged weights beside those in use, in the layout and types of decoding. On a CPU the engine takes
the staged arrays themselves; elsewhere it drops its own first, so that no device ever holds two policies: an engine
that then fails to take the new one has none, and stops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from tuning import multihost
from tuning.models.config import DecoderConfig
from tuning.models.sharding import shardings
from tuning.models.tensors import ParamPath, Place
from tuning.precision import without_float64
from tuning.rollout.engine.engine import Engine
from tuning.rollout.engine.folder import places_in
from tuning.rollout.engine.placement import part_of
from tuning.rollout.engine.replicas import Replicas
from tuning.rollout.engine.weights import Weights
from tuning.rollout.inside.rlhf_weights.frames import Fingerprint, Kind, Piece


class Unfit(ValueError):
    """Tensors that are not those of the engine's model, or not all of them."""


class Layout:
    """The tensors, by their Hugging Face names, that an engine's weights are: what each is, and where."""

    @without_float64
    def __init__(self, config: DecoderConfig, weights: Weights):
        """Raises ValueError for quantised weights, of which no tensor can be read again."""
        if not weights.dense:
            raise ValueError("the engine holds its weights as int8: serve without --quantization")
        self.graph, self.shapes = weights.shapes
        self.flat: dict[ParamPath, Any] = flatten_dict(nnx.to_pure_dict(self.shapes))
        self.places = places_in(config, self.shapes)
        self.kinds = {name: self._kind(place) for name, place in self.places.items()}
        """Type and shape of each tensor."""

    def _kind(self, place: Place) -> Kind:
        parameter = self.flat[place.path]
        # Of no size: only its shape is looked at.
        shape = np.broadcast_to(np.empty((), np.bool_), parameter.shape)[place.part].shape
        return Kind(parameter.dtype.name, shape[::-1] if place.transposed else shape)

    def tensors(self, state: nnx.State) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors that a state of this layout holds. One parameter of it is on the host at a time."""
        held = flatten_dict(nnx.to_pure_dict(state))
        last: tuple[ParamPath, np.ndarray] | None = None
        # Tensors of one parameter are adjacent.
        for name, place in self.places.items():
            if last is None or last[0] != place.path:
                last = place.path, _on_host(held[place.path])
            value = last[1][place.part]
            yield name, np.ascontiguousarray(value.T if place.transposed else value)

    def fingerprint(self, state: nnx.State) -> str:
        """`frames.Fingerprint` of what a state holds."""
        found = Fingerprint()
        for name, value in self.tensors(state):
            found.add(name, value)
        return found.hexdigest()


class Staged:
    """A policy that is arriving."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._arrays: dict[ParamPath, np.ndarray] = {}
        self._rows = dict.fromkeys(layout.kinds, 0)

    def write(self, piece: Piece, data: memoryview) -> None:
        """Takes rows of a tensor, which come in order. Raises Unfit, without a trace, where they do not fit."""
        kind = self._layout.kinds.get(piece.name)
        if kind is None:
            raise Unfit(f"{piece.name} is no tensor of the model that is served")
        if piece.kind != kind:
            raise Unfit(f"{piece.name} is {piece.kind}; the server holds it as {kind}")
        done, rows = self._rows[piece.name], kind.shape[0]
        if piece.first != done or piece.last > rows:
            raise Unfit(f"{piece.name}: rows {piece.first} to {piece.last} came, wanted are {done} to {rows}")
        path, part, transposed = self._layout.places[piece.name]
        value = np.frombuffer(data, jnp.dtype(kind.dtype)).reshape(piece.last - piece.first, *kind.shape[1:])
        target = self._array(path)[part]
        (target.T if transposed else target)[piece.first : piece.last] = value
        self._rows[piece.name] = piece.last

    def _array(self, path: ParamPath) -> np.ndarray:
        if path not in self._arrays:
            shape = self._layout.flat[path]
            self._arrays[path] = _empty(shape.shape, shape.dtype)
        return self._arrays[path]

    def state(self) -> nnx.State:
        """All of it, as a state of host arrays. Raises Unfit where something is missing."""
        short = [name for name, rows in self._rows.items() if rows < self._layout.kinds[name].shape[0]]
        if short:
            name = short[0]
            told = f"{self._rows[name]} of {self._layout.kinds[name].shape[0]} rows"
            raise Unfit(f"{len(short)} tensors are missing or not whole, first {name}, of which came {told}")
        state = jax.tree.map(lambda x: x, self._layout.shapes)
        nnx.replace_by_pure_dict(state, unflatten_dict(self._arrays))
        return state


class WeightsLost(RuntimeError):
    """The engine has given up its weights and could not take others: it has none."""


@without_float64
def take(engine: Engine | Replicas, layout: Layout, state: nnx.State) -> None:
    """Has an engine sample from a state of `Staged.state` from now on.

    On a CPU its own weights stay where that fails. Elsewhere it drops them first, and raises WeightsLost.
    """
    own = [one for one, _ in engine.engines()] if isinstance(engine, Replicas) else [engine]
    dropped = not _on_cpu(engine)
    if dropped:
        for one in own:
            one.weights.drop()
    try:
        parts = jax.block_until_ready(_parts(engine, state))
    except Exception as error:
        if not dropped:
            raise
        raise WeightsLost(
            f"the new policy could not be put on the devices, and the old one has left them: {error}"
        ) from error
    for one, part in zip(own, parts, strict=True):
        one.use(layout.graph, part)


def _parts(engine: Engine | Replicas, state: nnx.State) -> list[nnx.State]:
    """A state in the places of the engine, or of each of its replicas."""
    if isinstance(engine, Replicas):
        state = jax.tree.map(jax.device_put, state, shardings(state, engine.mesh))
        return [part_of(state, place) for _, place in engine.engines()]
    place = engine.weights.place
    where = shardings(state, place) if isinstance(place, Mesh) else jax.tree.map(lambda _: place, state)
    put = functools.partial(jax.tree.map, jax.device_put)
    return [put(state, where) if place is not None else put(state)]


def _on_cpu(engine: Engine | Replicas) -> bool:
    leaves = jax.tree.leaves(weights_of(engine).now[1])
    return {device.platform for leaf in leaves for device in leaf.devices()} == {"cpu"}


def weights_of(engine: Engine | Replicas) -> Weights:
    """The weights of an engine; of replicas those of the first, since all have the same."""
    return engine.engines()[0][0].weights if isinstance(engine, Replicas) else engine.weights


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array at a multiple of 64 bytes, where XLA on CPU takes it without a copy."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)


def _on_host(leaf: Any) -> np.ndarray:
    # JAX keeps what it has gathered beside the array for as long as that lives: here beside a copy.
    on_cpu = isinstance(leaf, jax.Array) and {d.platform for d in leaf.devices()} == {"cpu"}
    return multihost.to_host(leaf if on_cpu or not isinstance(leaf, jax.Array) else jnp.copy(leaf))
