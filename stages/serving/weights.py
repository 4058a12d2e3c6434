"""Another policy without a restart: `POST /weights` names files below the server's root, which replace its weights.

Running requests finish on the old policy, and later ones wait for the new one. If a policy does not fit, the server
refuses it and keeps the old one.
"""

from __future__ import annotations

import functools
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf.stages.serving.errors import RequestError
from rlhf.stages.serving.server import Server
from rlhf.tuning.rollout.servers.transfer import pull


class NotTaken(RequestError):
    """This server takes no weights."""

    status, code = 403, "weights_not_taken"


class Given(BaseModel):
    """POST /weights: a `Transfer` below the server's root."""

    model_config = ConfigDict(extra="forbid")
    policy: Annotated[str, Field(min_length=1, max_length=256)]
    """Its name in answers (`weight_version`)."""
    folder: Annotated[str, Field(max_length=1024)]
    """Its folder below the root."""
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
    """SHA-256 of each file by its name."""


class Weights:
    """Changes the policy of one server. Thread-safe."""

    def __init__(self, server: Server, root: str | None):
        """root: folder or fsspec URL of policies; None: the server takes none."""
        self._server, self._root = server, root
        self._lock = threading.Lock()
        """Held while a policy is read."""

    def take(self, given: Given) -> dict[str, str]:
        """Serve a policy from now on, unless it is served already.

        Raises NotTaken, ValueError for files that are missing, damaged or of another model, and WeightsLost.
        """
        if self._root is None:
            raise NotTaken("this server takes no weights: start it with --take-weights and a folder or URL")
        with self._lock, tempfile.TemporaryDirectory(prefix="rlhf-weights-") as scratch:
            if self._server.policy != given.policy:
                try:
                    folder = pull(self._root, given.folder, given.files, Path(scratch))
                except FileNotFoundError as error:
                    raise ValueError(
                        f"{given.folder} is not complete below the root of this server: {error}"
                    ) from error
                self._swap(given.policy, folder)
        return {"policy": given.policy}

    def change(self, policy: str, folder: Path) -> None:
        """Serve the policy of a model folder of this machine. Raises UnsupportedModel and WeightsLost."""
        with self._lock:
            self._swap(policy, folder)

    def _swap(self, policy: str, folder: Path) -> None:
        self._server.live.swap(functools.partial(self._load, policy, folder))

    def _load(self, name: str, folder: Path, engine: Any, generation: int) -> None:
        from rlhf.tuning.models.config import UnsupportedModel
        from rlhf.tuning.rollout.engine.folder import load_folder
        from rlhf.tuning.rollout.engine.live import WeightsLost

        try:
            load_folder(engine, folder)
        except UnsupportedModel:
            raise
        except Exception as error:
            self._server.policies[generation - 1] = None
            raise WeightsLost(f"policy {name} could not be loaded, and the old one was dropped: {error}") from error
        self._server.policies[generation] = name
