"""A run that is cancelled or stopped by a signal ends as interrupted. One that nobody reads any more continues."""

import http.server
import json
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.context import refresh_global_settings_context
from prefect.exceptions import TerminationSignal

from rlhf.flows.orchestration import cancellation
from rlhf.flows.pipeline import _failed
from rlhf.flows.report.terminal import LastingConsole
from rlhf.flows.running.closing import status_after
from rlhf.flows.running.session import _ended_by
from rlhf.stages.store.artifacts import Store
from rlhf.stages.worker.client import StageFailed
from tests.flows.prefect_server import prefect_server, wait_for
from tests.support import RLHF


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TerminationSignal(15), SystemExit(1)], ids=repr)
def test_a_run_that_was_stopped_has_not_failed(error):
    assert status_after(error) == "interrupted" and _ended_by(error) == {"state": "interrupted"}
    assert status_after(StageFailed("reward")) == "failed" and _ended_by(StageFailed("x"))["state"] == "failed"


def test_a_failed_run_says_why_where_its_error_has_no_text(tmp_path):
    session = SimpleNamespace(name="first", store=Store(str(tmp_path)))
    assert _failed(session, TimeoutError()).message.startswith("run first: TimeoutError. Type: rlhf show first")


def test_a_console_that_nobody_reads_any_more_ends_nothing():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        console = LastingConsole(file=file)
        console.print("read")
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        for _ in range(2):
            console.print("not read")
        # Others who print there are not ended either.
        print("not read", file=file, flush=True)


class Api(http.server.BaseHTTPRequestHandler):
    """Prefect's API of one flow run, which answers badly once and then that somebody cancels it."""

    asked = 0

    def do_GET(self) -> None:
        Api.asked += 1
        state = {"type": "CANCELLING", "name": "Cancelling"}
        run = {"id": self.path.rpartition("/")[2], "flow_id": str(uuid.uuid4()), "name": "x", "state": state}
        body = json.dumps(run).encode()
        self.send_response(200 if Api.asked > 1 else 500)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_a_run_is_stopped_when_somebody_cancels_its_flow_run(monkeypatch):
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid.uuid4()))
    monkeypatch.setattr(cancellation, "CANCEL_SECONDS", 0.05)
    stopped = threading.Event()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
        refresh_global_settings_context()
        try:
            asked = cancellation.Cancellation(stopped.set)
            assert not asked.is_asked()
            assert stopped.wait(60) and asked.is_asked() and Api.asked > 1
        finally:
            asked.end()
            server.shutdown()
            monkeypatch.undo()
            refresh_global_settings_context()


@pytest.mark.slow
def test_rlhf_run_ends_when_it_is_cancelled_in_prefect(tmp_path: Path, prefect_database: Path):
    with prefect_server(tmp_path, shared=prefect_database) as prefect:
        command = [RLHF, "run", "smoke", "--name", "smoke-x", "--store", str(tmp_path / "store")]
        with subprocess.Popen(command, env=prefect.env, stderr=subprocess.PIPE, text=True) as run:
            flow_run = wait_for(
                lambda: next(iter(prefect.post("/flow_runs/filter", flow_runs={"name": {"any_": ["smoke-x"]}})), None),
                300,
                "the flow run",
            )
            wait_for(lambda: "base" in prefect.task_runs(flow_run), 300, "its first stage")
            cancelling = {"type": "CANCELLING", "name": "Cancelling"}
            prefect.post(f"/flow_runs/{flow_run['id']}/set_state", state=cancelling)
            _, printed = run.communicate(timeout=120)
            assert run.returncode == 130 and printed.startswith("cancelled in Prefect; finished stages are kept")
        ended = prefect.get(f"/flow_runs/{flow_run['id']}")
        assert ended["state_type"] == "CANCELLED" and "rlhf show smoke-x" in ended["state"]["message"]
        assert Store(str(tmp_path / "store")).read_json("runs", "smoke-x", "run.json")["status"] == "interrupted"


LATE = """
import os, sys, httpx
from prefect import runtime
from rlhf.flows import pipeline
from rlhf.flows.recipe.reading import load_recipe
close = pipeline.close
def cancelled_meanwhile(session, status):
    state = {"type": "CANCELLING", "name": "Cancelling"}
    url = f"{os.environ['PREFECT_API_URL']}/flow_runs/{runtime.flow_run.id}/set_state"
    httpx.post(url, json={"state": state}).raise_for_status()
    return close(session, status)
pipeline.close = cancelled_meanwhile
print(pipeline.run_recipe(load_recipe("smoke", sets=["store=" + sys.argv[1]]), name="late", force=None, only={"base"}))
"""


@pytest.mark.slow
def test_a_run_that_is_cancelled_after_its_last_stage_has_the_end_that_its_record_has(
    tmp_path: Path, prefect_database: Path, store: Path
):
    with prefect_server(tmp_path, shared=prefect_database) as prefect:
        command = [sys.executable, "-c", LATE, str(store)]
        done = subprocess.run(command, env=prefect.env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == "partial", done.stderr
        (run,) = prefect.post("/flow_runs/filter", flow_runs={"name": {"any_": ["late"]}})
    assert run["state_type"] == "COMPLETED"
    assert Store(str(store)).read_json("runs", "late", "run.json")["status"] == "partial"
