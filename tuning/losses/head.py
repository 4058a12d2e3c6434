"""The LM head without the logits: log-probabilities and entropies, forward and backward in slices of the vocabulary.

On a mesh each device has its own positions, its own part of the vocabulary (Shoeybi et al., 2019: maxima and sums are
exchanged, logits and the head are not) and its own part of the head's width, which it gathers slice by slice.

Axes: M positions, D hidden, V vocabulary, W tokens of a slice. Under a mesh they are those of a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from rlhf.tuning.compile_target import target_platform
from rlhf.tuning.models.matmul import contract, factor_type, soft_cap
from rlhf.tuning.models.sharding import HeadCut
from rlhf.tuning.precision import of_gradients

ELEMENTS, ON_CPU = 2**25, 2**23
"""Logits of a slice: 128 MiB in float32. On a CPU 32: fresh pages of larger arrays take longer than what is saved."""
KEPT = 2**28
"""Bytes, up to which exponentials of all logits are kept for the backward pass instead of being recomputed."""


def token_logps(
    hidden_MD: jax.Array,
    targets_M: jax.Array,
    weight_VD: jax.Array,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    elements: int | None = None,
    kept: int = KEPT,
    shards: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """log softmax(z / T) of the targets and the entropy of that distribution, both [M] in float32 (or wider).

    z = hidden @ weight.T accumulates in float32; with a softcap c it becomes c * tanh(z / c). The normaliser is summed
    over slices of the vocabulary (Milakov and Gimelshein, arXiv:1805.02867), and the backward pass recomputes each
    slice (Wijmans et al., arXiv:2411.09009). So about `elements` logits are held at a time (ELEMENTS, ON_CPU), or the
    exponentials of all of them where those take at most `kept` bytes and nothing is capped: for gradients of
    log-probabilities, those of entropies make logits again. A temperature of 0 means greedy decoding and leaves logits
    unscaled. shards: parts of the batch that the positions come from; each holds as many.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    elements = elements or (ON_CPU if target_platform() == "cpu" else ELEMENTS)
    positions, vocabulary = hidden_MD.shape[0], weight_VD.shape[0]
    cut = HeadCut.of(positions, *weight_VD.shape)
    if cut is None:
        elements, kept = elements * shards, kept * shards
    else:
        positions, vocabulary = cut.sizes(positions, vocabulary)
    # At least 128 tokens a slice. Slices get about the same size, rounded up to 128, the tile of matrix units, so that
    # the last slice repeats few tokens.
    slices = -(-vocabulary // max(128, elements // max(1, positions)))
    size = min(vocabulary, -(-vocabulary // (slices * 128)) * 128)
    # No more digits are kept than products of gradients read of what is made from them.
    with of_gradients():
        kind = factor_type(hidden_MD.dtype.name)
    # The slope of a cap needs digits of the logits that their exponentials do not have.
    keep = softcap is None and positions * vocabulary * jnp.dtype(kind).itemsize <= kept
    return _head(hidden_MD, weight_VD, targets_M, _How(scale, softcap, size, kind if keep else None, cut))


class _How(NamedTuple):
    """The static arguments of a head."""

    scale: float
    """1 / temperature."""
    softcap: float | None
    size: int
    """Tokens of a slice."""
    keep: str | None
    """The type in which exponentials are kept."""
    cut: HeadCut | None

    def part(self, weight_WD: jax.Array) -> jax.Array:
        """A slice of this device's part of the head with its whole width."""
        return weight_WD if self.cut is None else self.cut.whole(weight_WD)

    def counted(self, targets: jax.Array, weight: jax.Array) -> jax.Array:
        """Targets counted from the first token of this device's part of the vocabulary; those of others are out of
        range."""
        return targets if self.cut is None else targets - self.cut.first * weight.shape[0]

    def logits(self, hidden: jax.Array, weight: jax.Array) -> jax.Array:
        """Capped and scaled logits, [M, W]."""
        z = contract(hidden, weight, 1, 1, _wide(hidden))
        # The cap belongs to the model and the temperature to sampling: in this order.
        return soft_cap(z, self.softcap) * self.scale


def _slice(weight_VD: jax.Array, number: jax.Array, size: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The slice's first token, its weights [W, D], and which of its tokens are new [W].

    Shapes are static, so the last slice is as wide as the others: it ends at the vocabulary's end and repeats tokens
    of the slice before it, which are not `fresh`.

        vocabulary   |---- 0 ----|---- 1 ----|---- 2 --|
        slice 2                            |---- W ----|
        fresh                               0 0 1 1 1 1
    """
    start = jnp.minimum(number * size, weight_VD.shape[0] - size)
    weight = jax.lax.dynamic_slice_in_dim(weight_VD, start, size).astype(dtype)
    return start, weight, start + jnp.arange(size) >= number * size


def _wide(hidden: jax.Array) -> jnp.dtype:
    """The type in which sums run: float32, or float64 for hidden states of that type."""
    return jnp.promote_types(hidden.dtype, jnp.float32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _bits(x: jax.Array, kind: str) -> jax.Array:
    """Numbers of two bytes as integers. XLA on CPU has no bfloat16 in memory operations: a stack of it, to which a loop
    adds a slice, would be converted to float32 and back as a whole each time."""
    return jax.lax.bitcast_convert_type(x.astype(kind), jnp.uint16)


@_bits.defjvp
def _no_slope(kind: str, *_: Any) -> Any:
    # Through integers it would be 0, and what is made of it wrong without a word.
    raise NotImplementedError(f"second derivatives of the LM head where it keeps {kind}: call token_logps with kept=0")


def _narrow(kind: str) -> bool:
    return jnp.dtype(kind).itemsize == 2


def _targeted(targets: jax.Array, start: jax.Array, fresh: jax.Array) -> jax.Array:
    """Where the slice's tokens are the targets, [M, W]."""
    return (targets[:, None] - start == jnp.arange(fresh.shape[0])) & fresh


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _head(hidden: jax.Array, weight: jax.Array, targets: jax.Array, how: _How) -> tuple[jax.Array, jax.Array]:
    # This body runs only where no gradient is taken, so no logits are kept.
    return _forward(hidden, weight, targets, how._replace(keep=None))[0]


def _forward(hidden: jax.Array, weight: jax.Array, targets: jax.Array, how: _How) -> Any:
    """((log-probabilities, entropies) [M], residuals): one pass over the slices with a running maximum."""
    local: Callable[..., Any] = functools.partial(_sums, how=how)
    cut = how.cut
    if cut is not None:
        of = cut.of_positions
        outs = (of, of), (of, of, cut.of_tops, cut.of_logits)
        local = jax.shard_map(local, in_specs=(of, cut.of_head, of), out_specs=outs, check_vma=False)
    outputs, rest = local(hidden, weight, targets)
    return outputs, (hidden, weight, targets, *rest)


def _sums(hidden: jax.Array, weight: jax.Array, targets: jax.Array, how: _How) -> Any:
    """((log-probabilities, entropies), (log-normalisers, mean logits, tops, kept)), the first four [M].

    With a type to `keep`, `tops` [slices, M] are the greatest logits up to each slice, and `kept` [slices, M, W] the
    exponentials of its logits less those; else both are None.
    """
    targets, size, keep, cut = how.counted(targets, weight), how.size, how.keep, how.cut

    def one(carry: Any, number: jax.Array) -> Any:
        top, total, weighted, chosen = carry
        start, part, fresh = _slice(weight, number, size, hidden.dtype)
        z = how.logits(hidden, how.part(part))
        # Repeated tokens do not change a maximum; the sums below leave them out.
        new_top = jnp.maximum(top, jnp.max(z, axis=-1))
        powers = jnp.exp(z - new_top[:, None])
        e = jnp.where(fresh, powers, 0.0)
        # Moves the sums so far to the new maximum; 0 in the first slice, whose `top` is -inf.
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(e, axis=-1)
        weighted = weighted * shrink + jnp.sum(e * z, axis=-1)
        chosen = chosen + jnp.sum(jnp.where(_targeted(targets, start, fresh), z, 0.0), axis=-1)
        if keep is None:
            return (new_top, total, weighted, chosen), (None, None)
        stored = _bits(powers, keep) if _narrow(keep) else powers.astype(keep)
        return (new_top, total, weighted, chosen), (new_top, stored)

    zeros = jnp.zeros(hidden.shape[0], _wide(hidden))
    numbers = jnp.arange(-(-weight.shape[0] // size))
    (top, total, weighted, chosen), kept = jax.lax.scan(one, (zeros - jnp.inf, zeros, zeros, zeros), numbers)
    if cut is not None:
        # The same move to the maximum of all parts; a token's logit is on the device that has the token.
        greatest = cut.greatest(top)
        shrink, top = jnp.exp(top - greatest), greatest
        total, weighted, chosen = cut.summed((total * shrink, weighted * shrink, chosen))
    # Entropy = logz - E[z], since -log p = logz - z.
    logz = top + jnp.log(total)
    mean = weighted / total
    return (chosen - logz, logz - mean), (logz, mean, *kept)


def _backward(how: _How, saved: Any, cotangents: Any) -> Any:
    local: Callable[..., Any] = functools.partial(_gradients, how=how)
    logz, cut = saved[3], how.cut
    # Where no gradient comes through an output, as the entropy's of most losses, nothing is computed for it.
    g_logp, g_entropy = (None if isinstance(g, SymbolicZero) else g for g in cotangents)
    g_logp = jnp.zeros_like(logz) if g_logp is None else g_logp
    if cut is not None:
        of = cut.of_positions
        specs = (of, cut.of_head, of, of, of, cut.of_tops, cut.of_logits, of, of)
        local = jax.shard_map(local, in_specs=specs, out_specs=(of, cut.of_head), check_vma=False)
    return *local(*saved, g_logp, g_entropy), None


def _gradients(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    logz: jax.Array,
    mean: jax.Array,
    tops: jax.Array | None,
    kept: jax.Array | None,
    g_logp: jax.Array,
    g_entropy: jax.Array | None,
    how: _How,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the hidden states [M, D] and of the head [V, D]."""
    targets, (scale, softcap, size, keep, cut) = how.counted(targets, weight), how

    def one(carry: Any, scanned: Any) -> Any:
        dhidden, dweight = carry
        number, top, stored = scanned
        start, part, fresh = _slice(weight, number, size, hidden.dtype)
        part = how.part(part)
        of_p = g_logp[:, None]
        # d logp = onehot - p; d entropy = -p (z - mean). Exponentials of nearly equal logits lose z - mean.
        if keep is not None and g_entropy is None:
            e = jax.lax.bitcast_convert_type(stored, keep) if _narrow(keep) else stored
            p = e.astype(logz.dtype) * jnp.exp(top - logz)[:, None]
        else:
            z = how.logits(hidden, part)
            p = jnp.exp(z - logz[:, None])
            if g_entropy is not None:
                of_p = of_p + g_entropy[:, None] * (z - mean[:, None])
        dz = jnp.where(_targeted(targets, start, jnp.ones_like(fresh)), g_logp[:, None], 0.0)
        dz = (dz - p * of_p) * scale
        if softcap is not None:
            # z is capped and scaled, so z / (scale softcap) is the tanh, whose derivative is 1 - tanh^2.
            dz = dz * (1.0 - jnp.square(z / (scale * softcap)))
        # Contracts the positions: [M, W] and [M, D] to [W, D].
        with of_gradients():
            dweight_part = contract(dz.astype(hidden.dtype), hidden, 0, 0, _wide(hidden))
        dweight_part = dweight_part if cut is None else cut.own(dweight_part)
        dweight = jax.lax.dynamic_update_slice_in_dim(dweight, dweight_part.astype(weight.dtype), start, axis=0)
        # The last slice repeats tokens of the one before. Their rows of dweight were just written with equal values,
        # but dhidden is a sum over slices and would count them twice.
        dz = jnp.where(fresh, dz, 0.0).astype(hidden.dtype)
        with of_gradients():
            dhidden = dhidden + contract(dz, part, 1, 0, _wide(hidden))
        return (dhidden, dweight), None

    zeros = jnp.zeros(hidden.shape, _wide(hidden)), jnp.zeros_like(weight)
    (dhidden, dweight), _ = jax.lax.scan(one, zeros, (jnp.arange(-(-weight.shape[0] // size)), tops, kept))
    if cut is not None:
        dhidden, dweight = cut.summed(dhidden), cut.rest(dweight)
    return dhidden.astype(hidden.dtype), dweight


def _saved(hidden: Any, weight: Any, targets: Any, how: _How) -> Any:
    return _forward(hidden.value, weight.value, targets.value, how)


_head.defvjp(_saved, _backward, symbolic_zeros=True)
