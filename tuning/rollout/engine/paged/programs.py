"""The programs of an engine with pages: a mixed step of prompts and completions, and a run of decoding steps.

A mixed step feeds a ragged batch: the newest token of each completion, and as many tokens of prompts as its chunk has
room for. A sequence whose last token is fed gets its next one in the same step, so no completion waits for the prompts
of others. Axes as in `attention`; here R rows are sequences of the batch, packed to the front, and T steps of a run.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from rlhf.tuning.models.decoder import AttentionSpec
from rlhf.tuning.rollout.engine.arrays import Array
from rlhf.tuning.rollout.engine.cache import Stack
from rlhf.tuning.rollout.engine.paged.attention import Kernel, Ragged, attend_ragged, write
from rlhf.tuning.rollout.engine.paged.pages import NOWHERE
from rlhf.tuning.rollout.engine.rows import Decoded, Rows, nothing_decoded, sampled


class Paged(NamedTuple):
    """The arrays that the programs update. They are donated: after a call only its result is valid."""

    pages: list[Stack]
    """Of each layer, as of `attention.make`."""
    seen_SV: jax.Array
    """Tokens of a slot's prompt and completion, which a repetition penalty applies to; bool."""


class Fed(NamedTuple, Generic[Array]):
    """The tokens of a mixed step."""

    tokens_C: Array
    positions_C: Array
    ragged: Ragged[Array]
    last_R: Array
    """The last token of each row."""


class _Loop(NamedTuple):
    """The state of the decoding loop."""

    t: jax.Array
    token_R: jax.Array
    pages: list[Stack]
    seen_RV: jax.Array
    out: Decoded[jax.Array]


_STATIC = ("graph", "top", "dtype", "kernel", "mesh")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="state")
def mixed(
    graph: Any,
    weights: Any,
    state: Paged,
    fed: Fed[jax.Array],
    rows: Rows[jax.Array],
    slot_R: jax.Array,
    *,
    top: int,
    dtype: str,
    kernel: Kernel | None,
    mesh: Any,
) -> tuple[Paged, Decoded[jax.Array]]:
    """Feeds a ragged batch, and makes one token of each live row: those whose last token is among the fed ones.

    slot_R: rows of `seen_SV`; padding is behind its end. mesh: over whose `tensor` axis heads are divided, or None.
    """
    model = nnx.merge(graph, weights)
    live_C = jnp.arange(len(fed.tokens_C)) < fed.ragged.starts[-1]
    attention = functools.partial(_attend, ragged=fed.ragged, single=False, kernel=kernel, mesh=mesh)
    hidden, pages = _forward(model, fed.tokens_C, fed.positions_C, live_C, attention, state.pages, dtype)
    seen_RV = _seen(state, rows, slot_R)
    before = nothing_decoded(rows, 1, top)
    _, seen_RV, decoded = sampled(model, hidden[fed.last_R], rows.token_R, 0, rows, before, seen_RV, top)
    return Paged(pages, _put_seen(state.seen_SV, seen_RV, rows, slot_R)), decoded


