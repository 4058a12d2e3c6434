"""The outputs of a preparation, written from the pieces of its blocks by this machine or by a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.stages.contract.definition import Context
from rlhf.stages.prepare.settings import Config

if TYPE_CHECKING:
    from rlhf.tuning.data.merge import Fates, Pieces

FETCHES = 16
"""Shards of a cluster that are copied at a time."""


def write_outputs(ctx: Context, pieces: Pieces, fates: Fates) -> dict[str, int]:
    """Writes the final files, and the tokens of those with completions; returns the rows written by output.

    Raises FileNotFoundError if a cluster has not written a shard, SourceError if one cannot be read.
    """
    from rlhf.tuning.data.flat import write_arrays
    from rlhf.tuning.data.gather import outputs_of

    config: Config = ctx.config
    present = outputs_of(pieces.blocks)
    more = [name for name in ("heldout_sft", "heldout_preference", "heldout_labelled") if name in present]
    outputs = [*dict.fromkeys(config.splits), *more]
    # None: by id.
    seed = config.seed if config.order == "shuffled" else None
    jobs = [(output, shard) for output in outputs for shard in range(pieces.shards)]
    if config.on_cluster:
        write, threads = _fetched(ctx, pieces, fates, jobs, seed), FETCHES
    else:
        write, threads = _merged(pieces, fates, seed), config.workers
    paths = [ctx.out / output / f"part-{shard:05d}-of-{pieces.shards:05d}.parquet" for output, shard in jobs]
    # Every output has an entry, also one without rows.
    counts = Counter[str](dict.fromkeys(outputs, 0))
    with ThreadPoolExecutor(threads) as pool:
        for (output, _), count in zip(jobs, pool.map(write, jobs, paths), strict=True):
            counts[output] += count
    with ThreadPoolExecutor(config.workers) as pool:
        # All, so that errors are raised.
        list(pool.map(lambda output: write_arrays(ctx.out / output), outputs))
    return dict(counts)


Write = Callable[[tuple[str, int], Path], int]
"""Writes a shard of an output to a path; returns its rows."""


def _merged(pieces: Pieces, fates: Fates, seed: int | None) -> Write:
    """This machine sorts each shard."""
    from rlhf.tuning.data.merge import write_output

    return lambda job, path: write_output(pieces, *job, path, fates.gone, seed)


def _fetched(ctx: Context, pieces: Pieces, fates: Fates, jobs: Sequence[tuple[str, int]], seed: int | None) -> Write:
    """The cluster writes the shards, and this machine copies them."""
    from rlhf.tuning.data import merge_pipeline

    merge = merge_pipeline.Merge(pieces.source, f"{pieces.source}-merged", seed)
    runner = ctx.config.beam_runner()

    def report(shards: int) -> None:
        ctx.progress(min(shards, len(jobs)), len(jobs), "shard")

    merge_pipeline.run(merge, pieces.blocks, jobs, runner, fates.gone, report)
    return lambda job, path: merge_pipeline.fetch(merge, job, path)
