"""The context of a stage by itself, and an application on loopback."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.stages.contract.definition import Context
from rlhf.stages.serving.web import Web
from tests.support import until


def context(config: Any, out: Path, work: Path | None = None, **given: Any) -> Context:
    """A context whose folders are there; without a work folder that is the one of the output."""
    work = out if work is None else work
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    usual: dict[str, Any] = {"inputs": {}, "seed": 0, "memory": {}, "log": print, "progress": lambda *a, **k: None}
    return Context(config=config, out=out, work=work, **usual | given)


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """Serves an application on loopback in a thread: its URL."""
    web = Web(app, "127.0.0.1", 0)
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    until(lambda: web.started)
    try:
        yield web.url
    finally:
        web.should_exit = True
        thread.join()
