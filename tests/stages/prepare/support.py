"""Reading and writing what preparation makes and takes."""

import hashlib
import json
import os
import time
from pathlib import Path

import pyarrow.parquet as pq

from rlhf.stages.store.artifacts import Store
from rlhf.stages.worker.protocol import Request
from rlhf.tuning.models.byte_tokenizer import byte_tokenizer
from rlhf.tuning.models.tokenizer import save_tokenizer

SYSTEM = "Reply with the answer only."


def rows(out, name):
    return [row for path in sorted((out / name).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def digests(out):
    files = (path for path in sorted(out.rglob("*")) if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def request(folder, **settings):
    """A request to prepare data over a base of a store in `folder`."""
    store = Store(str(folder / "store"))
    save_tokenizer(byte_tokenizer(), folder / "base" / "tokenizer")
    base = store.commit(folder / "base", {"stage": "base", "key": "b" * 64, "metrics": {}})
    inputs = {"base": ("base", base.key, base.digest)}
    return Request("prepare", "d" * 64, {}, settings, inputs, seed=7, store=store.url, run="test")


def nothing(record):
    """A rule that drops every record."""
    return False


SEEN = []


def gate(record):
    """A rule that waits at the 12th record of a process until the folder GATE has a file `open`."""
    folder = Path(os.environ["GATE"])
    SEEN.append(record)
    if len(SEEN) >= 12 and not (folder / "open").exists():
        (folder / f"waits-{os.getpid()}").touch()
        while not (folder / "open").exists():
            time.sleep(0.02)
    return True


def waiting(folder, count=1, seconds=60.0):
    """Waits until `count` processes wait at the gate; removes their signs, and returns their numbers."""
    until = time.monotonic() + seconds
    while len(found := list(folder.glob("waits-*"))) < count:
        assert time.monotonic() < until, f"{len(found)} processes wait at the gate"
        time.sleep(0.02)
    for path in found:
        path.unlink()
    return [int(path.name.removeprefix("waits-")) for path in found]
