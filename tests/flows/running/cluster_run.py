"""A run on a Ray cluster, or one beside it, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlhf.stages.store.artifacts import Store
from tests.support import RLHF


class Run:
    """A run as a process, and its lines as they come."""

    all: ClassVar[list[Run]] = []

    def __init__(
        self,
        store: Path,
        *options: str,
        recipe: str = "smoke",
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ):
        command = [*prefix, RLHF, "run", recipe, "--no-prefect", "--store", str(store), "--name", "run", *options]
        self.store, self.lines = store, list[str]()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment or dict(os.environ)
        )
        self.all.append(self)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, said: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while said not in self.text:
            assert time.monotonic() < end and self.process.poll() is None, self.text
            time.sleep(0.2)

    def ends(self, code: int = 0, seconds: float = 240) -> str:
        assert self.process.wait(seconds) == code, self.text
        self._reader.join(10)
        return self.text

    def nodes(self) -> dict[str, tuple[Any, ...]]:
        """Key and digest of each node; an export contains times and devices of the run, which differ."""
        record = Store(str(self.store)).read_json("runs", "run", "run.json")
        return {name: (e["key"], e.get("digest")) for name, e in record["nodes"].items() if name != "export"}


def sets(values: list[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]
