"""Products of rows, sorted by expert, on GPU, and their gradient: Pallas kernels that Triton compiles.

XLA for GPU multiplies every row with every expert (`ragged_dot` in JAX 0.10.2): sixteen times the work with 128 experts
and 8 a token, and an array of all rows for each expert. Here a program reads at most `ROWS` rows of one expert, and of
its kernel the columns that it computes. Each sum is made by one program in a fixed order.

Compared with a formula in Pallas' interpreter and compiled for H100, not run on a GPU. Rejected: `ragged_dot_mgpu` of
JAX, which has no A100, and no products by the transposed kernel.

Axes as in `experts`: R rows, E experts, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rlhf.tuning.compile_target import target_platform

LEAST, ROWS, DEPTH, WIDTH = 16, 64, 64, 128
"""Sizes of blocks: the least that Triton multiplies, and at most rows, inputs and outputs of a product."""


def suits(*arrays: jax.Array) -> bool:
    """Whether the kernels take arrays of these types and sizes: products of float32 would be of rounded numbers."""
    half = {a.dtype for a in arrays} <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}
    return half and all(size % LEAST == 0 for a in arrays for size in a.shape[1:])


def of_rows(x_RI: jax.Array, kernels: jax.Array, sizes_E: jax.Array, transposed: bool) -> jax.Array:
    """Rows times the kernel of their expert, [R, O] in the type of x. kernels: [E, I, O]; transposed: [E, O, I]."""
    rows, size_in, size_out = len(x_RI), x_RI.shape[1], kernels.shape[1 if transposed else 2]
    block = _rows(rows, len(sizes_E))
    # Those of an expert, whose last may be short; blocks beyond the last expert's have no rows.
    ends, counts = jnp.cumsum(sizes_E), _blocks(sizes_E.astype(jnp.int32), block)
    last, number = jnp.cumsum(counts), jnp.arange(rows // block + min(rows, len(sizes_E)))
    expert = jnp.minimum(jnp.sum(last <= number[:, None], axis=1), len(sizes_E) - 1)
    first = (ends - sizes_E)[expert] + (number - (last - counts)[expert]) * block
    spans = jnp.stack([expert, first, jnp.minimum(first + block, ends[expert])]).astype(jnp.int32)
    sizes = {"block": block, "depth": _part(size_in, DEPTH), "width": _part(size_out, WIDTH)}
    grid = (len(number), size_out // sizes["width"])
    out = jax.ShapeDtypeStruct((rows, size_out), x_RI.dtype)
    return _call(functools.partial(_rows_kernel, transposed=transposed, **sizes), grid, out, spans, x_RI, kernels)


def of_kernels(x_RI: jax.Array, g_RO: jax.Array, sizes_E: jax.Array, kind: Any) -> jax.Array:
    """The sum of x^T g over the rows of each expert, [E, I, O] in a type."""
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes_E).astype(jnp.int32)])
    wide, width = (_part(a.shape[1], WIDTH) for a in (x_RI, g_RO))
    grid = (x_RI.shape[1] // wide, g_RO.shape[1] // width, len(sizes_E))
    out = jax.ShapeDtypeStruct((len(sizes_E), x_RI.shape[1], g_RO.shape[1]), kind)
    sizes = {"block": _rows(len(x_RI), len(sizes_E)), "wide": wide, "width": width}
    return _call(functools.partial(_kernels_kernel, **sizes), grid, out, ends, x_RI, g_RO)


def _rows(rows: int, experts: int) -> int:
    return min(ROWS, max(LEAST, pl.next_power_of_2(pl.cdiv(rows, experts))))


def _blocks(rows: jax.Array, block: int) -> jax.Array:
    """Blocks that so many rows fill."""
    return jax.lax.div(rows + (block - 1), np.int32(block))


def _part(size: int, most: int) -> int:
    """The largest power of two that divides a size, up to another power of two."""
    return min(most, size & -size)


def _call(kernel: Any, grid: tuple[int, ...], out: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.Array:
    return pl.pallas_call(  # type: ignore[no-any-return]
        kernel,
        grid=grid,
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=target_platform() != "gpu",
        name=kernel.func.__name__.strip("_"),
    )(*arrays)


def _live(ref: Any, first: jax.Array, end: jax.Array, block: int, columns: Any) -> tuple[Any, jax.Array]:
    """A block of rows, and the mask of those before the end."""
    live = (first + jnp.arange(block) < end)[:, None]
    return ref.at[pl.ds(first, block), columns], jnp.broadcast_to(live, (block, columns.size))


def _loaded(*block: Any) -> jax.Array:
    at, live = _live(*block)
    return plgpu.load(at, mask=live, other=0)


def _rows_kernel(
    spans: Any, x: Any, kernels: Any, out: Any, *, transposed: bool, block: int, depth: int, width: int
) -> None:
    """A block of rows of one expert times a block of its kernel's columns."""
    expert, first, end = (spans[i, pl.program_id(0)] for i in range(3))
    columns = pl.ds(pl.program_id(1) * width, width)

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        inner = pl.ds(number * depth, depth)
        kernel = kernels[(expert, columns, inner) if transposed else (expert, inner, columns)]
        return total + plgpu.dot(_loaded(x, first, end, block, inner), kernel, trans_b=transposed)

    @pl.when(first < end)
    def _() -> None:
        kind = jnp.promote_types(x.dtype, jnp.float32)
        total = jax.lax.fori_loop(0, x.shape[1] // depth, add, jnp.zeros((block, width), kind))
        at, live = _live(out, first, end, block, columns)
        plgpu.store(at, total.astype(out.dtype), mask=live)


def _kernels_kernel(ends: Any, x: Any, g: Any, out: Any, *, block: int, wide: int, width: int) -> None:
    """A block of the gradient of one expert's kernel, over all of its rows."""
    inputs, outputs, expert = (pl.program_id(i) for i in range(3))
    here = pl.ds(inputs * wide, wide), pl.ds(outputs * width, width)
    start, end = ends[expert], ends[expert + 1]

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        left, right = (_loaded(a, start + number * block, end, block, at) for a, at in zip((x, g), here, strict=True))
        return total + plgpu.dot(left, right, trans_a=True)

    kind = jnp.promote_types(x.dtype, jnp.float32)
    total = jax.lax.fori_loop(0, _blocks(end - start, block), add, jnp.zeros((wide, width), kind))
    out[(expert, *here)] = total.astype(out.dtype)
