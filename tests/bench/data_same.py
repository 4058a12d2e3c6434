"""The same bytes of data preparation with 1 and 8 processes, and through a portable runner.

`python -m tests.bench.data_same --records 50000` prepares the same records in each way, by the real stage, and prints
the digest of all outputs. The portable runner is Beam's job service with external workers, which write pieces and
final shards to a bucket of an S3 server of this machine. The command fails where digests differ.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench import data
from tests.bench.data_scale import WORDS, digest
from tests.tuning.data.run import job_server, worker_pool

SEVERAL = {"shards": 5, "chunk_megabytes": 0.25}
"""Shards and blocks."""


def prepared(folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One way: the digest of what it makes."""
    out = folder / name
    out.mkdir()
    began = time.monotonic()
    rows = data.prepare(folder / "data.jsonl", folder, out, work=folder / f"{name}-work", **SEVERAL, **settings)
    return {"way": name, "rows": rows, "digest": digest(out), "seconds": round(time.monotonic() - began, 1)}


def portable(folder: Path) -> dict[str, Any]:
    """Through the portable runner."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    secrets = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
    os.environ |= secrets | {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    boto3.client("s3").create_bucket(Bucket="bucket")
    try:
        with job_server(folder) as (jobs, _), worker_pool(folder) as (workers, _):
            runner = {"name": "PortableRunner", "options": jobs | workers, "scratch": "s3://bucket/scratch"}
            return prepared(folder, "portable", {"workers": 1, "runner": runner})
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.data_same", description=__doc__)
    parser.add_argument("--records", type=int, default=50_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = data.tokenizer_folder(Path(temporary))
        data.write_records(folder / "data.jsonl", args.records, *WORDS)
        found = []
        for way in (1, 8, None):
            one = prepared(folder, f"workers-{way}", {"workers": way}) if way else portable(folder)
            found.append(one)
            print(json.dumps(one), flush=True)
    if len({one["digest"] for one in found}) > 1:
        raise SystemExit("digests differ")


if __name__ == "__main__":
    main()
