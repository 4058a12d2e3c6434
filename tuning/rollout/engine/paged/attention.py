"""Keys and values in pages, and attention of a ragged batch of queries over them.

Axes: P pages, S tokens of a page, K key-value heads, H head size, C queries, N query heads, R sequences, W pages of the
longest sequence. A layer's pages are one array: keys and values of a head one after the other, as the kernels
of JAX read them. For TPUs, and without a kernel, it is "kv" [P, S, 2 K, H]
(`jax.experimental.pallas.ops.tpu.ragged_paged_attention`); for GPUs "by_head" [2 K, P, S, H]
(`_triton_kernel`, as `jax.experimental.pallas.ops.gpu.paged_attention`, which has no sliding window). That kernel takes
one query a sequence: prompts are read by `gathered`, as everything is on other platforms. The program for GPUs was
compiled for an H100, not run on one.

In int8 the scales are an array without H: "kv_scale" [P, S, 2 K] or "by_head_scale" [2 K, P, S].
"""

from __future__ import annotations

import functools
from typing import Any, Generic, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlhf.tuning.compile_target import LANES, target_platform
from rlhf.tuning.models.config import DecoderConfig
from rlhf.tuning.models.decoder import AttentionSpec
from rlhf.tuning.models.matmul import soft_cap
from rlhf.tuning.rollout.engine.arrays import Array
from rlhf.tuning.rollout.engine.cache import KV, attend, encode, within_window

Kernel = Literal["tpu", "gpu"]
"""The kernel for a platform; None: `gathered`."""
KEYS = 512
"""Keys that the kernel for TPUs reads at a time, at most."""
TRITON_KEYS = 128
"""Keys that the kernel for GPUs reads at a time, at most: two stages of 256 and more fill an H100's shared memory."""
PROGRAMS = 512
"""Programs of the kernel for GPUs, at least: where sequences and heads are fewer, each is cut into parts."""
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


