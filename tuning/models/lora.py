"""Low-rank adapters (Hu et al., 2021) on the projections of a frozen, possibly quantised (Dettmers et al., 2023) model.

A tuned model is a decoder, or a scalar head over one, in two trees: `trainable` holds the adapters and a score head,
`frozen` the rest. Only `trainable` has gradients and optimizer state; `frozen` is an argument of the jitted step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import Decoder, ScalarHead, decoder_graph, scalar_graph
from rlhf.tuning.models.linear import JOINED, Linear
from rlhf.tuning.models.matmul import thin
from rlhf.tuning.models.quantize import FORMATS
from rlhf.tuning.models.tensors import narrowed
from rlhf.tuning.precision import real

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
Role = Literal["decoder", "scalar"]
# loss(params, batch, frozen), as in `rlhf.tuning.training.step`
Loss = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The adapter of a model, and how the frozen rest is stored."""

    rank: int = 16
    """Columns of A and rows of B."""
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = PROJECTIONS
    """Projections that receive an adapter."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski, 2023)."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """A uniform in +-1/sqrt(in), or normal with deviation 1/rank; B is zero."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """How the frozen kernels of the layers are stored; embedding, norms and head are not quantised. The adapter then
    starts from, and is compared with, the model with the quantised kernels (`rounded`)."""

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class Factor(nnx.Variable):
    """A low-rank factor: the type of variable that is trained."""


class LowRank(nnx.Module):
    """x [..., in] -> scale * (x A) B [..., out]; a [layers, in, r], b [layers, r, out] where layers are stacked."""

    def __init__(self, a: jax.Array, b: jax.Array, scale: float):
        self.a, self.b, self.scale = Factor(a), Factor(b), scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return thin(thin(x, self.a[...].astype(x.dtype)), self.b[...].astype(x.dtype)) * self.scale

    def dense(self) -> jax.Array:
        """The adapter as a dense kernel, scale * A B, which merging adds, [layers, in, out]."""
        # The merged kernel is stored, so the accelerator's fast but coarse product is not good enough.
        return jnp.matmul(self.a[...], self.b[...], precision="highest") * self.scale


def linears(model: Any) -> list[tuple[str, Linear]]:
    """The projections of a model's layers by name, in a fixed order; stacked layers are one Linear."""
    nodes = [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, Linear) and "layers" in path]
    return [(str(path[-1]), node) for path, node in sorted(nodes, key=lambda item: tuple(map(str, item[0])))]


def adapted(name: str, targets: tuple[str, ...]) -> bool:
    """Whether a projection gets an adapter. Raises ValueError for one that joins targets with others."""
    parts = JOINED.get(name, (name,))
    wanted = [part for part in parts if part in targets]
    if 0 < len(wanted) < len(parts):
        raise ValueError(f"lora.targets: {', '.join(parts)} are one projection of this model: name all of them or none")
    return bool(wanted)


def _model(config: DecoderConfig, role: Role) -> Any:
    return {"decoder": Decoder, "scalar": ScalarHead}[role](config, rngs=nnx.Rngs(0))


def _graph(config: DecoderConfig, role: Role) -> Any:
    return decoder_graph(config) if role == "decoder" else scalar_graph(config)


def refuse_experts(config: DecoderConfig, targets: tuple[str, ...] = (), quantize: str = "none") -> None:
    """Raises ValueError for adapters and quantised kernels of experts, which have neither."""
    named = [name for name in PROJECTIONS[4:] if name in targets]
    if config.num_experts and named:
        raise ValueError(f"lora.targets: {named[0]} is of experts, which have no adapters: name some of q, k, v, o")
    if config.num_experts and quantize != "none":
        raise ValueError(f"quantize {quantize}: the experts of this model cannot be quantised: say none")


def _tuned(model: Any, lora: LoraConfig, seed: int) -> tuple[Any, Any, Any]:
    """Adds adapters and stores kernels in their frozen form; returns (graph, trainable, frozen)."""
    key = jax.random.key(seed)
    for number, (name, linear) in enumerate(linears(model)):
        *layers, size_in, size_out = linear.kernel.shape
        if lora.quantize != "none":
            linear.kernel = FORMATS[lora.quantize](linear.kernel[...])
        if adapted(name, lora.targets):
            # The key depends on the projection's number alone, whichever projections are targets.
            shape, own = (*layers, size_in, lora.rank), jax.random.fold_in(key, number)
            if lora.init == "kaiming":
                a = jax.random.uniform(own, shape, real(), minval=-1.0, maxval=1.0) / math.sqrt(size_in)
            else:
                a = jax.random.normal(own, shape, real()) / lora.rank
            b = jnp.zeros((*layers, lora.rank, size_out), real())
            linear.adapter = LowRank(a, b, lora.scale)
    # Trainable: the factors and a score head.
    parts: Any = nnx.split(model, lambda path, v: isinstance(v, Factor) or path == ("score",), ...)
    return parts


