"""A job service that does not answer is named, and a job ends with the run that follows it."""

import signal
import threading

import grpc
import pytest
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc

from rlhf.tuning.data import pipeline, runners
from rlhf.tuning.data.blocks import Plan
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
