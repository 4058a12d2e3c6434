"""The one place where per-token losses become a scalar.

Every mode is `sum(weight * x)` with weights that depend on counts of the *whole optimizer step*: count each
micro-batch with `count`, add the counts over micro-batches and devices, and pass the totals to `aggregate`.
The values and gradients of the parts then add up to those of the full batch, whatever the split. Parts are
summed, never averaged.

With m the mask, x the per-token loss, L_b the valid tokens of sequence b, N_tok and N_seq the step's counts:

| mode | value | used by |
| --- | --- | --- |
| `token-mean` | sum(m x) / N_tok | DAPO (arXiv:2503.14476) |
| `sequence-mean-token-mean` | sum_b [sum_t(m x) / L_b] / N_seq | GRPO (arXiv:2402.03300), GSPO |
| `sequence-mean-token-sum` | sum(m x) / N_seq | REINFORCE |
| `constant` | sum(m x) / (N_seq C), C a token budget, never the padded width | Dr. GRPO (arXiv:2503.20783) |
| `token-sum` | sum(m x) / C, C = 1 unless given | sums, and fixed external denominators |
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from tuning.losses.masks import masked, segment_total, sequence_sum

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant", "token-sum"]
Count = jax.Array | int | float


class Counts(NamedTuple):
    """What the step's denominators are made of; add with `jax.tree.map(jnp.add, a, b)` or `psum`."""

    n_tokens: Count
    n_sequences: Count


def count(
    mask_BT: jax.Array,
    *,
    segment_ids_BT: jax.Array | None = None,
    empty_rows: Literal["excluded", "included"] = "excluded",
) -> Counts:
    """Valid tokens and sequences of one (micro-)batch.

    mask_BT: [B, T]. A sequence is a row, or with `segment_ids_BT` a segment of a packed row. Rows without a valid
    token count as sequences only if `empty_rows` is "included" (which packed rows refuse).
    """
    valid = mask_BT > 0
    if segment_ids_BT is not None:
        if empty_rows == "included":
            raise ValueError("packed rows have no empty sequences to include")
        ones = jnp.ones(mask_BT.shape, jnp.float32)
        size = segment_total(ones, mask_BT, segment_ids_BT)
        # Each of a segment's `size` valid tokens brings 1 / size; the sum is whole up to rounding.
        n_sequences = jnp.round(masked(1 / jnp.maximum(size, 1), mask_BT).sum()).astype(jnp.int32)
    elif empty_rows == "included":
        n_sequences = jnp.asarray(mask_BT.shape[0], jnp.int32)
    else:
        n_sequences = valid.any(-1).sum().astype(jnp.int32)
    return Counts(valid.sum().astype(jnp.int32), n_sequences)


def token_weights(
    mask_BT: jax.Array,
    mode: Aggregation,
    *,
    n_tokens: Count,
    n_sequences: Count,
    constant: float | None = None,
    segment_ids_BT: jax.Array | None = None,
    row_eps: float = 0.0,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Weight of every token in the aggregate, [B, T]; 0 where masked. Arguments as in `aggregate`."""
    ones = masked(jnp.ones(mask_BT.shape, dtype), mask_BT)
    tokens = jnp.maximum(jnp.asarray(n_tokens, dtype), 1)
    sequences = jnp.maximum(jnp.asarray(n_sequences, dtype), 1)
    if mode not in ("constant", "token-sum") and constant is not None:
        raise ValueError(f"aggregation {mode!r} takes no constant")
    match mode:
        case "token-mean":
            return ones / tokens
        case "sequence-mean-token-mean":
            length = jnp.maximum(sequence_sum(ones, mask_BT, segment_ids_BT), 1)
            return ones / ((length + row_eps) * sequences)
        case "sequence-mean-token-sum":
            return ones / sequences
        case "constant":
            if constant is None:
                raise ValueError("aggregation 'constant' needs the constant, a token budget per sequence")
            return ones / (sequences * constant)
        case "token-sum":
            return ones / (1.0 if constant is None else constant)
        case _:
            raise ValueError(f"unknown aggregation {mode!r}; one of {get_args(Aggregation)}")


def aggregate(
    x_BT: jax.Array,
    mask_BT: jax.Array,
    mode: Aggregation,
    *,
    n_tokens: Count,
    n_sequences: Count,
    constant: float | None = None,
    segment_ids_BT: jax.Array | None = None,
    row_eps: float = 0.0,
) -> jax.Array:
    """Reduce per-token losses to this (micro-)batch's share of the step's loss, a scalar.

    x_BT: [B, T] per-token losses; masked positions may hold anything. mask_BT: [B, T]. n_tokens, n_sequences: counts
    of the whole optimizer step, all micro-batches and devices (`count`). constant: see the table of the module.
    segment_ids_BT: [B, T] ids of packed sequences. row_eps is added to each row's length in
    "sequence-mean-token-mean" (some implementations use 1e-8). The reduction runs in float32 at least.
    """
    x_BT = x_BT.astype(jnp.promote_types(x_BT.dtype, jnp.float32))
    weights = token_weights(
        mask_BT, mode, n_tokens=n_tokens, n_sequences=n_sequences, constant=constant,
        segment_ids_BT=segment_ids_BT, row_eps=row_eps, dtype=x_BT.dtype,
    )  # fmt: skip
    return (masked(x_BT, mask_BT) * weights).sum()
