"""Keys and values in pages, and attention of a ragged batch of queries over them.

Axes: P pages, S tokens of a page, K key-value heads, H head size, C queries, N query heads, R sequences, W pages of the
longest sequence. A layer's pages are one array [P, S, 2 K, H]: keys and values of a head one after the other, as JAX's
kernel for TPUs reads them (`jax.experimental.pallas.ops.tpu.ragged_paged_attention`). On other platforms the same is
computed by `gathered`.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlhf.tuning.compile_target import LANES
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import AttentionSpec
from rlhf.tuning.rollout.engine.arrays import Array
from rlhf.tuning.rollout.engine.cache import KV, attend, within_window

Kernel = Literal["tpu"]
"""The kernel for TPUs; None: `gathered`."""
KEYS = 512
"""Keys that the kernel reads at a time, at most."""
WINDOW = 64
"""Queries of a sequence that `gathered` computes at a time."""
ABREAST = 8
"""Windows that it computes side by side."""


class Ragged(NamedTuple, Generic[Array]):
    """The sequence of each query, and the pages of each sequence.

    Queries of a sequence are next to each other, and are the last of its tokens. Three sequences in pages of 4, the
    first with 9 tokens before, the second with 2, the third with none:

        queries      a | b | c d e f g | . .
        starts       0 1 2 7               and 7 from there on
        length_R     10 3 5
        table_RW     5 9 2 | 7 0 0 | 4 6 0
        place_C      2*4+1 | 7*4+2 | 4*4+0 ... 4*4+3 6*4+0 | 0 0
    """

    place_C: Array
    """Where a query's own key and value go: page * S + token in the page. Padding goes to page 0."""
    length_R: Array
    """Tokens of a sequence, its queries among them."""
    table_RW: Array
    """Its pages, in order."""
    starts: Array
    """[R + 1] its first query; the last entry is the number of queries."""
    used: Array
    """[1] number of sequences; the others, after them, are padding."""


def kernel_for(platform: str, config: DecoderConfig, kv: str, dtype: str, parts: int = 1) -> Kernel | None:
    """The kernel that takes this model over `parts` devices, with keys and values and computation of these types."""
    if platform != "tpu" or kv != dtype or kv not in ("bfloat16", "float32") or config.num_kv_heads % parts:
        return None
    if config.head_dim > LANES:
        # Its loads of every other row are of rows of 128 numbers.
        return None
    # As the kernel's own check (`get_min_heads_per_blk`), of heads in pairs, packed into 32 bits.
    rows = 2 * (config.num_kv_heads // parts) // (2 if kv == "bfloat16" else 1)
    return "tpu" if rows in (1, 2, 4, 8) or rows % 8 == 0 else None


def stored_head(config: DecoderConfig, kernel: Kernel | None) -> int:
    """Numbers of a head in a page."""
    return LANES if kernel else config.head_dim


def make(config: DecoderConfig, pages: int, tokens: int, kv: KV, kernel: Kernel | None) -> list[dict[str, jax.Array]]:
    """Empty pages of `tokens` tokens, for each layer."""
    shape = pages, tokens, 2 * config.num_kv_heads, stored_head(config, kernel)
    return [{"kv": jnp.zeros(shape, kv)} for _ in range(config.num_layers)]


def page_bytes(config: DecoderConfig, tokens: int, kv: KV, kernel: Kernel | None) -> int:
    """Bytes of a page in all layers."""
    numbers = 2 * config.num_layers * config.num_kv_heads * stored_head(config, kernel)
    return numbers * tokens * jnp.dtype(kv).itemsize


def write(pages: jax.Array, k_CKH: jax.Array, v_CKH: jax.Array, place_C: jax.Array) -> jax.Array:
    """The pages of a layer with the keys and values of C tokens at their places."""
    count, tokens, heads, size = pages.shape
    pairs = jnp.stack([k_CKH, v_CKH], axis=2).reshape(len(place_C), heads, -1).astype(pages.dtype)
    pairs = jnp.pad(pairs, ((0, 0), (0, 0), (0, size - pairs.shape[-1])))
    return pages.reshape(count * tokens, heads, size).at[place_C].set(pairs).reshape(pages.shape)


def attend_ragged(
    q_CNH: jax.Array,
    pages: jax.Array,
    ragged: Ragged[jax.Array],
    spec: AttentionSpec,
    *,
    single: bool,
    kernel: Kernel | None,
    mesh: Any = None,
) -> jax.Array:
    """Attention of each query over the tokens of its sequence up to its own. Out [C, N, H]; padding is undefined.

    single: each sequence has one query. mesh: over its `tensor` axis the heads are divided.
    """
    if kernel is None:
        return gathered(q_CNH, pages, ragged, spec, single=single)
    local = functools.partial(_by_kernel, spec=spec, single=single)
    if mesh is None:
        return local(q_CNH, pages, ragged)
    heads = PartitionSpec(None, "tensor", None)
    in_specs = heads, PartitionSpec(None, None, "tensor", None), jax.tree.map(lambda _: PartitionSpec(), ragged)
    # Mosaic's kernels cannot be divided by the compiler, and do not say how their outputs vary over devices.
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=heads, check_vma=False)(q_CNH, pages, ragged)


