"""The outputs of a preparation, written from the pieces of its blocks."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from stages.prepare.settings import Config

if TYPE_CHECKING:
    from tuning.data.merge import Fates, Pieces


def write_outputs(out: Path, pieces: Pieces, config: Config, fates: Fates) -> dict[str, int]:
    """Merge the pieces into the final files, a thread for each of the workers; returns the rows written by output."""
    from tuning.data import merge
    from tuning.data.flat import write_arrays

    more = [name for name in ("heldout_sft", "heldout_preference", "heldout_labelled") if name in pieces.present]
    outputs = [*dict.fromkeys(config.splits), *more]
    # None: by id.
    seed = config.seed if config.order == "shuffled" else None

    def write(job: tuple[str, int]) -> int:
        output, shard = job
        path = out / output / f"part-{shard:05d}-of-{pieces.shards:05d}.parquet"
        return merge.write_output(pieces, output, shard, path, fates.gone, seed)

    jobs = [(output, shard) for output in outputs for shard in range(pieces.shards)]
    with ThreadPoolExecutor(config.workers) as pool:
        # Every output has an entry, also one without rows.
        counts = Counter[str](dict.fromkeys(outputs, 0))
        for (output, _), count in zip(jobs, pool.map(write, jobs), strict=True):
            counts[output] += count
        # All, so that errors are raised.
        list(pool.map(lambda output: write_arrays(out / output), outputs))
    return dict(counts)