@functools.partial(jax.jit, static_argnames=(*_STATIC, "steps"), donate_argnames="state")
def decode(
    graph: Any,
    weights: Any,
    state: Paged,
    table_RW: jax.Array,
    rows: Rows[jax.Array],
    slot_R: jax.Array,
    wake: jax.Array,
    most: jax.Array,
    *,
    steps: int,
    top: int,
    dtype: str,
    kernel: Kernel | None,
    mesh: Any,
) -> tuple[Paged, Decoded[jax.Array]]:
    """Up to `steps` tokens of every live row, and no more than `most`, for which its pages have room.

    Ends early when no row is live, or when `wake` rows have ended in this run.
    """
    model = nnx.merge(graph, weights)
    count, size = len(rows.token_R), state.pages[0]["kv"].shape[1]
    each = jnp.arange(count)

    def running(loop: _Loop) -> jax.Array:
        # `most` and `wake` are arrays, not static: their values compile nothing.
        ended = jnp.sum(rows.live_R) - jnp.sum(loop.out.live_R)
        return (loop.t < jnp.minimum(steps, most)) & jnp.any(loop.out.live_R) & (ended < wake)

    def step(loop: _Loop) -> _Loop:
        live_R, position_R = loop.out.live_R, rows.length_R + loop.t
        page_R = jnp.where(live_R, table_RW[each, position_R // size], NOWHERE)
        ragged = Ragged(
            place_C=page_R * size + jnp.where(live_R, position_R % size, 0),
            # A row that has ended reads one token, which is dropped.
            length_R=jnp.where(live_R, position_R + 1, 1),
            table_RW=table_RW,
            starts=jnp.arange(count + 1, dtype=jnp.int32),
            used=jnp.sum(rows.live_R, dtype=jnp.int32)[None],
        )
        attention = functools.partial(_attend, ragged=ragged, single=True, kernel=kernel, mesh=mesh)
        hidden, pages = _forward(model, loop.token_R, position_R, live_R, attention, loop.pages, dtype)
        token_R, seen_RV, decoded = sampled(model, hidden, loop.token_R, loop.t, rows, loop.out, loop.seen_RV, top)
        return _Loop(loop.t + 1, token_R, pages, seen_RV, decoded)

    before = nothing_decoded(rows, steps, top)
    # Rows that are live are in front: `used` counts them.
    first = _Loop(jnp.asarray(0, jnp.int32), rows.token_R, state.pages, _seen(state, rows, slot_R), before)
    loop = jax.lax.while_loop(running, step, first)
    return Paged(loop.pages, _put_seen(state.seen_SV, loop.seen_RV, rows, slot_R)), loop.out


def _forward(
    model: Any,
    tokens_C: jax.Array,
    positions_C: jax.Array,
    live_C: jax.Array,
    attention: Any,
    pages: list[Stack],
    dtype: str,
) -> tuple[jax.Array, list[Stack]]:
    """(hidden states [C, D], pages with the new keys and values) of tokens as one row of the model."""
    hidden, pages = model(
        tokens_C[None],
        positions_C[None],
        attention,
        live_BL=live_C[None],
        cache=[{} for _ in pages],
        new=pages,
        dtype=jnp.dtype(dtype),
    )
    return hidden[0], pages


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spec: AttentionSpec,
    mine: tuple[Stack, Stack, int],
    *,
    ragged: Ragged[jax.Array],
    single: bool,
    kernel: Kernel | None,
    mesh: Any,
) -> tuple[jax.Array, tuple[Stack, Stack, int]]:
    """Attention of one row of tokens, whose keys and values are written first; `mine` is (nothing, pages, 0)."""
    nothing, layer, number = mine
    pages = write(layer["kv"], k[0], v[0], ragged.place_C)
    out = attend_ragged(q[0], pages, ragged, spec, single=single, kernel=kernel, mesh=mesh)
    return out[None], (nothing, {"kv": pages}, number)


def _penalised(rows: Rows[jax.Array]) -> jax.Array:
    return jnp.any(rows.controls.repetition_penalty_R != 1)


def _seen(state: Paged, rows: Rows[jax.Array], slot_R: jax.Array) -> jax.Array:
    """The rows' part of `seen_SV`. Without a penalty in any row nothing reads it, and it is not gathered."""
    shape = len(slot_R), state.seen_SV.shape[1]
    return jax.lax.cond(
        _penalised(rows),
        lambda seen: seen.at[slot_R].get(mode="fill", fill_value=False),
        lambda seen: jnp.zeros(shape, bool),
        state.seen_SV,
    )


def _put_seen(seen_SV: jax.Array, seen_RV: jax.Array, rows: Rows[jax.Array], slot_R: jax.Array) -> jax.Array:
    """`seen_SV` with the rows' part; padding is dropped."""
    return jax.lax.cond(
        _penalised(rows), lambda seen: seen.at[slot_R].set(seen_RV, mode="drop"), lambda seen: seen, seen_SV
    )
