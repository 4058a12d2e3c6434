"""Lengths of rows over several files are those of NumPy."""

import numpy as np
import pytest

from rlhf.tuning.data import statistics
from rlhf.tuning.data.flat import write_arrays
from rlhf.tuning.data.schema import SCHEMAS, table_of, write_parquet


@pytest.mark.parametrize("seed", range(3))
def test_lengths_of_several_files_are_told_as_numpy_tells_them(tmp_path, seed):
    rng = np.random.default_rng(seed)
    files = [rng.integers(0, rng.integers(1, 300), rng.integers(1, 80)) for _ in range(3)]
    for number, lengths in enumerate([*files, []]):
        rows = [{"prompt_ids": [1] * n, "completion_ids": [1], "prompt": "p", "completion": "c"} for n in lengths]
        write_parquet(tmp_path / "sft" / f"part-{number}.parquet", [table_of(rows, SCHEMAS["sft"])], SCHEMAS["sft"])
    write_arrays(tmp_path / "sft")
    lengths = np.concatenate(files)
    middle, high = np.percentile(lengths, [50, 95])
    told = {"mean": round(lengths.mean(), 3), "p50": middle, "p95": high, "max": lengths.max()}
    assert statistics.token_lengths(tmp_path, "sft")["prompt_ids"] == told
