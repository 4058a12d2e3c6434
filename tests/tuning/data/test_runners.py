"""Jobs on workers: a service that is away and workers of other code are named, and a job ends with its run."""

import json
import pickle
import signal
import threading

import grpc
import pytest
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc

from rlhf.tuning.data import pipeline, runners, versions
from rlhf.tuning.data.blocks import Plan
from rlhf.tuning.data.receipts import read_receipts, write_receipt
from rlhf.tuning.data.runners import Runner
from tests.support import copy_project
from tests.tuning.data import run as by_hand
from tests.tuning.data.run import job_server, parts_of, plan_of


@pytest.mark.parametrize("given, seconds", [({}, 30 * 86_400), ({"job_server_timeout": 90}, 90)])
def test_a_job_is_followed_for_longer_than_the_minute_that_beam_follows_it(given, seconds):
    flags = runners.flags_of(runners.Runner("PortableRunner", options=given))
    assert PipelineOptions(flags).view_as(PortableOptions).job_server_timeout == seconds


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "nowhere"])
def test_a_job_service_that_does_not_answer_is_named(tmp_path, monkeypatch, endpoint):
    monkeypatch.setattr(runners, "REACH_SECONDS", 0.5)
    runner = runners.Runner("PortableRunner", options={"job_endpoint": endpoint})
    with pytest.raises(runners.RunnerError, match=f"job_endpoint: no job service answers at {endpoint} within 0.5 s"):
        pipeline.run([], Plan(tokenizer="", splits=()), str(tmp_path), runner=runner)


BEGUN, GO_ON = threading.Event(), threading.Event()


def waits(record):
    BEGUN.set()
    return GO_ON.wait(60)


@pytest.mark.slow
def test_a_job_ends_with_the_process_that_follows_it(tmp_path):
    """Else it would write pieces beside those of the next run."""
    plan = plan_of(tmp_path / "tokenizer", splits=("sft",), rules=(f"{__name__}:waits",))
    (tmp_path / "data.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    parts = parts_of(tmp_path / "data.jsonl", tmp_path)

    def interrupt():
        if BEGUN.wait(60):
            signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with job_server(tmp_path) as (options, _), grpc.insecure_channel(options["job_endpoint"]) as channel:
        try:
            with pytest.raises(KeyboardInterrupt):
                pipeline.run(parts, plan, str(tmp_path / "pieces"), runner=runners.Runner("PortableRunner", 1, options))
            jobs = beam_job_api_pb2_grpc.JobServiceStub(channel)
            [job] = jobs.GetJobs(beam_job_api_pb2.GetJobsRequest()).job_info
            assert BEGUN.is_set() and job.state == beam_job_api_pb2.JobState.CANCELLED
        finally:
            GO_ON.set()
            thread.join()


@pytest.fixture
def plan(tmp_path):
    return by_hand.plan_of(tmp_path / "tokenizer", splits=("sft",))


def other(name, value):
    """The versions of another host, as they are pickled there."""
    return pickle.dumps(versions.Versions(versions.here() | {name: value}))


@pytest.mark.parametrize("name", ["numpy", "apache-beam", "Python", "rlhf.tuning.data.steps", "rlhf.tuning.data.added"])
def test_what_differs_is_named_with_both_versions(name):
    told = rf"^{name} is {versions.here().get(name, 'absent')} in this worker and 0.1 in the run: build the image"
    with pytest.raises(versions.OtherVersion, match=told):
        pickle.loads(other(name, "0.1"))
    assert pickle.loads(pickle.dumps(versions.here())) == versions.here()


def test_workers_compare_before_they_build_a_step():
    there = versions.Versions(versions.here() | {"numpy": "0.1"})
    with pytest.raises(versions.OtherVersion, match="numpy"):
        pickle.loads(pickle.dumps(pipeline.Apply("Validate", Plan(tokenizer="", splits=(), versions=there))))


@pytest.mark.slow
def test_an_image_of_another_commit_makes_no_rows(plan, tmp_path):
    old = tmp_path / "old"
    packages = copy_project(old)
    drafts = old / "tuning" / "data" / "drafts.py"
    drafts.write_text(drafts.read_text() + "\n# Another commit.\n")
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "p", "completion": "c"}) + "\n")
    parts = by_hand.parts_of(tmp_path / "data.jsonl", tmp_path)
    with (
        by_hand.job_server(tmp_path) as (jobs, _),
        by_hand.worker_pool(tmp_path, packages) as (workers, _),
        pytest.raises(Exception, match=r"rlhf.tuning.data.steps is \w+ in this worker and \w+ in"),
    ):
        pipeline.run(parts, plan, str(tmp_path / "pieces"), runner=Runner("PortableRunner", 1, jobs | workers))
    assert not (tmp_path / "pieces").exists()


def test_what_another_version_has_left_is_made_again(plan, tmp_path, monkeypatch):
    [name] = by_hand.run(plan, tmp_path, {"prompt": "p", "completion": "c"})
    folder = str(tmp_path / "pieces")
    receipt = read_receipts(folder)[name]
    before = versions.Versions(versions.here() | {"numpy": "0.1"})
    with monkeypatch.context() as patch:
        patch.setattr("rlhf.tuning.data.receipts.here", lambda: before)
        write_receipt(folder, name, receipt)
        assert list(read_receipts(folder)) == [name]
    assert read_receipts(folder) == {}
