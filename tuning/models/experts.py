"""Mixtures of experts: the router, and one path of tokens to their experts and back.

    scores           softmax over all experts, or the sigmoid of each, in at least float32
    chosen           those of each token with the highest scores
    experts          those that `Routing` says: the chosen ones, or recorded ones
    weights          the scores of the experts, divided by their sum if the family does
    copies           a row for each expert of a token, sorted by expert
    products         of each expert's rows with its matrices
    output           rows in the order of tokens, weighted and added

Axes: B rows, L tokens of a row, T tokens, D hidden, F feed-forward of an expert, E experts, X experts of a token,
R = T X copies, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rlhf.tuning.compile_target import LANES, target_platform
from rlhf.tuning.models import grouped as gpu
from rlhf.tuning.models.linear import INIT
from rlhf.tuning.models.matmul import factor
from rlhf.tuning.models.remat import MLP, keep
from rlhf.tuning.models.sharding import CONTEXT, FSDP, ROWS, TENSOR, dividing, mesh_in_use, scattered_sum, spec
from rlhf.tuning.precision import of_gradients, real

# routing(probabilities_BLE, chosen_BLX, cache of this layer) -> (experts_BLX, new cache of this layer)
Routing = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

BLOCK, TILE = 64, 512
"""Rows of a product on CPU; rows, inputs and outputs of a block on TPU at most."""
_BY_ROWS = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


class Experts(nnx.Module):
    """One projection of every expert, made as a `Linear`. `kernel` is a parameter, or a module that stores it in
    another form."""

    kernel: Any

    def __init__(
        self, count: int, size_in: int, size_out: int, *, bias: bool = False, back: bool = False, rngs: nnx.Rngs
    ):
        self.kernel = nnx.Param(INIT(rngs.params(), (count, size_in, size_out), real()))
        if bias:
            self.bias = nnx.Param(jnp.zeros((count, size_out), real()))

    def parts(self) -> tuple[Any, jax.Array | None]:
        """The kernel, as an array or as the module that stores it, and the bias."""
        kernel = self.kernel[...] if isinstance(self.kernel, nnx.Variable) else self.kernel
        return kernel, self.bias[...] if hasattr(self, "bias") else None


def as_chosen(probs_BLE: jax.Array, chosen_BLX: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    """The routing of a model by itself."""
    return chosen_BLX, cache


def counting(counted_BL: jax.Array) -> Routing:
    """The routing of packed rows. A layer's cache is the experts to take, [B, L, X], or None; the new one has sums over
    the counted tokens, for `balance`. A token whose recorded experts are one has no record: it takes the chosen ones.
    """

    def routing(probs: jax.Array, chosen: jax.Array, recorded: jax.Array | None) -> tuple[jax.Array, Any]:
        experts, share = chosen, counted_BL.astype(probs.dtype)
        if recorded is not None:
            alike = (recorded == recorded[..., :1]).all(-1, keepdims=True) & (recorded.shape[-1] > 1)
            experts = jnp.where(alike, chosen, recorded.astype(chosen.dtype))
        other = (experts[..., None] != chosen[..., None, :]).all(-1)
        hits = (experts[..., None] == jnp.arange(probs.shape[-1])).sum(-2)
        sums = {"tokens": jnp.ones_like(share), "hits_E": hits, "probs_E": probs, "other": other.mean(-1)}
        sums["entropy"] = -jax.scipy.special.xlogy(probs, probs).sum(-1)
        return experts, {name: jnp.einsum("bl,bl...->...", share, x.astype(share.dtype)) for name, x in sums.items()}

    return routing


def balance(sums: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The load-balancing loss (Fedus et al., 2021, equations 4 to 6) over the tokens of all layers, as transformers has
    it: 1 for each expert of a token where all are chosen alike. And sums of the metrics, means over layers.

    sums: those of `counting`, with a leading axis of layers.
    """
    hits_E, probs_E = (sums[name].sum(0) / jnp.maximum(sums["tokens"].sum(), 1) for name in ("hits_E", "probs_E"))
    means = {name: sums[name].mean() for name in ("tokens", "entropy", "other")}
    means["busiest"] = sums["hits_E"].max(-1).mean()
    return len(hits_E) * jnp.sum(hits_E * probs_E), {f"router_{name}": x for name, x in means.items()}


