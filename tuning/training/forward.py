"""Packed rows through a model: response log-probabilities, entropies, values and scores.

Axes as in `batch`: C completions, T completion tokens, M completion tokens with a mask of 1, S shards of a batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf.tuning.device import Compute
from rlhf.tuning.losses.head import token_logps
from rlhf.tuning.models.attention import packed_attention
from rlhf.tuning.models.decoder import Decoder
from rlhf.tuning.models.experts import balance, counting
from rlhf.tuning.models.lora import assemble
from rlhf.tuning.models.sharding import CONTEXT, ROWS, constrain, dividing, mesh_in_use, parts, spec

Batch = dict[str, jax.Array]
Router = tuple[jax.Array | None, dict[str, jax.Array]]
"""`experts.balance` of a mixture: (loss, sums for metrics); of other models (None, {})."""


def _hidden(decoder: Decoder, batch: Batch, compute: Compute, replay: bool = False) -> tuple[jax.Array, Any]:
    """Hidden states of all positions, [B * L, D], and of a mixture the sums of its routers (`experts.counting`).

    replay: whether tokens take the experts that the batch has recorded, [B, L, layers, X], if it has any.
    """
    recorded = batch.get("experts_BL") if replay else None
    hidden, sums = decoder(
        batch["tokens_BL"],
        batch["positions_BL"],
        packed_attention(batch["group_BL"], batch.get("branch_BL")),
        cache=None if recorded is None else jnp.moveaxis(recorded, 2, 0),
        dtype=jnp.dtype(compute.dtype),
        remat=compute.remat,
        routing=counting(batch["group_BL"] > 0),
    )
    return hidden.reshape(-1, hidden.shape[-1]), sums


def _shards(batch: Batch) -> int:
    return 1 if batch["where_M"].ndim == 1 else len(batch["where_M"])


def _taken(batch: Batch, values: jax.Array, index: jax.Array, mode: Any = None) -> jax.Array:
    """Values [n, ...] at flat indices [...], shard by shard: then a device reads what it has itself."""
    shards = _shards(batch)
    if shards == 1:
        return jnp.take(values, index, axis=0, mode=mode) if mode else values[index]
    split = values.reshape(shards, -1, *values.shape[1:]), index.reshape(shards, -1)
    taken = jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode=mode))(*split)
    return taken.reshape(*index.shape, *values.shape[1:])


def _states(batch: Batch, hidden: jax.Array, index: jax.Array) -> jax.Array:
    """Hidden states [..., D] at flat indices [...], of those of all positions, [B * L, D]."""
    mesh = mesh_in_use()
    if mesh is None:
        return _taken(batch, hidden, index)
    rows, length = batch["tokens_BL"].shape
    hidden_BLD = hidden.reshape(rows, length, -1)
    shards, columns = dividing(mesh, rows, ROWS), dividing(mesh, length, CONTEXT)
    if not columns or _shards(batch) != parts(mesh, shards):
        whole = constrain(hidden_BLD, ROWS, None, None)
        return _taken(batch, whole.reshape(hidden.shape), index)
    each = length // parts(mesh, columns)
    # Devices along `context` divide the states, if they can: each continues with its part.
    divides = index.shape[0] // _shards(batch) % parts(mesh, columns) == 0

    def local(hidden_BLD: jax.Array, index: jax.Array) -> jax.Array:
        row, column = index // length, index % length - jax.lax.axis_index(CONTEXT) * each
        mine = (column >= 0) & (column < each)
        flat = jnp.where(mine, row * each + column, 0)
        found = jnp.where(mine[..., None], hidden_BLD.reshape(-1, hidden_BLD.shape[2])[flat], 0)
        # One of the summands is not zero.
        if divides:
            return jax.lax.psum_scatter(found, columns, scatter_dimension=0, tiled=True)
        return jax.lax.psum(found, columns)

    given = spec(shards, columns), spec(shards)
    out = spec(shards + columns if divides else shards)
    return jax.shard_map(local, in_specs=given, out_specs=out, check_vma=False)(hidden_BLD, index)


def logps_and_entropy(
    graph: Any, params: Any, batch: Batch, temperature: float, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each completion token and entropy at its position, both [C, T], 0 where masked, in at least
    float32."""
    return logps_entropy_and_router(graph, params, batch, temperature, compute)[:2]


def logps_entropy_and_router(
    graph: Any, params: Any, batch: Batch, temperature: float, compute: Compute
) -> tuple[jax.Array, jax.Array, Router]:
    """`logps_and_entropy`, and the balance of the routers."""
    decoder: Decoder = assemble(graph, params)
    every, sums = _hidden(decoder, batch, compute, replay=True)
    hidden = _states(batch, every, masked_tokens(batch, "at_CT"))
    router: Router = balance(sums) if decoder.config.num_experts else (None, {})
    return *_logps_and_entropy(batch, decoder, hidden, temperature), router