def kernel_for(platform: str, config: DecoderConfig, kv: str, dtype: str, parts: int) -> Kernel | None:
    """The kernel that takes this model over `parts` devices, with keys and values and computation of these types."""
    # Pages have no place for the experts of their tokens, and the kernels none for sinks.
    if config.num_kv_heads % parts or config.num_experts or config.sinks:
        return None
    if platform == "gpu":
        # Blocks of Triton are powers of two, and products of float32 would be in TF32.
        types = dtype == "bfloat16" and kv in (dtype, "int8")
        return "gpu" if types and config.head_dim in (32, 64, 128, 256) else None
    # Its loads of every other row are of rows of 128 numbers.
    if platform != "tpu" or kv != dtype or kv not in ("bfloat16", "float32") or config.head_dim > LANES:
        return None
    # As the kernel's own check (`get_min_heads_per_blk`), of heads in pairs, packed into 32 bits.
    rows = 2 * (config.num_kv_heads // parts) // (2 if kv == "bfloat16" else 1)
    return "tpu" if rows in (1, 2, 4, 8) or rows % 8 == 0 else None


def stored_head(config: DecoderConfig, kernel: Kernel | None) -> int:
    """Numbers of a head in a page."""
    return LANES if kernel == "tpu" else config.head_dim


def make(config: DecoderConfig, pages: int, tokens: int, kv: KV, kernel: Kernel | None) -> list[dict[str, jax.Array]]:
    """Empty pages of `tokens` tokens, for each layer."""
    heads, size = 2 * config.num_kv_heads, stored_head(config, kernel)
    shape = (heads, pages, tokens, size) if kernel == "gpu" else (pages, tokens, heads, size)
    # The name says the layout.
    name = "by_head" if kernel == "gpu" else "kv"
    arrays = {name: (shape, kv)} | ({f"{name}_scale": (shape[:-1], "float32")} if kv == "int8" else {})
    return [{n: jnp.zeros(*array) for n, array in arrays.items()} for _ in range(config.num_layers)]


def page_tokens(layer: dict[str, jax.Array]) -> int:
    """S of a layer's pages."""
    (name, pages), *_ = layer.items()
    return pages.shape[2 if name == "by_head" else 1]


def page_bytes(config: DecoderConfig, tokens: int, kv: KV, kernel: Kernel | None) -> int:
    """Bytes of a page in all layers."""
    per_head = stored_head(config, kernel) * jnp.dtype(kv).itemsize + (4 if kv == "int8" else 0)
    return 2 * config.num_layers * config.num_kv_heads * per_head * tokens


def write(
    layer: dict[str, jax.Array],
    k_CKH: jax.Array,
    v_CKH: jax.Array,
    place_C: jax.Array,
    kernel: Kernel | None = None,
    mesh: Any = None,
) -> dict[str, jax.Array]:
    """The pages of a layer with the keys and values of C tokens at their places. mesh: as of `attend_ragged`."""
    (name, pages), *scales = layer.items()
    pairs = jnp.stack([k_CKH, v_CKH], axis=2)
    if not scales:
        return {name: _write(pages, pairs.astype(pages.dtype), place_C, kernel, mesh)}
    codes, scale = encode(pairs, 3)
    of_scales = _write(scales[0][1][..., None], scale[..., None], place_C, kernel, mesh)[..., 0]
    return {name: _write(pages, codes, place_C, kernel, mesh), scales[0][0]: of_scales}


def _write(pages: jax.Array, pairs: jax.Array, place_C: jax.Array, kernel: Kernel | None, mesh: Any) -> jax.Array:
    if kernel == "gpu":
        if mesh is None:
            return _write_by_head(pages, pairs, place_C)
        by_head = PartitionSpec("tensor")
        in_specs = by_head, PartitionSpec(None, "tensor"), PartitionSpec()
        return jax.shard_map(_write_by_head, mesh=mesh, in_specs=in_specs, out_specs=by_head)(pages, pairs, place_C)
    count, tokens, heads, size = pages.shape
    pairs = pairs.reshape(len(place_C), heads, -1)
    pairs = jnp.pad(pairs, ((0, 0), (0, 0), (0, size - pairs.shape[-1])))
    return pages.reshape(count * tokens, heads, size).at[place_C].set(pairs).reshape(pages.shape)


def _write_by_head(pages: jax.Array, pairs_CK2H: jax.Array, place_C: jax.Array) -> jax.Array:
    heads, count, tokens, size = pages.shape
    # One axis of rows: XLA for GPUs brings indexed axes to the front, which would copy the pages. Rows of padding are
    # dropped, each out of range at a place of its own: places that are not unique would be written in turn.
    padding_C = pages.size // size + jnp.arange(len(place_C), dtype=jnp.int32)
    place_C = jnp.where(place_C < tokens, padding_C, place_C)
    rows = jnp.arange(heads, dtype=jnp.int32)[:, None] * (count * tokens) + place_C
    new = pairs_CK2H.transpose(1, 2, 0, 3).reshape(-1, size)
    return pages.reshape(-1, size).at[rows.reshape(-1)].set(new, mode="drop", unique_indices=True).reshape(pages.shape)


def attend_ragged(
    q_CNH: jax.Array,
    pages: jax.Array,
    ragged: Ragged[jax.Array],
    spec: AttentionSpec,
    *,
    single: bool,
    kernel: Kernel | None,
    mesh: Any = None,
    scales: jax.Array | None = None,
) -> jax.Array:
    """Attention of each query over the tokens of its sequence up to its own. Out [C, N, H]; padding is undefined.

    single: each sequence has one query. mesh: over its `tensor` axis the heads are divided.
    """
    if kernel is None:
        return gathered(q_CNH, pages, ragged, spec, single=single, scales=scales)
    local = functools.partial(_by_triton if kernel == "gpu" else _by_kernel, spec=spec, single=single)
    if mesh is None:
        return local(q_CNH, pages, scales, ragged)
    heads = PartitionSpec(None, "tensor", None)
    of_pages = PartitionSpec("tensor") if kernel == "gpu" else PartitionSpec(None, None, "tensor", None)
    in_specs = heads, of_pages, of_pages, jax.tree.map(lambda _: PartitionSpec(), ragged)
    # Kernels cannot be divided by the compiler, and do not say how their outputs vary over devices.
    over = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=heads, check_vma=False)
    return over(q_CNH, pages, scales, ragged)


