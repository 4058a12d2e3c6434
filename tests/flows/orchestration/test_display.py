"""What is shown in Prefect is text under a name of its own, and costs a run neither time nor its end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest
from httpx import ReadError
from markdown_it import MarkdownIt
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlhf.flows.graph.build import nodes_of
from rlhf.flows.orchestration import display as display_module
from rlhf.flows.orchestration import prefect_artifacts
from rlhf.flows.orchestration.display import Display
from rlhf.flows.orchestration.prefect_artifacts import PrefectReporter, _sample_line, wait_until_recorded
from rlhf.flows.pipeline import free_name
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.store.artifacts import Store
from rlhf.stages.worker.protocol import Progress
from tests.flows.prefect_server import PYTHONPATH, prefect_server, wait_for
from tests.support import RLHF, free_port


@contextlib.contextmanager
def hanging() -> Iterator[str]:
    """The URL of a server that takes connections and answers nothing, as one that is stopped does."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/api"


def test_progress_does_not_wait_for_a_server_that_hangs(monkeypatch):
    monkeypatch.setattr(prefect_artifacts, "PROGRESS_SECONDS", 0.0)
    node = nodes_of(load_recipe("smoke"))[0]
    # Prefect itself waits for a minute, several times.
    with hanging() as url, temporary_settings({PREFECT_API_URL: url}):
        reporter = PrefectReporter(silent=True)
        began = time.monotonic()
        reporter.stage_started(node)
        for done in range(100):
            reporter.progress(node, Progress(done, 100, "steps", {}))
        reporter.stage_ended(node, "made", {"metrics": {}, "stage": node.stage}, 1.0)
        assert time.monotonic() - began < 20


def test_of_what_waits_under_one_name_the_latest_alone_is_shown():
    made: list[int] = []
    going_on = threading.Event()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        display = Display()
        display.put("first", lambda client: made.append(0) or going_on.wait(60))
        for number in range(1, 5):
            display.put("progress", lambda client, number=number: made.append(number))
        going_on.set()
        display.finish(60)
    assert made == [0, 4]


@pytest.mark.parametrize(
    ("drops", "expected"),
    [(1, ["evaluation", "evaluation", "gate", "report"]), (9, ["evaluation"] * display_module.TRIES)],
    ids=["once", "always: the server is left alone for a while"],
)
def test_a_call_is_repeated_after_a_dropped_connection(monkeypatch, drops, expected):
    monkeypatch.setattr(display_module, "FIRST_PAUSE_SECONDS", 0.0)
    made: list[str] = []

    def show(name: str) -> None:
        made.append(name)
        if len(made) <= drops:
            raise ReadError("reset by peer")

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        display = Display()
        for name in ("evaluation", "gate", "report"):
            display.put(name, lambda client, name=name: show(name))
        display.finish(60)
    assert made == expected


def test_after_a_call_that_was_not_answered_there_is_none_for_a_while(monkeypatch, caplog):
    monkeypatch.setattr(display_module, "CALL_SECONDS", 0.2)
    made: list[int] = []
    with hanging() as url, temporary_settings({PREFECT_API_URL: url}):
        display = Display()
        display.put("first", lambda client: client.hello() and None)
        display.put("second", lambda client: made.append(1))
        # It does not wait for the server to come back.
        display.finish(600)
    assert made == [] and "not shown in Prefect: ReadTimeout" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_a_run_is_not_begun_on_a_server_that_hangs_or_is_not_there(rlhf, tmp_path, monkeypatch, there):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    gone = contextlib.nullcontext(f"http://127.0.0.1:{free_port()}/api")
    with hanging() if there else gone as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        done = rlhf("run", "smoke", "--store", str(tmp_path / "store"), code=1)
    assert f"failed: the Prefect server at {url} cannot be reached" in done.stderr
    assert "start the server, or add --no-prefect" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "store" / "runs").exists()


LEAVING = """
import sys
from prefect.events import emit_event
from rlhf.flows.orchestration.cancellation import send_events
from rlhf.flows.orchestration.exit import leave

emit_event("a.change", {"prefect.resource.id": "of.a.test"})
send_events()
print("the last line")
leave(SystemExit(3))
"""


@pytest.mark.slow
def test_a_command_ends_after_its_last_line_where_the_server_takes_no_events(tmp_path):
    with hanging() as url:
        env = os.environ | {"PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": url, "PYTHONPATH": PYTHONPATH}
        # Else it would be there until a request has been tried for seven minutes.
        done = subprocess.run([sys.executable, "-c", LEAVING], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "the last line\n"), done.stderr


