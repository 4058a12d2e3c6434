"""Attention over packed rows, and the choice of its implementation. Axes as in `decoder`: B rows, L tokens, N and K
heads, H head size.

A row holds groups (1, 2, ...; 0 is padding); a group is a prompt (branch 0) and completions (branches 1, 2, ...) that
share it. A token sees earlier tokens of its own group that belong to the prompt or to its own branch; with a window,
only those less than `window` positions before it. Positions continue from the prompt in every branch, columns do not:

    group     1 1 1 1 1 1 1 2 2 2 0
    branch    0 0 0 1 1 2 2 0 1 1 0
    position  0 1 2 3 4 3 4 0 1 2 0
    column    0 1 2 3 4 5 6 7 8 9 10     column 5 sees columns 0, 1, 2 and 5
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlhf.tuning.compile_target import LANES, target_platform
from rlhf.tuning.models import fused, triton
from rlhf.tuning.models.blocked import Segments, blocked_attention, plain_attention, visible
from rlhf.tuning.models.decoder import Attention, AttentionSpec
from rlhf.tuning.models.sharding import CONTEXT, ROWS, TENSOR, dividing, mesh_in_use, parts

Implementation = Literal["plain", "blocked", "triton", "splash"]

PLAIN_TOKENS = 1024
"""The longest row whose logits [B, N, L, L], or mask [B, L, L], are held in memory at once."""
PLAIN_TOKENS_CPU = 255
"""The longest row for which blocks are no faster on a CPU; two blocks skip a quarter of the logits."""


def choose(
    q: jax.Array, softcap: float | None, platform: str | None = None, shared: bool = True, context: int = 1
) -> Implementation:
    """The implementation for queries of this shape and type on a platform (by default `target_platform`).

    shared: whether completions may share a prompt. context: devices that divide the queries of a row.
    """
    platform = platform or target_platform()
    length, head_dim = q.shape[1], q.shape[3]
    # Products of float32 would be of rounded numbers.
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    if platform == "gpu" and half and head_dim <= triton.LARGEST_HEAD and length % (triton.BLOCK * context) == 0:
        return "triton"
    # Prompts that are shared make splash's mask an array of L x L.
    if platform == "tpu" and length % (LANES * context) == 0 and (not shared or length <= PLAIN_TOKENS):
        return "splash"
    return "plain" if length <= (PLAIN_TOKENS_CPU if platform == "cpu" else PLAIN_TOKENS) else "blocked"


def packed_attention(
    group_BL: jax.Array, branch_BL: jax.Array | None, implementation: Implementation | None = None
) -> Attention:
    """Attention for training and scoring of whole rows, without a cache: by a CPU's kernel where `fused` suits,
    otherwise by the choice of `choose`.

    branch_BL: None where no two completions share a prompt; the positions of a group are then consecutive.
    On a mesh that the caller has set (`rlhf.tuning.mesh.under`) each device has the queries of its own rows and heads,
    and where `context` cuts rows, of its own columns; keys and values of the other columns it gathers.

    Tested: `fused`, `plain` and `blocked` on CPU against a formula and transformers; `splash` and `triton` against
    them on CPU in Pallas' interpreter, forward and backward, and by the compilers for TPU and H100. Compiled, not run:
    both on their devices.
    """
    length = group_BL.shape[1]
    branches_BL = jnp.zeros_like(group_BL) if branch_BL is None else branch_BL

    def mask_of(positions_BL: jax.Array, window: int | jax.Array | None) -> jax.Array:
        return visible(Segments(group_BL, branches_BL, positions_BL), window, 0, length, length)[:, None]

    # One mask for all layers, unless it differs by layer or is too large to keep; blocked attention computes its own.
    # Without a window positions do not matter, so any array takes their place.
    shared = mask_of(group_BL, None) if length <= PLAIN_TOKENS else None

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, cache: Any) -> tuple[jax.Array, Any]:
        context = parts(mesh_in_use(), _context(length))
        if implementation is None and fused.suits(q, k, v, spec.softcap):
            segments = Segments(group_BL, branches_BL, spec.positions_BL)
            return fused.fused_attention(q, k, v, segments, spec.window, spec.scale, spec.sinks_N), cache
        how = implementation or choose(q, spec.softcap, shared=branch_BL is not None, context=context)
        if how in ("blocked", "triton"):
            by_segments = blocked_attention if how == "blocked" else triton.triton_attention
            return _columns(by_segments, q, k, v, Segments(group_BL, branches_BL, spec.positions_BL), spec), cache
        if how == "splash" and branch_BL is None:
            return _segments(q, k, v, group_BL, spec), cache
        mask = shared
        if mask is None or spec.window is not None:
            mask = mask_of(spec.positions_BL, spec.window)
        attend: Callable[..., jax.Array] = plain_attention
        if how == "splash":
            from rlhf.tuning.models import splash

            attend = splash.masked_attention

        def masked(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, mask: jax.Array) -> jax.Array:
            return attend(q, k, v, mask[:, 0], spec.scale, spec.softcap, sinks)

        return _by_device(masked, q, k, v, spec.sinks_N, mask), cache

    return attention


def _context(length: int) -> tuple[str, ...]:
    """The axis that cuts rows of this length; none of them on a mesh without it, and where it does not divide them."""
    mesh = mesh_in_use()
    return () if mesh is None else dividing(mesh, length, CONTEXT)


def _by_device(
    attend: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, *of_rows: Any
) -> jax.Array:
    """`attend(q, k, v, sinks, *of_rows)` by each device of the mesh for its own rows, heads and, over `context`,
    columns of the queries, with the keys and values of whole rows.

    `of_rows` are trees of arrays [B, L], of masks [B, 1, L, L], whose queries are cut too, and of scalars that are the
    same everywhere. Rows, heads or columns that their axes do not divide are not cut.
    """
    mesh = mesh_in_use()
    if mesh is None:
        return attend(q, k, v, sinks, *of_rows)
    rows, columns = dividing(mesh, q.shape[0], ROWS) or None, _context(q.shape[1]) or None
    devices = parts(mesh, TENSOR)
    heads = TENSOR if dividing(mesh, q.shape[2], TENSOR) else None
    if heads:
        # Devices of one key-value head each get a copy of it; its query heads stay with it.
        each = q.shape[2] // k.shape[2]
        copies = next(c for c in range(1, each + 1) if each % c == 0 and k.shape[2] * c % devices == 0)
        k, v = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (k, v))

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> jax.Array:
        if columns:
            k, v = (jax.lax.all_gather(x, columns, axis=1, tiled=True) for x in (k, v))
        return attend(q, k, v, *rest)

    def cut(x: Any) -> PartitionSpec:
        axes = (rows, None, columns) if jnp.ndim(x) == 4 else (rows,)
        return PartitionSpec(*axes[: jnp.ndim(x)])

    by_head = PartitionSpec(rows, columns, heads, None)
    specs = (by_head,) * 3 + (PartitionSpec(heads), *jax.tree.map(cut, of_rows))
    # Mosaic's kernels say nothing of how their outputs vary over devices.
    return jax.shard_map(local, in_specs=specs, out_specs=by_head, check_vma=False)(q, k, v, sinks, *of_rows)


def _number(q: jax.Array, k: jax.Array) -> jax.Array | None:
    """Which of the equal parts of a row's columns the queries of this device are; None: they are all of them."""
    return None if q.shape[1] == k.shape[1] else jax.lax.axis_index(CONTEXT)