def _by_kernel(
    q_CNH: jax.Array, pages: jax.Array, _: None, ragged: Ragged[jax.Array], spec: AttentionSpec, single: bool
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


def _by_triton(
    q_CNH: jax.Array,
    pages: jax.Array,
    scales: jax.Array | None,
    ragged: Ragged[jax.Array],
    spec: AttentionSpec,
    single: bool,
) -> jax.Array:
    if single:
        return _last_queries(q_CNH, pages, scales, ragged.length_R, ragged.table_RW, spec)
    # Sequences of one query by the kernel, the others by `gathered`.
    first_R, queries_R = ragged.starts[:-1], jnp.diff(ragged.starts)
    length_R = jnp.where(queries_R == 1, ragged.length_R, 0)
    alone = _last_queries(q_CNH[first_R], pages, scales, length_R, ragged.table_RW, spec)
    out = gathered(q_CNH, pages, ragged, spec, single=False, scales=scales, least=2, by_head=True)
    # Index C is out of range: such updates are dropped.
    return out.at[jnp.where(queries_R == 1, first_R, len(q_CNH))].set(alone, mode="drop")


def _last_queries(
    q_RNH: jax.Array,
    pages: jax.Array,
    scales: jax.Array | None,
    length_R: jax.Array,
    table_RW: jax.Array,
    spec: AttentionSpec,
) -> jax.Array:
    """Attention of one query a sequence [R, N, H] over its `length_R` tokens; zeros where there is none.

    `paged_attention` wants keys and values in two arrays, so two writes a layer, and rounds the parts of a sequence to
    bfloat16 before it adds them up.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, heads, size = q_RNH.shape
    pairs, count, tokens, _ = pages.shape
    k, group = pairs // 2, heads // (pairs // 2)
    # A block of a product has 16 rows at least.
    block = max(16, pl.next_power_of_2(group))
    q = (q_RNH * spec.scale).astype(q_RNH.dtype).reshape(rows, k, group, size)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, block - group), (0, 0)))
    together = max(1, min(TRITON_KEYS // tokens, pl.next_power_of_2(table_RW.shape[1])))
    blocks = pl.cdiv(table_RW.shape[1], together)
    parts = min(pl.next_power_of_2(blocks), pl.next_power_of_2(pl.cdiv(PROGRAMS, rows * k)), 16)
    width = pl.cdiv(blocks, parts) * together
    table_RW = jnp.pad(table_RW, ((0, 0), (0, parts * width - table_RW.shape[1])))
    first_R = jnp.zeros_like(length_R) if spec.window is None else jnp.maximum(length_R - spec.window, 0)

    def of_pages(second: int, *head: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, count, tokens, *head), lambda r, k, part: (2 * k + second, 0, 0, *[0] * len(head)))

    def result(*shape: int) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
        where = pl.BlockSpec((None, None, None, *shape), lambda r, k, part: (part, r, k, *[0] * len(shape)))
        return where, jax.ShapeDtypeStruct((parts, rows, k, *shape), jnp.float32)

    out_specs, out_shape = zip(result(block, size), result(block), result(block), strict=True)
    out, norm, most = pl.pallas_call(
        functools.partial(_triton_kernel, together=together, softcap=spec.softcap),
        grid=(rows, k, parts),
        in_specs=[
            pl.BlockSpec((None, None, block, size), lambda r, k, part: (r, k, 0, 0)),
            of_pages(0, size),
            of_pages(1, size),
            *([None, None] if scales is None else [of_pages(0), of_pages(1)]),
            pl.BlockSpec((None, width), lambda r, k, part: (r, part)),
            pl.BlockSpec((None, 2), lambda r, k, part: (r, 0)),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=target_platform() == "cpu",
        name="paged_attention",
    )(q, pages, pages, scales, scales, table_RW, jnp.stack([first_R, length_R], axis=1))
    weight = jnp.exp(most - most.max(axis=0))
    total = jnp.maximum((norm * weight).sum(axis=0), jnp.finfo(jnp.float32).tiny)
    out = (out * weight[..., None]).sum(axis=0) / total[..., None]
    return out[:, :, :group].reshape(q_RNH.shape).astype(q_RNH.dtype)


def _triton_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    k_scale_ref: Any,
    v_scale_ref: Any,
    table_ref: Any,
    span_ref: Any,
    out_ref: Any,
    norm_ref: Any,
    most_ref: Any,
    *,
    together: int,
    softcap: float | None,
) -> None:
    """One part of a sequence for the queries of a key head: the values by their weights, the sum of weights, and the
    largest logit. It reads `together` pages at a time, those with keys from `span_ref[0]` to `span_ref[1]` alone."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    q, (count, size), keys = q_ref[...], q_ref.shape, together * k_ref.shape[-2]
    blocks = table_ref.shape[0] // together
    # Of this part: its first position is 0.
    first, end = (span_ref[i] - pl.program_id(2) * blocks * keys for i in range(2))

    def body(number: jax.Array, carried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, norm, most = carried
        page = table_ref[pl.ds(number * together, together)]
        k, v = (ref[page].reshape(keys, size).astype(q.dtype) for ref in (k_ref, v_ref))
        logits = triton.dot(q, k.T)
        if k_scale_ref is not None:
            logits = logits * k_scale_ref[page].reshape(1, keys)
        logits = soft_cap(logits, softcap)
        place = number * keys + jnp.arange(keys)
        seen = jnp.broadcast_to((place >= first) & (place < end), logits.shape)
        logits = jnp.where(seen, logits, -1e30)
        now = jnp.maximum(most, logits.max(axis=-1))
        weights, kept = jnp.exp(logits - now[:, None]), jnp.exp(most - now)
        norm = kept * norm + weights.sum(axis=-1)
        if v_scale_ref is not None:
            weights = weights * v_scale_ref[page].reshape(1, keys)
        return kept[:, None] * out + triton.dot(weights.astype(v.dtype), v), norm, now

    nothing = tuple(jnp.full(shape, x, jnp.float32) for shape, x in (((count, size), 0), (count, 0), (count, -1e30)))
    last = jnp.minimum(blocks, pl.cdiv(jnp.maximum(end, 0), keys))
    out_ref[...], norm_ref[...], most_ref[...] = jax.lax.fori_loop(jnp.maximum(first, 0) // keys, last, body, nothing)


def gathered(
    q_CNH: jax.Array,
    pages: jax.Array,
    ragged: Ragged[jax.Array],
    spec: AttentionSpec,
    *,
    single: bool,
    scales: jax.Array | None = None,
    least: int = 1,
    by_head: bool = False,
) -> jax.Array:
    """As `attend_ragged`, by XLA on any platform: a copy of a sequence's pages for each window of its queries.

    Work and memory are those of the longest sequence for each window. Padding is zeros, and so are the queries of
    sequences that have fewer than `least`. by_head: the layout of the pages.
    """
    count, sequences = len(q_CNH), len(ragged.length_R)
    window, abreast = (1, sequences) if single else (WINDOW, ABREAST)
    queries_R = jnp.diff(ragged.starts)
    counts_R = (jnp.arange(sequences) < ragged.used[0]) & (queries_R >= least)
    windows_R = jnp.where(counts_R, -(-queries_R // window), 0)
    ends_R = jnp.cumsum(windows_R)

    def some(number: jax.Array | int, out_CNH: jax.Array) -> jax.Array:
        wanted = number * abreast + jnp.arange(abreast)
        # Windows after the last are of the last sequence, and see nothing.
        # Compared with all: a binary search is a loop, whose every turn a GPU's host waits for.
        row = jnp.minimum(jnp.searchsorted(ends_R, wanted, side="right", method="compare_all"), sequences - 1)
        first = (wanted - (ends_R[row] - windows_R[row])) * window
        inside_IQ = first[:, None] + jnp.arange(window)
        live_IQ = (wanted < ends_R[-1])[:, None] & (inside_IQ < queries_R[row][:, None])
        place_IQ = jnp.where(live_IQ, ragged.starts[row][:, None] + inside_IQ, count)
        position_IQ = (ragged.length_R[row] - queries_R[row])[:, None] + inside_IQ
        table = ragged.table_RW[row]
        found = jnp.moveaxis(pages[:, table], 0, 3) if by_head else pages[table]
        found = found.reshape(abreast, -1, *found.shape[3:])[..., : q_CNH.shape[-1]]
        layer = {"k": found[:, :, 0::2].transpose(0, 2, 3, 1), "v": found[:, :, 1::2].transpose(0, 2, 1, 3)}
        if scales is not None:
            scale = jnp.moveaxis(scales[:, table], 0, 3) if by_head else scales[table]
            scale = scale.reshape(abreast, -1, scale.shape[-1]).transpose(0, 2, 1)
            layer |= {"k_scale": scale[:, 0::2], "v_scale": scale[:, 1::2]}
        query, key = position_IQ[:, :, None], jnp.arange(found.shape[1])
        mask = within_window(live_IQ[:, :, None] & (key <= query), query, key, spec)
        out = attend(q_CNH[jnp.minimum(place_IQ, count - 1)], [(layer, mask)], spec)
        # Index C is out of range: such updates are dropped.
        return out_CNH.at[place_IQ.reshape(-1)].set(out.reshape(-1, *out.shape[2:]), mode="drop")

    nothing = jnp.zeros_like(q_CNH)
    if single:
        return some(0, nothing)
    return jax.lax.fori_loop(0, -(-ends_R[-1] // abreast), some, nothing)
