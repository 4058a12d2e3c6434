"""Alerts of a Prefect server: its own automations call a webhook when a night fails, hangs, is refused or is missing.

They are made once by `rlhf alerts`, and again after a change: an automation of the same name is updated.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from pydantic import SecretStr

from flows.records import DECIDED

FLOW = "rlhf-pipeline"
"""Name of the flow (`flows.pipeline.NAME`), which is not imported for it: that loads the whole graph."""
BLOCK = "rlhf-alerts"
PREFIX = "rlhf: "
LEAST_SECONDS = 10.0
"""Prefect waits at least so long for what does not come."""


class NoServer(RuntimeError):
    """Prefect is set to no server: alerts need one that stays."""


@dataclasses.dataclass(frozen=True)
class Alert:
    """An automation: which states of a run call, and what to type then."""

    name: str
    states: tuple[str, ...]
    says: str
    advice: str


SHOW = "rlhf logs {run}{store}; rlhf show {run}{store}"
ALERTS = (
    Alert("failed", ("Failed",), "failed", f"{SHOW}; what is finished is kept"),
    Alert("crashed", ("Crashed",), "crashed", f"{SHOW}; the same run goes on from what is finished"),
    Alert("cancelled", ("Cancelled",), "was cancelled", f"{SHOW}; is the night before still at work?"),
    Alert("hung", ("TimedOut", "Late"), "took too long, or did not start", f"{SHOW}; is a worker there?"),
    Alert("refused", ("Refused",), "was refused", "rlhf show {run}{store}; rlhf champions{store}"),
)
MISSING = "no run completed"


def automations(block: UUID, silent_hours: float) -> list[AutomationCore]:
    """The automations, which call the webhook of this block.

    silent_hours: after so long without a night that came to an end one of them calls.
    """
    within = datetime.timedelta(seconds=max(LEAST_SECONDS, 3600 * silent_hours))
    # Whatever its gate has decided, the night did happen.
    ends = {f"prefect.flow-run.{state}" for state in ("Completed", *DECIDED.values())}
    silent = _trigger(ends) | {"posture": Posture.Proactive, "within": within}
    hours = f"{silent_hours:g} hours"
    text = (
        f"no run of {FLOW} has come to its end for {hours}. Type: prefect flow-run ls; prefect work-pool ls; rlhf runs"
    )
    return [
        *(_automation(alert, block) for alert in ALERTS),
        AutomationCore(
            name=f"{PREFIX}{MISSING}",
            description=f"Calls when no run of {FLOW} has come to its end for {hours}.",
            trigger=EventTrigger(**silent),
            actions=[CallWebhook(block_document_id=block, payload=_json(text, MISSING))],
        ),
    ]


def _automation(alert: Alert, block: UUID) -> AutomationCore:
    expected = {f"prefect.flow-run.{state}" for state in alert.states}
    advice = alert.advice.format(run="{{ run }}", store="{{ store }}")
    text = f"run {{{{ run }}}} {alert.says}: {{{{ flow_run.state.name }}}}. {{{{ message }}}} Type: {advice}"
    trigger = _trigger(expected) | {"posture": Posture.Reactive, "for_each": {"prefect.resource.id"}}
    return AutomationCore(
        name=f"{PREFIX}{alert.name}",
        description=f"Calls when a run of {FLOW} {alert.says}.",
        trigger=EventTrigger(**trigger, within=datetime.timedelta(0)),
        actions=[CallWebhook(block_document_id=block, payload=_NAMES + _json(text, alert.name))],
    )


def _trigger(expected: set[str]) -> dict[str, Any]:
    return {
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": FLOW},
        "expect": expected,
        "threshold": 1,
    }


# The name of the run in the store, as `flows.pipeline.free_name` makes it of the flow run's.
_NAMES = (
    "{% set given = flow_run.parameters.get('run_name') %}"
    "{% set recipe = flow_run.parameters.get('recipe', 'demo').split('/')[-1].split('.')[0] %}"
    "{% set own = flow_run.name if flow_run.name.startswith(recipe ~ '-') else recipe ~ '-' ~ flow_run.name %}"
    "{% set run = given or own %}"
    "{% set place = flow_run.parameters.get('store') %}"
    "{% set store = ' --store ' ~ place if place else '' %}"
    "{% set message = flow_run.state.message or '' %}"
)


def _json(text: str, alert: str) -> str:
    """The body of the call: `text` as chat programs take it, and its parts."""
    # Pieces of text and expressions, joined by Jinja, which then quotes the whole.
    parts = text.replace("{{ ", "\x00").replace(" }}", "\x00").split("\x00")
    joined = " ~ ".join(part if i % 2 else f"'{part}'" for i, part in enumerate(parts) if part)
    fields = {"text": joined, "alert": f"'{alert}'"}
    if len(parts) > 1:
        fields |= {"run": "run", "state": "flow_run.state.name", "message": "message"}
    return "{" + ", ".join(f'"{name}": {{{{ ({value}) | tojson }}}}' for name, value in fields.items()) + "}"


def set_up(webhook: str, silent_hours: float) -> list[str]:
    """Makes or updates the webhook's block and the automations; returns a line for each. Raises NoServer."""
    _needs_server()
    block = Webhook(method="POST", url=SecretStr(webhook)).save(BLOCK, overwrite=True)
    assert isinstance(block, UUID)
    lines = []
    with get_client(sync_client=True) as client:
        for automation in automations(block, silent_hours):
            same = _of_name(client, automation.name)
            if same:
                client.update_automation(same[0], automation)
            else:
                client.create_automation(automation)
            # Two commands at once may have made it twice.
            for more in same[1:]:
                client.delete_automation(more)
            lines.append(f"{automation.name}: {'updated' if same else 'made'}")
    return lines


def remove() -> list[str]:
    """Removes the automations and the webhook's block; returns a line for each that was there. Raises NoServer."""
    _needs_server()
    lines = []
    with get_client(sync_client=True) as client:
        for name in [f"{PREFIX}{alert}" for alert in (*(alert.name for alert in ALERTS), MISSING)]:
            same = _of_name(client, name)
            for automation in same:
                client.delete_automation(automation)
            lines += [f"{name}: removed"] if same else []
        try:
            document = client.read_block_document_by_name(BLOCK, "webhook", include_secrets=False)
            assert document.id is not None
            client.delete_block_document(document.id)
        except ObjectNotFound:
            pass
    return lines


def _of_name(client: SyncPrefectClient, name: str) -> list[UUID]:
    return [automation.id for automation in client.read_automations_by_name(name)]


def _needs_server() -> None:
    if get_current_settings().api.url is None:
        raise NoServer(
            "Prefect is set to no server, and alerts are one's: start it (`prefect server start`) and set "
            "PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
