"""A runner that takes pipelines in the portable form gives the bytes of this process."""

import concurrent.futures
import http.server
import json
import signal
import socket
import threading

import grpc
import pytest
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc

from tests.tuning.data.run import job_server
from tuning.data import files, pipeline, runners
from tuning.data.blocks import Plan
from tuning.models.byte_tokenizer import byte_tokenizer
from tuning.models.tokenizer import save_tokenizer


def test_the_portable_form_gives_the_same_pieces(tmp_path):
    save_tokenizer(byte_tokenizer(), tmp_path / "tokenizer")
    plan = Plan(tokenizer=str(tmp_path / "tokenizer"), splits=("sft", "heldout"), heldout_fraction=0.2, shards=2)
    path = tmp_path / "data.jsonl"
    records = [{"prompt": f"p{i}", "completion": "c" * (i % 9 + 1)} for i in range(200)] + [{"prompt": 5}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    parts = list(files.parts_of(files.DataFile(str(path), path.name), 2000, str(tmp_path / "spool")))
    pipeline.run(parts, plan, str(tmp_path / "local"), 2000)
    with job_server(tmp_path) as options:
        portable = runners.Runner("PortableRunner", options=options)
        counters = pipeline.run(parts, plan, str(tmp_path / "portable"), 2000, portable)
    names = sorted(path.name for path in (tmp_path / "local").iterdir())
    assert len(parts) > 3 and names == sorted(path.name for path in (tmp_path / "portable").iterdir())
    for name in names:
        assert (tmp_path / "portable" / name).read_bytes() == (tmp_path / "local" / name).read_bytes(), name
    assert counters["Validate/in"] == 201 and counters["Validate/dead"] == 1


@pytest.mark.parametrize("given, seconds", [({}, 30 * 86_400), ({"job_server_timeout": 90}, 90)])
def test_a_job_is_followed_for_longer_than_the_minute_that_beam_follows_it(given, seconds):
    flags = runners.flags_of(runners.Runner("PortableRunner", options=given))
    assert PipelineOptions(flags).view_as(PortableOptions).job_server_timeout == seconds


def test_a_job_server_that_does_not_answer_is_named(tmp_path):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        # Nobody listens there.
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
        runner = runners.Runner("PortableRunner", options={"job_endpoint": endpoint})
        with pytest.raises(runners.RunnerError, match=f"job_endpoint: no job server answers at {endpoint}"):
            pipeline.run([], Plan(tokenizer="", splits=()), str(tmp_path), runner=runner)
    runner = runners.Runner("PortableRunner", options={"job_endpoint": "nowhere"})
    with pytest.raises(runners.RunnerError, match="expected its HOST:PORT"):
        runners.reach(runner)


def test_a_port_at_which_something_else_listens_is_no_job_server(monkeypatch):
    monkeypatch.setattr(runners, "REACH_SECONDS", 2.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        try:
            endpoint = f"127.0.0.1:{web.server_port}"
            with pytest.raises(runners.RunnerError, match=f"no job server answers at {endpoint} .no gRPC within 2 s"):
                runners.reach(runners.Runner("PortableRunner", options={"job_endpoint": endpoint}))
        finally:
            web.shutdown()
            thread.join()


def test_every_target_that_grpc_has_is_reached(tmp_path):
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_insecure_port(f"unix:{tmp_path}/jobs")
    server.start()
    try:
        for target in (f"127.0.0.1:{port}", f"dns:///127.0.0.1:{port}", f"unix:{tmp_path}/jobs"):
            runners.reach(runners.Runner("PortableRunner", options={"job_endpoint": target}))
    finally:
        server.stop(0).wait()


BEGUN, GO_ON = threading.Event(), threading.Event()


def waits(record):
    BEGUN.set()
    return GO_ON.wait(60)


def test_a_job_ends_with_the_process_that_follows_it(tmp_path):
    """Else it would write pieces beside those of the next run."""
    save_tokenizer(byte_tokenizer(), tmp_path / "tokenizer")
    plan = Plan(tokenizer=str(tmp_path / "tokenizer"), splits=("sft",), rules=(f"{__name__}:waits",))
    (tmp_path / "data.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    parts = list(files.parts_of(files.DataFile(str(tmp_path / "data.jsonl"), "d"), 2000, str(tmp_path)))

    def interrupt():
        if BEGUN.wait(60):
            signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with job_server(tmp_path) as options, grpc.insecure_channel(options["job_endpoint"]) as channel:
        try:
            with pytest.raises(KeyboardInterrupt):
                pipeline.run(parts, plan, str(tmp_path / "pieces"), runner=runners.Runner("PortableRunner", 1, options))
            jobs = beam_job_api_pb2_grpc.JobServiceStub(channel)
            [job] = jobs.GetJobs(beam_job_api_pb2.GetJobsRequest()).job_info
            assert BEGUN.is_set() and job.state == beam_job_api_pb2.JobState.CANCELLED
        finally:
            GO_ON.set()
            thread.join()