def _by_kernel(
    q_CNH: jax.Array, pages: jax.Array, ragged: Ragged[jax.Array], spec: AttentionSpec, single: bool
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    assert spec.window is None or isinstance(spec.window, int)
    size, width = q_CNH.shape[-1], ragged.table_RW.shape[1]
    # Sizes of blocks are said here: the kernel's own table of them asks which TPU this process has.
    out = ragged_paged_attention(
        jnp.pad(q_CNH, ((0, 0), (0, 0), (0, pages.shape[-1] - size))),
        pages,
        ragged.length_R,
        ragged.table_RW,
        ragged.starts,
        ragged.used,
        sm_scale=float(spec.scale),
        sliding_window=spec.window,
        soft_cap=spec.softcap,
        num_kv_pages_per_block=max(1, min(width, KEYS // pages.shape[1])),
        num_queries_per_block=min(len(q_CNH), 8 if single else 32),
    )
    return out[..., :size]


def gathered(
    q_CNH: jax.Array, pages: jax.Array, ragged: Ragged[jax.Array], spec: AttentionSpec, *, single: bool
) -> jax.Array:
    """As `attend_ragged`, by XLA on any platform: a copy of a sequence's pages for each window of its queries.

    Work and memory are those of the longest sequence for each window. Padding is zeros.
    """
    count, sequences = len(q_CNH), len(ragged.length_R)
    window, abreast = (1, sequences) if single else (WINDOW, ABREAST)
    queries_R = jnp.diff(ragged.starts)
    windows_R = jnp.where(jnp.arange(sequences) < ragged.used[0], -(-queries_R // window), 0)
    ends_R = jnp.cumsum(windows_R)

    def some(number: jax.Array | int, out_CNH: jax.Array) -> jax.Array:
        wanted = number * abreast + jnp.arange(abreast)
        # Windows after the last are of the last sequence, and see nothing.
        row = jnp.minimum(jnp.searchsorted(ends_R, wanted, side="right"), sequences - 1)
        first = (wanted - (ends_R[row] - windows_R[row])) * window
        inside_IQ = first[:, None] + jnp.arange(window)
        live_IQ = (wanted < ends_R[-1])[:, None] & (inside_IQ < queries_R[row][:, None])
        place_IQ = jnp.where(live_IQ, ragged.starts[row][:, None] + inside_IQ, count)
        position_IQ = (ragged.length_R[row] - queries_R[row])[:, None] + inside_IQ
        found = pages[ragged.table_RW[row]]
        found = found.reshape(abreast, -1, *found.shape[3:])[..., : q_CNH.shape[-1]]
        layer = {"k": found[:, :, 0::2].transpose(0, 2, 3, 1), "v": found[:, :, 1::2].transpose(0, 2, 1, 3)}
        query, key = position_IQ[:, :, None], jnp.arange(found.shape[1])
        mask = within_window(live_IQ[:, :, None] & (key <= query), query, key, spec)
        out = attend(q_CNH[jnp.minimum(place_IQ, count - 1)], [(layer, mask)], spec)
        # Index C is out of range: such updates are dropped.
        return out_CNH.at[place_IQ.reshape(-1)].set(out.reshape(-1, *out.shape[2:]), mode="drop")

    nothing = jnp.zeros_like(q_CNH)
    if single:
        return some(0, nothing)
    return jax.lax.fori_loop(0, -(-ends_R[-1] // abreast), some, nothing)
