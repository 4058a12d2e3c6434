"""The rows of a run of decoding: what a run begins with, the tokens that it makes, and how a step makes one a row.

Axes as in `programs`: R rows, T steps of a run, N most probable ids, E stop ids, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf.tuning.rollout.engine.arrays import Array
from rlhf.tuning.rollout.engine.sampling import Controls, sample, uniforms
from rlhf.tuning.rollout.requests import MAX_STOP_IDS


class Rows(NamedTuple, Generic[Array]):
    """The start of a run of decoding, one entry a slot."""

    token_R: Array
    """To feed: the newest token, whose keys and values are not cached yet."""
    length_R: Array
    """Cached tokens before it."""
    left_R: Array
    """Tokens that the completion may still get."""
    made_R: Array
    """Tokens that it has: the place of the next one in its random stream."""
    live_R: Array
    """Whether the slot decodes; bool."""
    key_R2: Array
    """Key data of the sample."""
    stops_RE: Array
    """Token ids that end the completion, padded with -1."""
    controls: Controls[Array]


class Decoded(NamedTuple, Generic[Array]):
    """The tokens of a run of decoding. Of row r only the first `made_R[r]` count."""

    tokens_RT: Array
    logps_RT: Array
    top_ids_RTN: Array
    """N most probable ids at each token; N may be 0."""
    top_logps_RTN: Array
    made_R: Array
    live_R: Array
    """Whether the completion goes on."""


def blank_rows(count: int) -> Rows[np.ndarray]:
    """So many rows that are not live."""
    return Rows(
        token_R=np.zeros(count, np.int32),
        length_R=np.zeros(count, np.int32),
        left_R=np.zeros(count, np.int32),
        made_R=np.zeros(count, np.int32),
        live_R=np.zeros(count, bool),
        key_R2=np.zeros((count, 2), np.uint32),
        stops_RE=np.full((count, MAX_STOP_IDS), -1, np.int32),
        controls=Controls(
            temperature_R=np.ones(count, np.float32),
            top_p_R=np.ones(count, np.float32),
            top_k_R=np.zeros(count, np.int32),
            min_p_R=np.zeros(count, np.float32),
            repetition_penalty_R=np.ones(count, np.float32),
        ),
    )


def sampled(
    model: Any,
    hidden_RD: jax.Array,
    token_R: jax.Array,
    t: jax.Array | int,
    rows: Rows[jax.Array],
    out: Decoded[jax.Array],
    seen_RV: jax.Array,
    top: int,
) -> tuple[jax.Array, jax.Array, Decoded[jax.Array]]:
    """(next token of each row, seen tokens, result with them) at step `t` of a run that has just fed `token_R`."""
    each = jnp.arange(len(token_R))
    # Without a penalty in any row nothing reads `seen_RV`, and the update would copy it. A row that is not live has fed
    # nothing, but may have a prompt that is cached in part.
    penalised = jnp.any(rows.controls.repetition_penalty_R != 1)
    seen_RV = jax.lax.cond(penalised, lambda x: x.at[each, token_R].max(out.live_R), lambda x: x, seen_RV)
    # A draw depends on the sample's key and the token's number, not on the slot or the run (R15).
    uniform_R = uniforms(rows.key_R2, rows.made_R + t)
    token_R, logp_R, (top_ids, top_logps) = sample(model.logits(hidden_RD), uniform_R, rows.controls, seen_RV, top)
    # A row that has ended still writes tokens below; its count stands still, so they are not read.
    made_R = out.made_R + out.live_R
    ended_R = jnp.any(token_R[:, None] == rows.stops_RE, axis=-1) | (made_R >= rows.left_R)
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=t, axis=1)
    decoded = Decoded(
        tokens_RT=put(out.tokens_RT, token_R[:, None]),
        logps_RT=put(out.logps_RT, logp_R[:, None]),
        top_ids_RTN=put(out.top_ids_RTN, top_ids[:, None]),
        top_logps_RTN=put(out.top_logps_RTN, top_logps[:, None]),
        made_R=made_R,
        live_R=out.live_R & ~ended_R,
    )
    return token_R, seen_RV, decoded


def nothing_decoded(rows: Rows[jax.Array], steps: int, top: int) -> Decoded[jax.Array]:
    """The result before the first of `steps` steps."""
    count = len(rows.token_R)
    return Decoded(
        tokens_RT=jnp.zeros((count, steps), jnp.int32),
        logps_RT=jnp.zeros((count, steps), jnp.float32),
        top_ids_RTN=jnp.zeros((count, steps, top), jnp.int32),
        top_logps_RTN=jnp.zeros((count, steps, top), jnp.float32),
        made_R=jnp.zeros(count, jnp.int32),
        live_R=rows.live_R,
    )
