"""Policies that no artifact holds, on their way from the worker that trains to those that sample on this host.

Rounds between checkpoints store no weights: the worker that made one has it in memory, and any other would have to
train it once more. Where a run has a worker of its own for sampling, the one that trains leaves the weights in the
scratch folder; they are those of the artifact only where they have the fingerprint that it records.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.store.artifacts import Artifact, Store
from tuning.atomic import whole_folder

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from tuning.models.config import DecoderConfig

FOLDER = "policies"


def place_of(store: Store, digest: str) -> Path:
    """Where a policy is left for the other workers of this host."""
    return store.scratch / FOLDER / digest


def claim(store: Store, digest: str, run: str) -> None:
    """Notes that a run reads a policy which may be left here: it stays until no run does (`drop`)."""
    claims = _claims(store, digest)
    # What is lost is trained once more.
    with contextlib.suppress(OSError):
        claims.mkdir(parents=True, exist_ok=True)
        (claims / run).touch()


def _claims(store: Store, digest: str) -> Path:
    return store.scratch / FOLDER / f"{digest}.readers"


def hand_over(artifact: Artifact, config: DecoderConfig, params: Any) -> None:
    """Leaves the policy of an artifact that stores none for the other workers of this host."""
    from tuning.models.huggingface import save_decoder

    place = place_of(artifact.store, artifact.digest)
    if place.exists():
        return
    # What is lost is trained once more.
    with whole_folder(place, synced=False) as partial:
        save_decoder(partial, config, params, {})


def taken(artifact: Artifact, mesh: Mesh | None) -> tuple[DecoderConfig, Any] | None:
    """The policy of an artifact that another worker has left here; None where there is none, or another one."""
    from tuning import precision
    from tuning.models.huggingface import fingerprint, load_decoder

    place = place_of(artifact.store, artifact.digest)
    if not place.is_dir():
        return None
    wanted = json.loads(artifact.local("policy.json").read_text())["fingerprint"]
    # The fingerprint is of the type that it was trained in.
    with precision.using(artifact.manifest["config"]["compute"]["dtype"]):
        try:
            config, params = load_decoder(place, mesh)
        except (OSError, ValueError):
            # It was collected meanwhile, or a disk has lost a part of it: a whole one may take its place.
            shutil.rmtree(place, ignore_errors=True)
            return None
        if fingerprint(params) != wanted:
            # A better one may take its place.
            shutil.rmtree(place, ignore_errors=True)
            return None
    return config, precision.in_real(params)


def drop(store: Store, digest: str, run: str) -> None:
    """Removes what was left of a policy which a run reads no more, unless another one does."""
    claims = _claims(store, digest)
    with contextlib.suppress(OSError):
        (claims / run).unlink()
    with contextlib.suppress(OSError):
        claims.rmdir()
    if claims.exists():
        # Another run's claim is in it.
        return
    shutil.rmtree(place_of(store, digest), ignore_errors=True)
