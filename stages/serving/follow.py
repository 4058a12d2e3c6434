"""`rlhf serve NAME --follow`: a promotion or a rollback of the name replaces the policy of the server.

If the server cannot load a policy (another base model, weights that are not stored), it keeps the old policy and prints
the reason; a restart loads the new one.
"""

from __future__ import annotations

import sys
import threading
import time

from rlhf.stages.serving.policy import folder_of
from rlhf.stages.serving.server import Server
from rlhf.stages.serving.settings import Named
from rlhf.stages.serving.weights import Weights
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.registry import Entry
from rlhf.tuning.models.config import UnsupportedModel

SECONDS = 30.0
"""Between two reads of the name."""


class Follower:
    """Keeps a server at the newest entry of a name."""

    def __init__(self, server: Server, weights: Weights, store: Store, named: Named, base: str):
        """named: the entry that is served. base: key of its base model."""
        self._server, self._weights, self._store, self._named, self._base = server, weights, store, named, base
        self._printed = ""
        self._refused = 0
        """An entry that this server cannot load: each try holds back all requests."""

    def start(self) -> None:
        """Read the name in a thread until the process ends."""
        threading.Thread(target=self._run, name="follower", daemon=True).start()

    def _run(self) -> None:
        while self._server.live.failure is None:
            time.sleep(SECONDS)
            self.look()

    def look(self) -> None:
        """Load the policy of the newest entry if it has changed; print the reason if that fails."""
        which = self._named.name
        try:
            entry = registry.current(self._store, which)
            if entry is None or entry.number in (self._named.entry, self._refused):
                return
            which = f"{which} {entry.number}"
            self._load(entry)
            line = f"serving {which}: {self._server.name}"
        # If the store does not answer or the policy is gone, the old policy continues to answer.
        except Exception as error:
            line = f"{which} is not served: {error}"
        if line != self._printed:
            print(line, file=sys.stderr, flush=True)
        self._printed = line

    def _load(self, entry: Entry) -> None:
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
        try:
            self._weights.change(policy.trained or policy.digest, folder)
        except UnsupportedModel:
            self._refused = entry.number
            raise
        self._named = Named(name=self._named.name, entry=entry.number)
        self._server.named, self._server.name = self._named, f"{policy.run}:{policy.node}"
