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
from rlhf.tuning.rollout.engine.paged.attention import Kernel, Ragged, attend_ragged, page_tokens, write
from rlhf.tuning.rollout.engine.paged.pages import NOWHERE
from rlhf.tuning.rollout.engine.rows import Decoded, Rows, decode_steps, nothing_decoded, sampled


class Fed(NamedTuple, Generic[Array]):
    """The tokens of a mixed step."""

    tokens_C: Array
    positions_C: Array
    ragged: Ragged[Array]
    last_R: Array
    """The last token of each row."""


_STATIC = ("graph", "top", "dtype", "kernel", "mesh")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="pages")
def mixed(
    graph: Any,
    weights: Any,
    pages: list[Stack],
    fed: Fed[jax.Array],
    rows: Rows[jax.Array],
    *,
    top: int,
    dtype: str,
    kernel: Kernel | None,
    mesh: Any,
) -> tuple[list[Stack], Decoded[jax.Array]]:
    """Feeds a ragged batch, and makes one token of each live row: those whose last token is among the fed ones.

    mesh: divides heads over its axis `tensor`; or None.
    """
    model = nnx.merge(graph, weights)
    live_C = jnp.arange(len(fed.tokens_C)) < fed.ragged.starts[-1]
    attention = functools.partial(_attend, ragged=fed.ragged, single=False, kernel=kernel, mesh=mesh)
    hidden, pages = _forward(model, fed.tokens_C, fed.positions_C, live_C, attention, pages, dtype)
    _, decoded = sampled(model, hidden[fed.last_R], 0, rows, nothing_decoded(rows, 1, top), top)
    return pages, decoded


@functools.partial(jax.jit, static_argnames=(*_STATIC, "steps"), donate_argnames="pages")
def decode(
    graph: Any,
    weights: Any,
    pages: list[Stack],
    table_RW: jax.Array,
    rows: Rows[jax.Array],
    wake: jax.Array,
    *,
    steps: int,
    top: int,
    dtype: str,
    kernel: Kernel | None,
    mesh: Any,
) -> tuple[list[Stack], Decoded[jax.Array]]:
    """As `decode_steps`, for sequences with pages for all tokens of the run. Live rows are in front."""
    model = nnx.merge(graph, weights)
    count, size = len(rows.token_R), page_tokens(pages[0])
    each = jnp.arange(count)

    def feed(token_R: jax.Array, t: jax.Array, live_R: jax.Array, pages: list[Stack]) -> Any:
        position_R = rows.length_R + t
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
        return _forward(model, token_R, position_R, live_R, attention, pages, dtype)

    return decode_steps(model, rows, pages, feed, steps=steps, top=top, wake=wake, most=steps)


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
    """Attention of one row of tokens, after their keys and values are written; `mine` is (nothing, pages, 0)."""
    nothing, layer, number = mine
    layer = write(layer, k[0], v[0], ragged.place_C, kernel, mesh)
    pages, *scales = layer.values()
    out = attend_ragged(q[0], pages, ragged, spec, single=single, kernel=kernel, mesh=mesh, scales=[*scales, None][0])
    return out[None], (nothing, layer, number)
