"""A receiver of alerts, and the automations of infra/alerts.yaml that call it."""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.flows.prefect_server import PROJECT, Prefect

FILE = PROJECT / "infra" / "alerts.yaml"
BLOCK = """
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock as Block
fields = {"subject": "{{subject}}", "body": "{{body}}"}
print(Block(name="tests", url=sys.argv[1], json_data=fields).save("rlhf-alerts", overwrite=True))
"""


def automations(block_id: str) -> list[dict[str, Any]]:
    """The automations, as `prefect automation create` reads them."""
    found: list[dict[str, Any]] = yaml.safe_load(FILE.read_text().replace("BLOCK_ID", block_id))["automations"]
    return found


class Receiver(http.server.ThreadingHTTPServer):
    """Keeps the bodies of what is posted to it."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    def alert(self, subject: str) -> dict[str, str] | None:
        return next((b for b in list(self.bodies) if subject in b["subject"]), None)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def block(prefect: Prefect, receiver: Receiver) -> str:
    """Saves the block that notifies the receiver; returns its id."""
    command = [sys.executable, "-c", BLOCK, f"http://127.0.0.1:{receiver.server_address[1]}/"]
    done = subprocess.run(command, env=prefect.env, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout.split()[-1]


def install(prefect: Prefect, receiver: Receiver, folder: Path) -> None:
    """Creates the automations, as docs/guides/operations.md says."""
    file = folder / "alerts.yaml"
    file.write_text(FILE.read_text().replace("BLOCK_ID", block(prefect, receiver)))
    prefect.command("automation", "create", "--from-file", str(file))
