"""A real S3 API that fails, stalls and breaks off: all is read and written whole, or there is one clear error."""

import gzip
import itertools
import json
import logging
import random
import re
import threading
import time
from pathlib import Path

import fsspec
import pytest

from rlhf.tuning.data import files, gather, merge, pipeline, remote
from rlhf.tuning.data.receipts import read_receipts
from rlhf.tuning.data.remote import SourceError
from tests.tuning.data.run import NONE, parts_of, plan_of

BODY = b'{"error": "the server is unwell"}'


class Faulty:
    """A WSGI application in front of another: by chance it refuses, breaks off or stalls; `off` lets all through."""

    def __init__(self, app):
        self.app, self.rng, self.lock = app, random.Random(0), threading.Lock()
        self.share, self.faults, self.watch = 0.0, {"refused": 0, "broken": 0, "stalled": 0}, lambda env: None

    def __call__(self, env, start):
        with self.lock:
            draw, kind = self.rng.random(), self.rng.choice(["refused", "broken", "stalled"])
            faulty = draw < self.share and (kind != "broken" or env["REQUEST_METHOD"] == "GET")
            self.faults[kind] += faulty
        if not faulty:
            self.watch(env)
            return self.app(env, start)
        if kind == "refused":
            start("500 Internal Server Error", [("Content-Length", str(len(BODY)))])
            return [BODY]
        if kind == "stalled":
            time.sleep(0.35)
            # A client that is slow itself has not given it up.
            self.watch(env)
            return self.app(env, start)
        body = b"".join(self.app(env, start))
        return [body[: len(body) // 2]]


@pytest.fixture(scope="module")
def bucket():
    """(application, URL of a bucket). Neither botocore nor s3fs tries again, so what is tested is this project's."""
    import boto3
    import s3fs
    from botocore.config import Config
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    app = Faulty(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys).create_bucket(Bucket="data")
    settings = {
        "endpoint_url": endpoint, "key": "test", "secret": "test",
        "config_kwargs": {"retries": {"max_attempts": 0}, "read_timeout": 0.25},
    }  # fmt: skip
    assert Config(**settings["config_kwargs"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", settings)
        patch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        patch.setattr(remote, "TRIES", 12)
        yield app, "s3://data"
    server.shutdown()


@pytest.fixture
def plan(tmp_path):
    return plan_of(tmp_path / "tokenizer", splits=("sft", "prompts", "heldout"), sft_fraction=0.5, shards=2)


RECORDS = [{"prompt": f"p{i}", "completion": "c" * (i % 50 + 1)} for i in range(400)]


def prepared(plan, source, folder, local):
    """Ids of the rows of each output, and the names of blocks, of a source whose pieces go to `folder`."""
    parts = parts_of(source, f"{folder}/spool", 6000)
    pipeline.run(parts, plan, f"{folder}/pieces", 6000)
    receipts = read_receipts(f"{folder}/pieces")
    todo, blocks = pipeline.finished(parts, receipts)
    assert not todo and sum(r["records"] for r in receipts.values()) == len(RECORDS)
    sums = {name: receipts[name]["sums"] for name in blocks}
    read = gather.gather(f"{folder}/pieces", sums, plan.shards, local)
    return {
        o: [merge.merged(read, o, s, NONE).drop_columns(["source", "record"]) for s in range(2)] for o in plan.splits
    }


@pytest.mark.slow
def test_faults_lose_nothing_and_show_nothing_unfinished(bucket, plan, tmp_path):
    app, url = bucket
    lines = "".join(json.dumps(r) + "\n" for r in RECORDS).encode()
    (tmp_path / "in").mkdir()
    half = lines.index(b"\n", len(lines) // 2) + 1
    for name, content in (("a.jsonl", lines[:half]), ("b.jsonl.gz", gzip.compress(lines[half:]))):
        (tmp_path / "in" / name).write_bytes(content)
        files.upload(str(tmp_path / "in" / name), f"{url}/in/{name}")
    expected = prepared(plan, str(tmp_path / "in"), str(tmp_path / "work"), tmp_path / "copy1")

    unfinished = []
    seen = set()

    def watch(env):
        # A receipt is the last thing of its block: the pieces that it names are there.
        name = env["PATH_INFO"]
        if env["REQUEST_METHOD"] == "PUT" and "/pieces/" in name:
            seen.add(name)
            if name.endswith(".json") and not any(re.sub(r"\.json$", ".ledger.arrow", name) == s for s in seen):
                unfinished.append(name)

    app.watch, app.share = watch, 0.2
    try:
        found = prepared(plan, f"{url}/in/*", f"{url}/work", tmp_path / "copy2")
    finally:
        app.share = 0.0
    assert found == expected and not unfinished and len(seen) > 20
    assert min(app.faults.values()) > 0, app.faults


def test_an_error_that_stays_is_named_after_some_tries(bucket, monkeypatch):
    app, url = bucket
    monkeypatch.setattr(remote, "TRIES", 3)
    with fsspec.open(f"{url}/stay.jsonl", "wb") as file:
        file.write(b'{"prompt": "a"}\n')
    app.share, app.rng = 1.0, random.Random(5)
    try:
        with pytest.raises(SourceError, match=r"s3://data/stay\.jsonl: no success in 3 tries; the last error"):
            list(files.parts_of(files.DataFile(f"{url}/stay.jsonl", "s"), 100, "unused"))
    finally:
        app.share = 0.0
    with pytest.raises(SourceError, match="no such file"):
        files.expand(f"{url}/missing.jsonl")


def test_a_stream_goes_on_where_it_broke(monkeypatch):
    content = bytes(itertools.islice(itertools.cycle(range(251)), 100_000))
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/broken/a.jsonl", content)
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.0)
    original, fails = type(fs)._open, itertools.count()

    def open_(self, *args, **kwargs):
        file = original(self, *args, **kwargs)
        read = file.read

        def some(size):
            if next(fails) % 2 == 0:
                raise TimeoutError("slow")
            return read(min(size, 777))

        return type("Slow", (), {"read": staticmethod(some), "seek": file.seek, "close": lambda self: None})()

    monkeypatch.setattr(type(fs), "_open", open_)
    with remote.open_input("memory://broken/a.jsonl") as file:
        assert file.read() == content
    assert next(fails) > 200


def test_a_folder_is_whole_at_its_place_where_a_file_fails_on_its_way(bucket, tmp_path):
    app, url = bucket
    failed = set()

    def watch(env):
        method = env["REQUEST_METHOD"]
        if env["PATH_INFO"].endswith("/b.json") and method in ("PUT", "GET") and method not in failed:
            failed.add(method)
            raise OSError("cut off")

    names = ["a.json", "b.json", "c.json"]
    (tmp_path / "tokenizer").mkdir()
    for name in names:
        (tmp_path / "tokenizer" / name).write_text(name)
    app.watch = watch
    try:
        files.upload(str(tmp_path / "tokenizer"), f"{url}/once/tokenizer")
        copy = Path(remote.local_copy(f"{url}/once/tokenizer"))
    finally:
        app.watch = lambda env: None
    assert failed == {"PUT", "GET"}
    assert sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*")) == names
    assert sorted(fsspec.filesystem("s3").find(f"{url}/once")) == [f"data/once/tokenizer/{name}" for name in names]