def share_of_balance(router: Router, batch: Batch) -> jax.Array:
    """The balance loss of a micro-batch by its share of the step's tokens: the fractions that it reads are known for
    the whole step only after its last micro-batch. Raises ValueError for a model without a router."""
    if router[0] is None:
        raise ValueError("router_aux is for a mixture of experts, and this model has none: set it to 0")
    return router[0] * jnp.sum(batch["mask_CT"]) / batch["n_tokens"]


def _logps_and_entropy(
    batch: Batch, decoder: Decoder, hidden: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    logps, entropy = token_logps(
        hidden,
        masked_tokens(batch, "targets_CT"),
        decoder.head_weight(),
        temperature=temperature,
        softcap=decoder.config.final_softcap,
        shards=_shards(batch),
    )
    return by_completion(batch, logps), by_completion(batch, entropy)


def logps_and_leads(graph: Any, params: Any, batch: Batch, compute: Compute) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each completion token, and its lead over the mean log-probability of the vocabulary; both
    [C, T], 0 where masked. Raises ValueError for logits with a soft cap, whose mean is not that of the head's rows."""
    decoder, hidden = response_hidden(graph, params, batch, compute)
    if decoder.config.final_softcap is not None:
        raise ValueError("label smoothing needs logits without final_logit_softcapping: set label_smoothing to 0")
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    weight = decoder.head_weight().astype(wide)
    # Normalisers cancel: the lead is a difference of logits, the hidden state times a difference of rows of the head.
    rows = weight[masked_tokens(batch, "targets_CT")] - weight.mean(axis=0)
    leads = jnp.sum(hidden.astype(wide) * rows, axis=-1)
    return _logps_and_entropy(batch, decoder, hidden, 1.0)[0], by_completion(batch, leads)


def response_hidden(graph: Any, params: Any, batch: Batch, compute: Compute) -> tuple[Decoder, jax.Array]:
    """The decoder, and the hidden states that predict the M tokens with a mask of 1, [M, D]."""
    decoder: Decoder = assemble(graph, params)
    return decoder, _states(batch, _hidden(decoder, batch, compute)[0], masked_tokens(batch, "at_CT"))


def masked_tokens(batch: Batch, name: str) -> jax.Array:
    """An integer array [C, T] of the batch at the M tokens with a mask of 1, which alone reach the LM head, [M]."""
    # Past the end a gather reads anything and a scatter writes nothing.
    return _taken(batch, batch[name].reshape(-1), batch["where_M"].reshape(-1), "clip")


def by_completion(batch: Batch, values_M: jax.Array) -> jax.Array:
    """Values of the M tokens with a mask of 1 at their places, [C, T]; 0 where masked."""
    shape, where = batch["mask_CT"].shape, batch["where_M"]
    values_M = constrain(values_M, ROWS)
    flat = jnp.zeros(shape[0] * shape[1], values_M.dtype)

    def put(flat: jax.Array, where: jax.Array, values: jax.Array) -> jax.Array:
        return flat.at[where].set(values, mode="drop")

    if where.ndim == 1:
        return put(flat, where, values_M).reshape(shape)
    return jax.vmap(put)(flat.reshape(len(where), -1), where, values_M.reshape(where.shape)).reshape(shape)


def values(graph: Any, params: Any, batch: Batch, compute: Compute) -> jax.Array:
    """Critic values [C, T] of the states in which each completion token was chosen, 0 where masked."""
    return jnp.where(batch["mask_CT"] > 0, _scores(graph, params, batch, compute, "at_CT")[0], 0.0)


def values_and_last(graph: Any, params: Any, batch: Batch, compute: Compute) -> jax.Array:
    """Critic values [C, T + 1]: before each completion token as in `values`, then of the state after the last one."""
    before, last = _scores(graph, params, batch, compute, "at_CT", "last_C")
    return jnp.concatenate([jnp.where(batch["mask_CT"] > 0, before, 0.0), last[:, None]], axis=1)


def scores(graph: Any, params: Any, batch: Batch, compute: Compute) -> jax.Array:
    """Reward-model scores [C], read at the recorded last token (R12)."""
    return _scores(graph, params, batch, compute, "last_C")[0]


def _scores(graph: Any, params: Any, batch: Batch, compute: Compute, *where: str) -> list[jax.Array]:
    """Outputs of a scalar head at the positions that arrays of the batch hold."""
    model = assemble(graph, params)
    hidden, _ = _hidden(model.decoder, batch, compute)
    return [model.scores(_states(batch, hidden, batch[name])) for name in where]
