"""Reading and writing what preparation makes and takes."""

import hashlib
import json

import pyarrow.parquet as pq

SYSTEM = "Reply with the answer only."


def rows(out, name):
    return [row for path in sorted((out / name).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def digests(out):
    files = (path for path in sorted(out.rglob("*")) if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)
