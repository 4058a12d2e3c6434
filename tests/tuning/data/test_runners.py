"""Runners: the examples for clusters are read as recipes, and what cannot work is refused by name before a run."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from flows.recipe.model import RecipeError
from flows.recipe.reading import load_recipe
from tuning.data import files, pipeline, runners
from tuning.data.blocks import Plan
from tuning.models.byte_tokenizer import byte_tokenizer
from tuning.models.tokenizer import save_tokenizer

EXAMPLES = sorted((Path(__file__).parents[3] / "infra" / "runners").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_recipe_whose_options_beam_takes(path):
    data = load_recipe(str(path)).data
    runner = data.beam_runner()
    found = PipelineOptions(runners.flags_of(runner)).get_all_options()
    assert found["runner"] == runner.name == data.runner.name
    for name, value in data.runner.options.items():
        assert found[name] == value, name


def test_there_is_an_example_of_each_cluster():
    names = {load_recipe(str(path)).data.runner.name for path in EXAMPLES}
    assert names == set(runners.CLUSTERS) - {"PortableRunner"}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["name=DaskRunner"], "runner DaskRunner is refused: outputs beside the main one stay in it"),
        (["name=DirectRunner"], "refused: it tries to download"),
        (["name=PrismRunner"], "refused: it is a binary that Beam downloads"),
        (["name=FlinkRuner"], "no runner 'FlinkRuner'; did you mean FlinkRunner"),
        (["name=SparkRunner"], "set runner.scratch to a URL"),
        (["name=SparkRunner", "scratch=/tmp/x"], "set runner.scratch to a URL"),
        (["options.flink_mastr=x"], "no pipeline option 'flink_mastr'; did you mean flink_master"),
        (["options.use_public_ips=false"], "leave it out in place of false, or set no_use_public_ips"),
        (["options.direct_num_workers=3"], "direct_num_workers follows from"),
    ],
)
def test_what_cannot_work_is_refused_when_the_recipe_is_read(sets, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("smoke", sets=[f"data.runner.{item}" for item in sets])


def test_workers_are_of_this_machine_alone():
    with pytest.raises(RecipeError, match="counts processes of this machine"):
        load_recipe(str(EXAMPLES[0]), sets=["data.workers=2"])


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