@functools.lru_cache(maxsize=16)
def _abstract(config: DecoderConfig, role: Role, lora: LoraConfig, weights: Any) -> tuple[Any, Any]:
    # `weights` is `real` of the call: the shapes have that type.
    refuse_experts(config, lora.targets, lora.quantize)
    # eval_shape returns arrays alone, so the static half leaves the trace through this list.
    graph: list[Any] = []

    def shapes() -> Any:
        static, trainable, _ = _tuned(_model(config, role), lora, 0)
        graph.append(static)
        return trainable

    trainable = jax.eval_shape(shapes)
    return graph[0], trainable


def tuned_graph(config: DecoderConfig, role: Role, lora: LoraConfig) -> Any:
    """The static half of a tuned model (hashable)."""
    return _abstract(config, role, lora, real())[0]


def trainable_shapes(config: DecoderConfig, role: Role, lora: LoraConfig) -> Any:
    """The trainable tree with shapes in place of arrays."""
    return _abstract(config, role, lora, real())[1]


def tune(
    config: DecoderConfig, role: Role, params: Any, lora: LoraConfig, *, seed: int, dtype: str | None = None
) -> tuple[Any, Any]:
    """(trainable, frozen) of dense parameters; the tuned model equals the frozen one while B is zero.

    `dtype` is the type of computation: matrices that are not quantised are stored in it, since the decoder would cast
    them anyway; None: in their own. Arrays that are not cast are shared with `params`.
    """
    refuse_experts(config, lora.targets, lora.quantize)
    _, trainable, frozen = _tuned(nnx.merge(_graph(config, role), params), lora, seed)
    return trainable, frozen if dtype is None else narrowed(frozen, dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("state",), meta_fields=("graph",))
@dataclasses.dataclass(frozen=True)
class Tuned:
    """A tuned model, inside or outside jit; accepted wherever parameters of the plain model are."""

    graph: Any
    state: Any


@dataclasses.dataclass(frozen=True)
class Base:
    """The frozen model under a trainable tree."""

    graph: Any
    frozen: Any


def join(graph: Any, trainable: Any, frozen: Any) -> Tuned:
    """Both trees of `tune` as one model; `graph` is from `tuned_graph`."""
    return Tuned(graph, nnx.merge_state(trainable, frozen))


def assemble(graph: Any, params: Any) -> Any:
    """The module of `params`, inside jit: a tuned model, or parameters of the plain `graph`."""
    return nnx.merge(params.graph, params.state) if isinstance(params, Tuned) else nnx.merge(graph, params)


def over(graph: Any, loss: Loss) -> Loss:
    """A loss of the trainable tree, from one of all parameters; `frozen` becomes (frozen tree, the loss's own)."""

    def tuned(params: Any, batch: Any, frozen: Any) -> Any:
        return loss(join(graph, params, frozen[0]), batch, frozen[1])

    return tuned


@jax.jit
def _merged(tuned: Tuned) -> Any:
    """The plain model's parameters in the type of weights, with every adapter added to its dense kernel."""
    model = nnx.merge(tuned.graph, tuned.state)
    for _, linear in linears(model):
        dense = isinstance(linear.kernel, nnx.Variable)
        kernel = linear.kernel[...] if dense else linear.kernel.dense()
        if hasattr(linear, "adapter"):
            kernel = kernel + linear.adapter.dense()
            del linear.adapter
        linear.kernel = nnx.Param(kernel)
    return jax.tree.map(lambda x: x.astype(real()), nnx.state(model))


def rounded(config: DecoderConfig, role: Role, params: Any, kind: str) -> Any:
    """Dense parameters with kernels quantised to `kind` and dequantised: the tuned model while B is zero.

    Returns `params` itself for "none". The same bits as `merge` with a new adapter.
    """
    if kind == "none":
        return params
    refuse_experts(config, quantize=kind)
    model = nnx.merge(_graph(config, role), params)
    for _, linear in linears(model):
        linear.kernel = FORMATS[kind](linear.kernel[...])
    return _merged(Tuned(*nnx.split(model)))


def merge(config: DecoderConfig, role: Role, params: Any, trainable: Any, lora: LoraConfig) -> Any:
    """Dense parameters W + scale * A B, from the dense `params` given to `tune` and the trained adapter.

    With quantisation W is the dequantised kernel, as in training, so the merged model is the trained one. Values of W
    in a smaller type give the same bits as in the type of weights.
    """
    frozen = tune(config, role, params, lora, seed=0)[1]
    return _merged(join(tuned_graph(config, role, lora), trainable, frozen))
