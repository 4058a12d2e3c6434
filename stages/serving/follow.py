"""`rlhf serve NAME --follow`: a promotion or a rollback of the name replaces the policy of the server.

A policy that the server cannot take (another base model, weights that are not stored) leaves the old one, and the
reason is printed; a restart takes it.
"""

from __future__ import annotations

import sys
import threading

from rlhf.stages.serving.policy import folder_of
from rlhf.stages.serving.server import Server
from rlhf.stages.serving.settings import Named
from rlhf.stages.serving.weights import Weights
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.registry import Entry
from rlhf.tuning.models.config import UnsupportedModel

SECONDS = 30.0
"""Between two looks at the name."""


class Follower:
    """Keeps one server at the newest entry of a name."""

    def __init__(self, server: Server, weights: Weights, store: Store, named: Named, base: str):
        """named: the entry that is served. base: key of its base model."""
        self._server, self._weights, self._store, self._base = server, weights, store, base
        self._named = named
        self._said: str | None = None
        self._refused: int | None = None
        """An entry whose policy this server cannot load: each try holds back all requests."""

    def start(self) -> None:
        """Look at the name in a thread, until the process ends."""
        threading.Thread(target=self._run, name="follower", daemon=True).start()

    def _run(self) -> None:
        while self._server.live.failure is None:
            threading.Event().wait(SECONDS)
            self.look()

    def look(self) -> None:
        """Take the policy of the newest entry, if it is another one; print why if that fails."""
        entry: Entry | None = None
        try:
            entry = registry.current(self._store, self._named.name)
            if entry is not None and entry.number not in (self._named.entry, self._refused):
                self._take(entry)
                self._say(f"serving {self._named.name} {entry.number}: {self._server.name}")
        # A store that does not answer, or a policy that is gone: the old one goes on answering.
        except Exception as error:
            if entry is not None and isinstance(error, UnsupportedModel):
                self._refused = entry.number
            which = self._named.name if entry is None else f"{self._named.name} {entry.number}"
            self._say(f"{which} is not served: {error}")

    def _take(self, entry: Entry) -> None:
        policy = entry.policy
        if policy.base != self._base:
            raise ValueError("its base model is another one: restart the server")
        artifact = self._store.with_digest(policy.stage, policy.key, policy.digest)
        if artifact is None:
            raise ValueError(f"its policy is gone from {self._store.shown}: roll back, or promote another")
        self._store.ensure_whole(artifact)
        folder = folder_of(artifact)
        if folder is None:
            raise ValueError("its weights are not stored: restart the server, which rebuilds them")
        self._weights.change(policy.trained or policy.digest, folder)
        self._named = Named(name=self._named.name, entry=entry.number)
        self._server.named, self._server.name = self._named, f"{policy.run}:{policy.node}"

    def _say(self, line: str) -> None:
        if line != self._said:
            print(line, file=sys.stderr, flush=True)
        self._said = line
