"""A cluster's runner and this machine's processes prepare the same bytes."""

from stages.prepare.stage import Config
from tests.stages.prepare.support import digests, write
from tests.tuning.data.run import job_server


def test_a_portable_runner_gives_the_bytes_of_this_machine(run, pairs, tmp_path, s3):
    """Its workers leave their pieces in a bucket, from where they are merged."""
    source = write(tmp_path / "data.jsonl", [*pairs, *pairs[:5], {"prompt": 3}])
    settings = {"source": source, "shards": 3, "near_duplicates": 0.9, "chunk_megabytes": 0.002}
    metrics, out = run(Config(**settings))
    assert metrics["records"] == {"read": 66, "kept": 60, "duplicates": 5, "dropped": 0, "dead": 1}
    with job_server(tmp_path) as options:
        runner = {"name": "PortableRunner", "options": options, "scratch": f"{s3}/portable"}
        again, other = run(Config(**settings, runner=runner))
    assert digests(other) == digests(out) and again == metrics
