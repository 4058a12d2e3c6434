"""Artifacts whose bytes are those that were committed: what a run looks at before a stage reads them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

from rlhf.stages.store.artifacts import Artifact, ArtifactError, Store
from rlhf.stages.store.damage import set_aside


class Whole:
    """What a run knows to be whole. A disk may change bytes where no size tells it; of a remote store they are checked
    as they arrive."""

    def __init__(self, store: Store, tell: Callable[[str], None], check_time: Callable[[], None]):
        """check_time: called by a thread that waits for another's look, every second; what it raises ends the wait."""
        self._store, self._tell, self._check_time = store, tell, check_time
        self._digests: set[str] = set()
        self._lock = threading.Lock()
        self._looks = defaultdict[str, threading.RLock](threading.RLock)
        """By digest: one thread makes a damaged artifact again. It waits for looks at what that one is made of at most,
        so that no two wait for each other."""

    def add(self, digest: str) -> None:
        """Notes that an artifact was committed by this run."""
        self._digests.add(digest)

    def ensure(
        self, name: str, artifact: Artifact, made: Callable[[], Mapping[str, Artifact]], again: Callable[[], object]
    ) -> None:
        """Has a node's artifact made again where it is damaged, which is told.

        made: the artifacts of nodes by now: where the node's is another one, another thread has made it again.
        again: makes it.
        """
        if not self._store.is_local or artifact.digest in self._digests:
            return
        with self._lock:
            look = self._looks[artifact.digest]
        while not look.acquire(timeout=1.0):
            self._check_time()
        try:
            if artifact.digest in self._digests or made()[name].digest != artifact.digest:
                return
            fault = self._store.verify(artifact)
            if fault is not None:
                moved = set_aside(self._store, artifact.stage, artifact.key, self._tell, self._check_time)
                self._tell(f"! {name}: {moved or fault}; computed again")
                again()
                # One that another run has recorded is not computed again here.
                if moved is None and (fault := self._store.verify(made()[name])):
                    raise ArtifactError(f"{name}: {made()[name].url} is damaged ({fault})")
            self._digests.add(artifact.digest)
        finally:
            look.release()