LEFT = """
import atexit, contextlib, sys
from pathlib import Path
from rlhf.flows.orchestration.exit import leave, leave_soon

atexit.register(Path(sys.argv[1]).write_text, "waited")
leave_soon()
with contextlib.suppress(OSError):
    print("the last line")
leave({"status": SystemExit(3), "words": SystemExit("refused"), "error": ValueError("bad")}[sys.argv[2]])
"""


@pytest.mark.parametrize("pipes", ["exec 3>&1", "exec >&-", "exec 2>&-", "exec >&- 2>&-"])
@pytest.mark.parametrize(("error", "status"), [("status", 3), ("words", 1), ("error", 1)])
def test_a_process_leaves_with_its_status_whoever_reads_it(tmp_path, pipes, error, status):
    env = os.environ | {"PYTHONPATH": PYTHONPATH}
    command = ["bash", "-c", f'{pipes}; exec "$@"', "bash", sys.executable, "-c", LEFT, tmp_path / "exit", error]
    done = subprocess.run(command, env=env, capture_output=True, timeout=60)
    assert done.returncode == status and not (tmp_path / "exit").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_hangs_in_a_run_keeps_neither_its_stages_nor_its_limits_nor_its_end(tmp_path):
    store = Store(str(tmp_path / "store"))

    def at_sft() -> bool:
        record = store.read_json("runs", "hanging", "run.json")
        return record is not None and "sft" in record["nodes"]

    with prefect_server(tmp_path) as prefect:
        command = [RLHF, "run", "smoke", "--name", "hanging", "--store", store.url, "--set", "limits.run_seconds=60"]
        with (tmp_path / "run.log").open("w") as log:
            run = subprocess.Popen(command, env=prefect.env, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(at_sft, 240, "a stage at work")
            servers = [c for c in psutil.Process().children() if f"{prefect.port}" in " ".join(c.cmdline())]
            for process in [*servers, *(below for server in servers for below in server.children(recursive=True))]:
                os.kill(process.pid, signal.SIGSTOP)
            assert run.wait(timeout=240) == 1, (tmp_path / "run.log").read_text()
        finally:
            run.kill()
            run.wait()
    told = (tmp_path / "run.log").read_text()
    record = store.read_json("runs", "hanging", "run.json")
    assert record is not None and record["status"] == "failed"
    assert "limits.run_seconds" in told, told


TEXTS = [
    "![x](http://evil/beacon.png)",
    "[click](http://evil)",
    "<img src=http://evil onerror=alert(1)>",
    "<script>alert(1)</script>",
    "http://evil.example/x",
    "www.evil.example",
    "<http://evil>",
    "a | b",
    "`code` **bold** _it_ ~~gone~~",
    "# head\n\n| a |\n|---|\n",
    "&lt;img&gt; &#x3c;",
    "\\![x](http://evil)",
    "[x]: http://evil\n\n[x]",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_completion_is_shown_as_it_was_written(text):
    line = _sample_line({"prompt": text, "text": text, "stop": "eos"})
    table = f"| prompt | completion | stop |\n|---|---|---|\n{line}"
    page = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(table)
    for tag in ("<img", "<a", "<script", "<strong", "<code", "<em", "<s>", "<h1"):
        assert tag not in page
    assert page.count("<td>") == 3 and page.count("<tr>") == 2


def test_a_server_that_is_gone_at_the_end_of_a_run_raises_nothing_in_place_of_its_error(caplog):
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
        wait_until_recorded(uuid.uuid4())
    assert "Prefect may not have the end of this run (ConnectError: " in caplog.text


@pytest.fixture
def flow_run(monkeypatch):
    def is_called(name: str, attempt: int = 1) -> None:
        # Prefect's own way to say what a run is called where there is none.
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__NAME", name)
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "0198c0de-0000-7000-8000-00000badcafe")
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", str(attempt))

    return is_called


def test_a_run_is_called_as_its_flow_run_and_otherwise_where_that_is_taken(tmp_path, flow_run):
    recipe = Recipe(name="night", store=str(tmp_path))
    flow_run("tall-owl")
    assert free_name(recipe, None) == "night-tall-owl"
    Store(recipe.store).write_json(
        {"name": "night-tall-owl", "status": "finished"}, "runs", "night-tall-owl", "run.json"
    )
    assert free_name(recipe, None) == "night-tall-owl-0badcafe"
    # A name that was asked for is that of a run that goes on, or is refused.
    assert free_name(recipe, "night-tall-owl") == "night-tall-owl"
    flow_run("tall-owl", attempt=2)
    # Of a second attempt the name is that of the first, which has a record.
    assert free_name(recipe, None) == "night-tall-owl-2"
