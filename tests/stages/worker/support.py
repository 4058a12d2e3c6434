"""A request for a stage without inputs, and a listener that hears nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.stages.worker.protocol import Report, Request


def request(store: Path, name: str = "base", **config: Any) -> Request:
    """What a session sends for a stage without inputs."""
    settings = {"source": "random:tiny"} | config
    return Request(name, "k" * 64, {}, settings, {}, seed=7, store=str(store), run="test")


def ignore(event: Report) -> None:
    pass
