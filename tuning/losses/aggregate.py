"""The one place where per-token losses become a scalar.

Every mode is `sum(weight * x)` with weights that depend on counts of the *whole optimizer step*: count each
micro-batch with `count`, add the counts over micro-batches and devices, and pass the totals to `aggregate`.
The values and gradients of the parts then add up to those of the full batch, whatever the split. Parts are
summed, never averaged.

With m the mask, x the per-token loss, L_b the valid tokens of sequence b, N_tok and N_seq the step's counts:

| mode | value | used by |
| --- | --- | --- |
| `token-mean` | sum(m x) / N_tok | DAPO (arXiv:2503.14476) |
| `sequence-mean-token-mean` | sum_b [sum_t(m x) / L_b] / N_seq | GRPO's paper (arXiv:2402.03300), GSPO |
| `sequence-mean-token-sum` | sum(m x) / N_seq | REINFORCE |
| `constant` | sum(m x) / (N_seq C), C a token budget, never the padded width | Dr. GRPO (arXiv:2503.20783) |
| `token-sum` | sum(m x) / C, C = 1 unless given | sums, and fixed external denominators |
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.losses.masks import masked, row_sum

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant", "token-sum"]
Count = jax.Array | int | float


class Counts(NamedTuple):
    """Counts that define the denominators of a step. The counts of its micro-batches add up to those of the step."""

    n_tokens: int
    n_sequences: int


def count(mask_BT: np.ndarray, sequences_B: np.ndarray | None = None) -> Counts:
    """Valid tokens and sequences of one (micro-)batch, on the host.

    `sequences_B` marks the rows that hold a sequence, as opposed to padding. A marked row without any valid token
    counts, so that a completion which lost its tokens (`rlhf.tuning.losses.masks.sampled_mask`) still weighs in the
    mean over sequences. Without `sequences_B` the rows with a valid token are counted.
    """
    valid_BT = mask_BT > 0
    rows_B = valid_BT.any(-1) if sequences_B is None else sequences_B
    return Counts(int(valid_BT.sum()), int(rows_B.sum()))


def aggregate(
    x_BT: jax.Array,
    mask_BT: jax.Array,
    mode: Aggregation,
    *,
    n_tokens: Count,
    n_sequences: Count,
    constant: float | None = None,
    row_eps: float = 0.0,
) -> jax.Array:
    """Reduce per-token losses to this (micro-)batch's share of the step's loss, a scalar.

    x_BT: [B, T] per-token losses; masked positions may hold anything. mask_BT: [B, T]. n_tokens, n_sequences: counts
    of the whole optimizer step, all micro-batches and devices (`count`). constant: C in the table of the module.
    row_eps is added to each row's length in "sequence-mean-token-mean" (some implementations use 1e-8).
    Raises ValueError for an unknown mode, a missing constant, or a constant that the mode does not use.
    """
    # Sums of many small losses lose their low bits in bfloat16.
    x_BT = x_BT.astype(jnp.promote_types(x_BT.dtype, jnp.float32))
    weights = masked(jnp.ones(mask_BT.shape, x_BT.dtype), mask_BT)
    # An empty step has the loss 0 rather than 0 / 0.
    tokens, sequences = (jnp.maximum(jnp.asarray(n, x_BT.dtype), 1) for n in (n_tokens, n_sequences))
    if mode not in ("constant", "token-sum") and constant is not None:
        raise ValueError(f"aggregation {mode!r} takes no constant")
    match mode:
        case "token-mean":
            weights /= tokens
        case "sequence-mean-token-mean":
            # A row is never split over micro-batches, so its own length needs no count from outside.
            length = jnp.maximum(row_sum(weights, mask_BT), 1)
            weights /= (length + row_eps) * sequences
        case "sequence-mean-token-sum":
            weights /= sequences
        case "constant":
            if constant is None:
                raise ValueError("aggregation 'constant' needs the constant, a token budget per sequence")
            weights /= sequences * constant
        case "token-sum":
            weights /= 1.0 if constant is None else constant
        case _:
            raise ValueError(f"unknown aggregation {mode!r}; one of {get_args(Aggregation)}")
    return (masked(x_BT, mask_BT) * weights).sum()
