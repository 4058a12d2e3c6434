"""A runner that takes pipelines in the portable form gives the bytes of this process."""

import json
import subprocess
import sys
import time

import pytest

from tuning.data import files, pipeline, runners
from tuning.data.blocks import Plan
from tuning.models.byte_tokenizer import byte_tokenizer
from tuning.models.tokenizer import save_tokenizer


@pytest.fixture
def job_server(tmp_path):
    """The endpoint of Beam's own job server, which takes pipelines in the portable form that Flink and Spark take."""
    port_file = tmp_path / "port"
    command = [*(sys.executable, "-m", "apache_beam.runners.portability.local_job_service_main"), "--port", "0"]
    command += ["--port_file", str(port_file), "--staging_dir", str(tmp_path / "staging")]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            for _ in range(600):
                if port_file.exists() or server.poll() is not None:
                    break
                time.sleep(0.1)
            yield f"localhost:{port_file.read_text()}"
        finally:
            server.kill()


def test_the_portable_form_gives_the_same_pieces(tmp_path, job_server):
    save_tokenizer(byte_tokenizer(), tmp_path / "tokenizer")
    plan = Plan(tokenizer=str(tmp_path / "tokenizer"), splits=("sft", "heldout"), heldout_fraction=0.2, shards=2)
    path = tmp_path / "data.jsonl"
    records = [{"prompt": f"p{i}", "completion": "c" * (i % 9 + 1)} for i in range(200)] + [{"prompt": 5}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    parts = list(files.parts_of(files.DataFile(str(path), path.name), 2000, str(tmp_path / "spool")))
    options = {"job_endpoint": job_server, "environment_type": "LOOPBACK"}
    pipeline.run(parts, plan, str(tmp_path / "local"), 2000)
    counters = pipeline.run(
        parts, plan, str(tmp_path / "portable"), 2000, runners.Runner("PortableRunner", options=options)
    )
    names = sorted(path.name for path in (tmp_path / "local").iterdir())
    assert len(parts) > 3 and names == sorted(path.name for path in (tmp_path / "portable").iterdir())
    for name in names:
        assert (tmp_path / "portable" / name).read_bytes() == (tmp_path / "local" / name).read_bytes(), name
    assert counters["Validate/in"] == 201 and counters["Validate/dead"] == 1
