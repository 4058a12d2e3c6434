"""The automations of infra/alerts.yaml call for every night that a person must know of, and for no other."""

import datetime
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.server.events.schemas.automations import AutomationCore, EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent

from rlhf.flows.pipeline import NAME
from rlhf.flows.records import DECIDED
from tests.flows.alerts import FILE, automations, block, receiving
from tests.flows.prefect_server import Prefect, prefect_server, wait_for
from tests.support import RLHF

NAMES = ["failed", "crashed", "cancelled", "refused", "lost", "no run of default", "no worker in local"]


def made() -> dict[str, AutomationCore]:
    """By the server's own models of triggers, actions and templates."""
    found = [AutomationCore.model_validate(a) for a in automations(str(uuid.uuid4()))]
    return {a.name.removeprefix("rlhf: "): a for a in found}


def event(name: str, **related: str) -> ReceivedEvent:
    return ReceivedEvent(
        id=uuid.uuid4(),
        occurred=datetime.datetime.now(datetime.UTC),
        event=f"prefect.flow-run.{name}",
        resource={"prefect.resource.id": "prefect.flow-run.1"},
        related=[
            {"prefect.resource.id": f"prefect.{r}.1", "prefect.resource.role": r, "prefect.resource.name": n}
            for r, n in related.items()
        ],
    )


def covers(automation: AutomationCore, happened: ReceivedEvent) -> bool:
    trigger = automation.trigger
    assert isinstance(trigger, EventTrigger)
    return trigger.expects(happened.event) and trigger.covers(happened)


def test_each_end_of_a_run_calls_where_a_person_must_know_of_it():
    assert list(made()) == NAMES
    for state, called in {
        "Failed": "failed",
        "TimedOut": "failed",
        "Crashed": "crashed",
        "Cancelled": "cancelled",
        "Refused": "refused",
        **dict.fromkeys(("Late", "Running", "Completed", "Promoted", "Nothing new", "AwaitingConcurrencySlot"), None),
    }.items():
        happened = event(state, flow=NAME, deployment="another")
        calls = {name: a for name, a in made().items() if name != "lost"}
        assert [name for name, a in calls.items() if covers(a, happened)] == ([called] if called else []), state
        assert not any(covers(a, event(state, flow="other")) for a in made().values())


@pytest.mark.parametrize("state", ["Completed", *DECIDED.values()])
def test_a_night_of_one_deployment_does_not_silence_the_alert_of_another(state: str):
    silence = made()["no run of default"]
    assert covers(silence, event(state, flow=NAME, deployment="default"))
    assert not covers(silence, event(state, flow=NAME, deployment="smoke"))
    assert not covers(silence, event("Failed", flow=NAME, deployment="default"))
    assert silence.trigger.within.total_seconds() == 26 * 3600


@pytest.mark.parametrize(
    "state", ["heartbeat", "Failed", "TimedOut", "Crashed", "Cancelled", "Completed", *DECIDED.values()]
)
def test_a_run_that_speaks_or_has_ended_is_not_lost(state: str):
    assert covers(made()["lost"], event(state, flow=NAME))
    assert not covers(made()["lost"], event("Running", flow=NAME))


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[Prefect]:
    with prefect_server(tmp_path_factory.mktemp("alerts"), shared=prefect_database) as server:
        yield server


def command(prefect: Prefect, *arguments: Any, code: int = 0) -> str:
    done = subprocess.run([RLHF, *map(str, arguments)], env=prefect.env, capture_output=True, text=True, timeout=180)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def night(prefect: Prefect, name: str, kind: str, state: str, message: str, flow: str = NAME) -> None:
    """A flow run that ends in this state."""
    of = prefect.post("/flows/", name=flow)["id"]
    run = prefect.post("/flow_runs/", flow_id=of, name=name)["id"]
    for one in ({"type": "RUNNING", "name": "Running"}, {"type": kind, "name": state, "message": message}):
        prefect.post(f"/flow_runs/{run}/set_state", state=one, force=True)


@pytest.mark.slow
def test_a_server_calls_for_each_night_that_a_person_must_know_of(prefect: Prefect, tmp_path: Path):
    with receiving() as receiver:
        block_id = block(prefect, receiver)
        file = tmp_path / "alerts.yaml"
        # Silence of 11 seconds.
        text = FILE.read_text().replace("BLOCK_ID", block_id)
        file.write_text(text.replace("within: 93600", "within: 11").replace("within: 900", "within: 11"))
        assert "Created 7 automation(s)" in prefect.command("automation", "create", "--from-file", str(file))
        found = wait_for(lambda: receiver.alert("no run of rlhf-pipeline/default"), 120, "a call that no run has ended")
        assert "Type: prefect flow-run ls --flow-name rlhf-pipeline" in found["body"]

        nights = {
            "failed": ("FAILED", "Failed", 'the worker "died" {{ x }} \\ of <memory>\nand more'),
            "crashed": ("CRASHED", "Crashed", "killed"),
            "cancelled": ("CANCELLED", "Cancelled", "by a person"),
            "late": ("FAILED", "TimedOut", "run x took longer than its 60 s"),
            "refused": ("COMPLETED", "Refused", "-0.020 [-0.030, -0.010]"),
        }
        night(prefect, "silent", "COMPLETED", "Completed", "done")
        night(prefect, "other", "FAILED", "Failed", "of another flow", flow="other")
        for name, (kind, state, message) in nights.items():
            night(prefect, name, kind, state, message)
        for name, (_, state, message) in nights.items():
            body = wait_for(lambda name=name: receiver.alert(f" {name}: "), 60, f"a call of {name}")
            assert body["subject"].endswith(f"] {name}: {state}") and message in body["body"]
            assert f"{prefect.ui}/runs/flow-run/" in body["body"]
        # The process of a run is gone, and nobody says so.
        of = prefect.post("/flows/", name=NAME)["id"]
        gone = prefect.post("/flow_runs/", flow_id=of, name="gone", state={"type": "RUNNING"})["id"]
        beat = event("heartbeat", flow=NAME).model_dump(mode="json", exclude={"received"})
        beat["resource"]["prefect.resource.id"] = f"prefect.flow-run.{gone}"
        prefect.http.post("/events", json=[beat]).raise_for_status()
        found = wait_for(lambda: receiver.alert(" gone: "), 120, "a call of the lost run")
        assert found["subject"] == "[error] gone: silent for 15 minutes"
        assert f"delete its flow run: {prefect.ui}/runs/flow-run/{gone}" in found["body"]
        nights["gone"] = ("RUNNING", "Running", "")
        # Each called once, and nothing else called.
        called = [b["subject"] for b in receiver.bodies if "no run of" not in b["subject"]]
        assert len(called) == len(nights)

        # A run of this project that passes its limit says the command to type, and that works.
        store = tmp_path / "a store"
        options = ["--name", "smoke-late", "--store", store, "--set", "limits.run_seconds=1e-9"]
        assert "failed: run smoke-late took longer" in command(prefect, "run", "smoke", *options, code=1)
        assert prefect.flow_run("smoke-late")["state_name"] == "TimedOut"
        body = wait_for(lambda: receiver.alert(" smoke-late: "), 60, "a call of the run past its limit")
        typed = f"rlhf show smoke-late --store '{store}'"
        assert "took longer than its 0.0 s (`limits.run_seconds`)" in body["body"] and f"Type: {typed}" in body["body"]
        assert "smoke-late" in command(prefect, "show", "smoke-late", "--store", store)
        assert prefect.artifacts(prefect.flow_run("smoke-late"))["smoke-run"]["data"] == f"`{typed}`"
