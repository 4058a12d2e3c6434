"""Checks that the inputs of a stage have the bytes that were committed."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

from rlhf.stages.store.artifacts import Artifact, ArtifactError, Store
from rlhf.stages.store.damage import set_aside


class InputCheck:
    """The artifacts that a run has checked. A disk may change bytes and keep the size; bytes from a remote store are
    checked on arrival."""

    def __init__(self, store: Store, log: Callable[[str], None], check_time: Callable[[], None]):
        """check_time: called each second by a thread that waits for another thread's check; it may raise."""
        self._store, self._log, self._check_time = store, log, check_time
        self.checked: set[str] = set()
        """Digests of artifacts whose bytes are right."""
        self._lock = threading.Lock()
        self._checks = defaultdict[str, threading.RLock](threading.RLock)
        """By digest. While a thread recomputes an artifact it waits only for checks of that artifact's inputs, so two
        threads never wait for each other."""

    def ensure(
        self, name: str, artifact: Artifact, made: Callable[[], Mapping[str, Artifact]], recompute: Callable[[], object]
    ) -> None:
        """Recompute the artifact of a node if it is damaged, with a warning.

        made: the current artifacts of nodes; if the node's is another one, another thread has recomputed it.
        """
        if not self._store.is_local or artifact.digest in self.checked:
            return
        with self._lock:
            check = self._checks[artifact.digest]
        while not check.acquire(timeout=1.0):
            self._check_time()
        try:
            if artifact.digest in self.checked or made()[name].digest != artifact.digest:
                return
            if fault := self._store.verify(artifact):
                moved = set_aside(self._store, artifact.stage, artifact.key, self._log, self._check_time)
                self._log(f"! {name}: {moved or fault}; computed again")
                recompute()
                # An artifact that another run has recorded is not computed again.
                if moved is None and (fault := self._store.verify(made()[name])):
                    raise ArtifactError(f"{name}: {made()[name].url} is damaged ({fault})")
            self.checked.add(artifact.digest)
        finally:
            check.release()