def _columns(
    attend: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, spec: AttentionSpec
) -> jax.Array:
    """`attend` of the queries of each device, which are all of a row's columns or those from `segments.first`."""

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any, segments: Segments, window: Any = spec.window
    ) -> jax.Array:
        if (number := _number(q, k)) is not None:
            segments = segments._replace(first=number * q.shape[1])
        return attend(q, k, v, segments, window, spec.scale, spec.softcap, sinks)

    windows = (spec.window,) if isinstance(spec.window, jax.Array) else ()
    return _by_device(local, q, k, v, spec.sinks_N, segments, *windows)


def _segments(q: jax.Array, k: jax.Array, v: jax.Array, group_BL: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Splash by segment ids."""
    from rlhf.tuning.models.splash import segment_attention

    def within(window: int | None) -> Callable[..., jax.Array]:
        def local(q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any, group_BL: jax.Array) -> jax.Array:
            return segment_attention(q, k, v, group_BL, window, spec.scale, spec.softcap, _number(q, k), sinks)

        return lambda *arrays: _by_device(local, *arrays)

    if not isinstance(spec.window, jax.Array):
        return within(spec.window)(q, k, v, spec.sinks_N, group_BL)
    # The mask is part of the program: one for layers with a window and one for those without, chosen layer by layer.
    slides = spec.window == spec.sliding_window
    return jax.lax.cond(slides, within(spec.sliding_window), within(None), q, k, v, spec.sinks_N, group_BL)
