"""Lengths of rows over several files are those of NumPy."""

import numpy as np
import pyarrow as pa
import pytest

from rlhf.tuning.data import statistics
from rlhf.tuning.data.flat import write_arrays
from rlhf.tuning.data.schema import SCHEMAS, write_parquet


def written(folder, *files):
    """Rows of `sft` whose prompts have these lengths; completions have one token."""
    for number, lengths in enumerate(files):
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        values = {name: pa.nulls(len(lengths), kind) for name, kind in SCHEMAS["sft"].items()}
        values["prompt_ids"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ones(offsets[-1], np.int32)))
        table = pa.table(values | {"completion_ids": pa.array([[1]] * len(lengths), values["completion_ids"].type)})
        table = table.cast(pa.schema(list(SCHEMAS["sft"].items())))
        write_parquet(folder / "sft" / f"part-{number:05d}-of-{len(files):05d}.parquet", [table], SCHEMAS["sft"])
    write_arrays(folder / "sft")


@pytest.mark.parametrize("seed", range(3))
def test_lengths_of_several_files_are_told_as_numpy_tells_them(tmp_path, seed):
    rng = np.random.default_rng(seed)
    files = [rng.integers(0, rng.integers(1, 300), rng.integers(1, 80)) for _ in range(3)]
    written(tmp_path, *files, np.zeros(0, np.int64))
    lengths = np.concatenate(files)
    middle, high = np.percentile(lengths, [50, 95])
    told = {"mean": round(lengths.mean(), 3), "p50": middle, "p95": high, "max": lengths.max()}
    assert statistics.token_lengths(tmp_path, "sft")["prompt_ids"] == told