def router_means(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of routers from the sums of `balance`, added over micro-batches; none of a model without experts."""
    names = {"busiest": "busiest_expert", "entropy": "router_entropy", "other": "router_disagreement"}
    tokens = sums.get("router_tokens")
    return {name: sums[f"router_{key}"] / tokens for key, name in names.items()} if tokens else {}


def routed(
    x_BLD: jax.Array,
    router_ED: jax.Array,
    count: int,
    normalise: bool,
    routing: Routing,
    cache: Any,
    bias_E: jax.Array | None = None,
    sigmoid: bool = False,
    choice_E: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Any]:
    """(experts [B, L, X], their weights in at least float32, new cache), with `count` experts a token.

    A gradient reaches the router through the weights. sigmoid: scores are no softmax; routing is given their shares.
    choice_E: added to scores where experts are chosen (Wang et al., 2024, arXiv:2408.15664).
    """
    wide = x_BLD.astype(jnp.promote_types(x_BLD.dtype, jnp.float32))
    # Exact: a rounded probability would choose another expert than the sampler's.
    logits = jnp.einsum("bld,ed->ble", wide, router_ED.astype(wide.dtype), precision="highest")
    logits = logits if bias_E is None else logits + bias_E.astype(wide.dtype)
    probs = scores = jax.nn.softmax(logits)
    if sigmoid:
        scores = jax.nn.sigmoid(logits)
        probs = scores / scores.sum(-1, keepdims=True)
    ranked = scores if choice_E is None else scores + choice_E.astype(wide.dtype)
    experts, cache = routing(probs, jax.lax.top_k(ranked, count)[1], cache)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    return experts, weights / weights.sum(-1, keepdims=True) if normalise else weights, cache


def mixture(
    x_BLD: jax.Array,
    experts_BLX: jax.Array,
    weights_BLX: jax.Array,
    into: Sequence[tuple[Any, jax.Array | None]],
    back: tuple[Any, jax.Array | None],
    count: int,
    gated: Callable[[Sequence[jax.Array]], jax.Array],
) -> jax.Array:
    """The weighted sum of each token's experts, back(gated([into(x)])), [B, L, D] in the type of x.

    into, back: kernels and biases [E, out] of the projections. Each kernel is an array [E, in, out], or a module with
    `grouped(rows, sizes)`. count: E. On a mesh each device computes its own rows and columns, with kernels that it
    gathers over `fsdp`, whole experts if it divides them, and its part of the feed-forward over `tensor`.
    """
    kernels, biases = zip(*into, strict=True)
    (kernel, bias), tokens_in = back, (x_BLD, experts_BLX, weights_BLX)

    def local(
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        back: Any,
        into: Any,
        biases: Any,
        *,
        cuts: Any = (None, None),
    ) -> jax.Array:
        flat, width = experts.reshape(-1), experts.shape[-1]
        order = jnp.argsort(flat)
        place, sizes = jnp.argsort(order), jnp.sum(flat[:, None] == jnp.arange(count), axis=0)
        copies = permuted(jnp.repeat(x.reshape(-1, x.shape[-1]), width, axis=0), order, place)
        products = [_product(kernel, copies, sizes, cuts[0]) for kernel in into]
        # A product, since the gradient of a gather is a sum in any order on GPUs.
        of_expert = jax.nn.one_hot(flat[order], count, dtype=x.dtype)
        inner = [
            y if b is None else y + jnp.dot(of_expert, b.astype(x.dtype), precision="highest")
            for y, b in zip(products, biases, strict=True)
        ]
        out = permuted(_product(back, gated([keep(x, MLP) for x in inner]), sizes, cuts[1]), place, order)
        shares = out.reshape(*experts.shape, -1).astype(weights.dtype) * weights[..., None]
        return shares.sum(axis=-2).astype(x.dtype)

    mesh = mesh_in_use()
    if mesh is None:
        return _with_shares(local(*tokens_in, kernel, kernels, biases), experts_BLX, weights_BLX, bias)
    rows, columns = dividing(mesh, x_BLD.shape[0], ROWS), dividing(mesh, x_BLD.shape[1], CONTEXT)
    inner, whole = dividing(mesh, kernel.shape[1], TENSOR), dividing(mesh, count, FSDP)
    hidden = () if whole else dividing(mesh, kernel.shape[2], FSDP)
    cuts = (0, 0) if whole else (1, 2) if hidden else (None, None)

    def device(*arrays: Any) -> jax.Array:
        out = local(*arrays, cuts=cuts)
        return jax.lax.psum(out, inner) if inner else out

    tokens, of_kernels = spec(rows, columns), (spec(whole, inner, hidden), spec(whole, hidden, inner))
    in_specs = *[tokens] * 3, *of_kernels, spec((), inner)
    cut = jax.shard_map(device, in_specs=in_specs, out_specs=tokens, check_vma=False)
    return _with_shares(cut(*tokens_in, kernel, kernels, biases), experts_BLX, weights_BLX, bias)


def _with_shares(
    out_BLD: jax.Array, experts_BLX: jax.Array, weights_BLX: jax.Array, bias_ED: jax.Array | None
) -> jax.Array:
    """The output with the weighted biases of each token's experts."""
    if bias_ED is None:
        return out_BLD
    each = jax.nn.one_hot(experts_BLX, len(bias_ED), dtype=weights_BLX.dtype)
    weights_BLE = jnp.einsum("blx,blxe->ble", weights_BLX, each)
    return out_BLD + jnp.dot(weights_BLE, bias_ED, precision="highest").astype(out_BLD.dtype)


def _product(kernel: Any, x_RI: jax.Array, sizes_E: jax.Array, cut: int | None) -> jax.Array:
    stored = hasattr(kernel, "grouped")
    out: jax.Array = kernel.grouped(x_RI, sizes_E) if stored else grouped(x_RI, kernel, sizes_E, cut)
    return out


@jax.custom_vjp
def permuted(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows of x in another order. Its gradient is a gather too, by the inverse."""
    return jnp.take(x, order, axis=0, mode="clip")


permuted.defvjp(
    lambda x, order, inverse: (permuted(x, order, inverse), (order, inverse)),
    lambda saved, g: (permuted(g, *saved[::-1]), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped(x_RI: jax.Array, kernels_EIO: jax.Array, sizes_E: jax.Array, cut: int | None = None) -> jax.Array:
    """Products of rows, sorted by expert, with the kernel of each: [R, O] in the type of x; the kernels' gradient
    accumulates in their own.

    cut: inside `shard_map`, the dimension of which each device of `fsdp` has a part: the parts are gathered in the
    type of x, and each device keeps its part of the gradient.
    """
    return _by_expert(x_RI, _whole(kernels_EIO, x_RI.dtype, cut), sizes_E)


def _whole(kernels: jax.Array, kind: Any, cut: int | None) -> jax.Array:
    kernels = kernels.astype(kind)
    return kernels if cut is None else jax.lax.all_gather(kernels, FSDP, axis=cut, tiled=True)


def _by_expert(x_RI: jax.Array, kernels: jax.Array, sizes_E: jax.Array, transposed: bool = False) -> jax.Array:
    """[R, O] of kernels [E, I, O]; transposed: [E, O, I]."""
    kind, x, kernels, platform = x_RI.dtype, factor(x_RI), factor(kernels), target_platform()
    if platform == "gpu" and gpu.suits(x, kernels):
        return gpu.of_rows(x, kernels, sizes_E, transposed)
    if platform == "tpu" and (transposed or kernels.shape[2] % LANES):
        return _by_transposed(x, kernels if transposed else kernels.mT, sizes_E, kind)
    kernels = kernels.mT if transposed else kernels
    if platform != "cpu":
        return jax.lax.ragged_dot(x, kernels, sizes_E, preferred_element_type=kind)
    # XLA on CPU multiplies every row with every kernel.
    return in_blocks(x, sizes_E, kernels.shape[2], kind, lambda rows, expert: _dot(rows, kernels[expert], kind))


def _by_transposed(x_RI: jax.Array, kernels_EOI: jax.Array, sizes_E: jax.Array, kind: Any) -> jax.Array:
    """The product on TPU by JAX's kernel for it. XLA's own first copies kernels whose outputs are not last in memory:
    those that are read backwards, and narrow ones, which a TPU keeps so."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    rows = min(TILE, max(LANES, -(-len(x_RI) // len(sizes_E) // LANES) * LANES))
    tiling = rows, *(min(TILE, size) for size in kernels_EOI.shape[:0:-1])
    x = jnp.pad(x_RI, ((0, -len(x_RI) % rows), (0, 0)))
    out: jax.Array = gmm(x, kernels_EOI, sizes_E.astype(jnp.int32), kind, tiling, transpose_rhs=True)
    return out[: len(x_RI)]


def _dot(x: jax.Array, y: jax.Array, kind: Any) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=kind)


def in_blocks(
    x_RI: jax.Array, sizes_E: jax.Array, size_out: int, kind: Any, product: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """[R, O] of `product(rows, expert)`, of blocks of rows that begin with those of one expert."""
    count, size = len(x_RI), _block_size(x_RI, sizes_E)
    x = jnp.pad(x_RI, ((0, size), (0, 0)))

    def put(out: jax.Array, expert: jax.Array, first: jax.Array, end: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(x, first, size)
        # Rows of the next expert are wrong: the next block replaces them.
        return jax.lax.dynamic_update_slice_in_dim(out, product(rows, expert), first, 0)

    return _blocks(sizes_E, size, jnp.zeros((count + size, size_out), kind), put)[:count]


def _block_size(x_RI: jax.Array, sizes_E: jax.Array) -> int:
    return min(BLOCK, max(8, -(-len(x_RI) // len(sizes_E))))


def _blocks(sizes_E: jax.Array, size: int, value: jax.Array, block: Callable[..., jax.Array]) -> jax.Array:
    """The value after `block(value, expert, first row, end)` of each block of at most `size` rows of an expert."""
    ends_E = jnp.cumsum(sizes_E)

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, value = state
        expert = jnp.sum(ends_E <= first)
        end = jnp.minimum(first + size, ends_E[expert])
        return end, block(value, expert, first, end)

    start = jnp.zeros((), ends_E.dtype), value
    return jax.lax.while_loop(lambda state: state[0] < ends_E[-1], step, start)[1]


def _forward(
    x: jax.Array, kernels: jax.Array, sizes: jax.Array, cut: int | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out = grouped(x, kernels, sizes, cut)
    with of_gradients():
        return out, (factor(x), kernels, sizes)


@of_gradients()
def _backward(cut: int | None, saved: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, kernels, sizes = saved
    sums = _by_kernel(factor(x), factor(g), sizes, jnp.promote_types(g.dtype, kernels.dtype))
    if cut is not None:
        sums = scattered_sum(sums, FSDP, cut)
    return _by_expert(g, _whole(kernels, g.dtype, cut), sizes, True), sums.astype(kernels.dtype), None


def _by_kernel(x: jax.Array, g: jax.Array, sizes_E: jax.Array, kind: Any) -> jax.Array:
    """[E, I, O]: x^T g of the rows of each expert."""
    platform = target_platform()
    if platform == "gpu" and gpu.suits(x, g):
        return gpu.of_kernels(x, g, sizes_E, kind)
    if platform != "cpu":
        return jax.lax.ragged_dot_general(x, g, sizes_E, _BY_ROWS, preferred_element_type=kind)
    size = _block_size(x, sizes_E)
    x, g = (jnp.pad(a, ((0, size), (0, 0))) for a in (x, g))

    def add(sums: jax.Array, expert: jax.Array, first: jax.Array, end: jax.Array) -> jax.Array:
        rows, back = (jax.lax.dynamic_slice_in_dim(a, first, size) for a in (x, g))
        own = jnp.where((first + jnp.arange(size) < end)[:, None], rows, 0)
        return sums.at[expert].add(_dot(own.T, back, kind))

    return _blocks(sizes_E, size, jnp.zeros((len(sizes_E), x.shape[1], g.shape[1]), kind), add)


grouped.defvjp(_forward, _backward)
