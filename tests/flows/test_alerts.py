"""`rlhf alerts` has a Prefect server call a webhook for every night that a person must know of, and of no other."""

from __future__ import annotations

import datetime
import http.server
import json
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.server.events.schemas.automations import AutomationCore, EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from typer.testing import CliRunner

from flows.cli.app import app
from flows.orchestration import alerts
from flows.pipeline import NAME
from tests.flows.prefect_server import Prefect, prefect_server, wait_for
from tests.support import RLHF

NAMES = ["failed", "crashed", "cancelled", "hung", "refused", "no run completed"]


def test_the_automations_are_those_that_a_server_takes():
    assert alerts.FLOW == NAME
    made = alerts.automations(uuid.uuid4(), 26)
    assert [a.name for a in made] == [f"rlhf: {name}" for name in NAMES]
    for automation in made:
        # The server's own models: triggers, actions and templates.
        taken = AutomationCore.model_validate(automation.model_dump(mode="json"))
        assert taken.trigger.match_related["prefect.resource.name"] == [NAME]
        assert taken.actions[0].type == "call-webhook"
    assert made[-1].trigger.within.total_seconds() == 26 * 3600
    expected = {event for a in made[:-1] for event in a.trigger.expect}
    assert expected == {f"prefect.flow-run.{s}" for a in alerts.ALERTS for s in a.states}
    assert not any("Completed" in event for event in expected)


@pytest.mark.parametrize("state", ["Completed", "Promoted", "Refused", "Nothing new"])
def test_each_state_in_which_a_night_ends_counts_as_its_end(state: str):
    """By the server's own rule: the call for silent hours comes when none of them did."""
    [silent] = [a for a in alerts.automations(uuid.uuid4(), 26) if a.name == "rlhf: no run completed"]
    trigger = EventTrigger.model_validate(silent.trigger.model_dump(mode="json", exclude={"id"}))
    flow = {"prefect.resource.id": "prefect.flow.1", "prefect.resource.role": "flow", "prefect.resource.name": NAME}
    event = ReceivedEvent(
        id=uuid.uuid4(),
        occurred=datetime.datetime.now(datetime.UTC),
        event=f"prefect.flow-run.{state}",
        resource={"prefect.resource.id": "prefect.flow-run.1"},
        related=[flow],
    )
    assert trigger.expects(event.event) and trigger.covers(event)
    assert not trigger.expects("prefect.flow-run.Failed")


def test_without_a_server_or_with_a_wrong_address_the_command_says_what_to_do(monkeypatch):
    def alert(*options: str) -> str:
        done = CliRunner().invoke(app, ["alerts", *options])
        assert done.exit_code == 2
        return done.stderr

    assert "say --webhook URL, or --remove" in alert()
    assert "expected http://... or https://..." in alert("--webhook", "chat.example")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert "set PREFECT_API_URL=" in " ".join(alert("--webhook", "http://127.0.0.1:9/").split())


class Receiver(http.server.ThreadingHTTPServer):
    """Keeps the bodies of what is posted to it."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    def alert(self, name: str, run: str | None = None) -> dict[str, Any] | None:
        found = (b for b in list(self.bodies) if b["alert"] == name and (run is None or b["run"] == run))
        return next(found, None)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[Prefect]:
    with prefect_server(tmp_path_factory.mktemp("alerts"), shared=prefect_database) as server:
        yield server


def command(prefect: Prefect, *arguments: Any, code: int = 0) -> str:
    done = subprocess.run([RLHF, *map(str, arguments)], env=prefect.env, capture_output=True, text=True, timeout=180)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def night(
    prefect: Prefect, name: str, kind: str, state: str, message: str, flow: str = NAME, **parameters: Any
) -> None:
    """A flow run that ends in this state."""
    of = prefect.post("/flows/", name=flow)["id"]
    run = prefect.post("/flow_runs/", flow_id=of, name=name, parameters={"recipe": "demo"} | parameters)["id"]
    for one in ({"type": "RUNNING", "name": "Running"}, {"type": kind, "name": state, "message": message}):
        prefect.post(f"/flow_runs/{run}/set_state", state=one, force=True)


@pytest.mark.slow
def test_a_server_calls_for_each_night_that_a_person_must_know_of(prefect: Prefect, receiver: Receiver, tmp_path: Path):
    url = f"http://127.0.0.1:{receiver.server_address[1]}/hook"
    first = command(prefect, "alerts", "--webhook", url, "--silent-hours", "100")
    assert first.split("\n")[:6] == [f"rlhf: {name}: made" for name in NAMES]
    # Again, with other settings: the same automations.
    assert "rlhf: failed: updated" in command(prefect, "alerts", "--webhook", url, "--silent-hours", "0.003")
    there = prefect.post("/automations/filter")
    assert sorted(a["name"] for a in there) == sorted(f"rlhf: {name}" for name in NAMES)

    found = wait_for(lambda: receiver.alert("no run completed"), 120, "a call that no run has completed")
    assert "no run of rlhf-pipeline has come to its end for 0.003 hours. Type: prefect flow-run ls" in found["text"]

    nights = {
        "failed": ("FAILED", "Failed", 'the worker "died" {{ x }} \\ of <memory>\nand more'),
        "crashed": ("CRASHED", "Crashed", "killed"),
        "cancelled": ("CANCELLED", "Cancelled", "the night before is at work"),
        "hung": ("FAILED", "TimedOut", "run x took longer than its 60 s"),
        "refused": ("COMPLETED", "Refused", "-0.020 [-0.030, -0.010]"),
    }
    night(prefect, "silent", "COMPLETED", "Completed", "done")
    night(prefect, "other", "FAILED", "Failed", "of another flow", flow="other")
    for name, (kind, state, message) in nights.items():
        night(prefect, f"mild-{name}", kind, state, message, store="s3://bucket/x")
    for name, (_, state, message) in nights.items():
        body = wait_for(lambda name=name: receiver.alert(name), 60, f"a call of {name}")
        assert (body["run"], body["state"], body["message"]) == (f"demo-mild-{name}", state, message)
        assert message in body["text"] and f"demo-mild-{name} --store s3://bucket/x" in body["text"]
    assert "Type: rlhf logs demo-mild-hung" in receiver.alert("hung")["text"]
    # Each called once, and nothing else called.
    called = [b["alert"] for b in receiver.bodies if b["alert"] != "no run completed"]
    assert sorted(called) == sorted(nights)

    # A run of this project that passes its limit.
    options = ["--name", "late", "--store", tmp_path, "--set", "limits.run_seconds=1e-9"]
    assert "failed: run late took longer" in command(prefect, "run", "smoke", *options, code=1)
    assert prefect.flow_run("late")["state_name"] == "TimedOut"
    body = wait_for(lambda: receiver.alert("hung", "late"), 60, "a call of the run past its limit")
    assert body["message"].startswith("run late took longer than its 0.0 s (`limits.run_seconds`): it was at base")

    assert "rlhf: failed: removed" in command(prefect, "alerts", "--remove")
    assert prefect.post("/automations/filter") == []
    assert "no alerts were there" in command(prefect, "alerts", "--remove")
