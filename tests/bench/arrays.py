"""What the flat arrays of prepared data take, and save: bytes beside the Parquet shards, seconds of the processor.

`python -m tests.bench.arrays --records 20000` prepares records of about 1 KB by the real stage, and prints bytes of the
shards, of the token ids in them, of the arrays and of arrays of four bytes a token; seconds to write the arrays, to
map them, and to decode the shards as a training process does without them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rlhf.tuning.data.flat import FOLDER, write_flat
from rlhf.tuning.data.reading import map_examples, read_examples
from tests.bench import data

OUTPUT = "sft"


def bytes_of_ids(paths: list[Path]) -> int:
    """Of the columns of token ids, compressed."""
    groups = (pq.read_metadata(path) for path in paths)
    chunks = (m.row_group(g).column(c) for m in groups for g in range(m.num_row_groups) for c in range(m.num_columns))
    return sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0].endswith("_ids"))


def seconds(action: Callable[[], Any]) -> float:
    """Of the processor."""
    began = time.process_time()
    action()
    return round(time.process_time() - began, 4)


def measure(folder: Path, records: int) -> dict[str, Any]:
    """The figures of one preparation."""
    data.tokenizer_folder(folder)
    data.write_records(folder / "data.jsonl", records)
    out = folder / "out"
    out.mkdir()
    data.prepare(folder / "data.jsonl", folder, out, 1, folder / "work")
    paths, arrays = sorted((out / OUTPUT).glob("*.parquet")), out / OUTPUT / FOLDER
    tokens = map_examples(arrays).tokens
    sizes = {path.stem: path.stat().st_size for path in sorted(arrays.iterdir())}
    return {
        "records": records,
        "tokens": len(tokens),
        "parquet_bytes": sum(path.stat().st_size for path in paths),
        "parquet_bytes_of_ids": bytes_of_ids(paths),
        "array_bytes": sum(sizes.values()),
        "array_bytes_of_int32": sum(sizes.values()) + len(tokens) * (np.dtype(np.int32).itemsize - tokens.itemsize),
        "write_seconds": seconds(lambda: write_flat(paths, ["completion"], folder / "again")),
        "map_seconds": seconds(lambda: map_examples(arrays)),
        "decode_seconds": seconds(lambda: read_examples(paths, folder=folder)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.arrays", description=__doc__)
    parser.add_argument("--records", type=int, default=20_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), args.records)))


if __name__ == "__main__":
    main()
