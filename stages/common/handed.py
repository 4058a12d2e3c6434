"""Policies that no artifact holds, on their way from the worker that trains to those that sample.

Rounds between checkpoints store no weights: the worker that made one has it in memory, and any other would have to
train it once more. Where a run has a worker of its own for sampling, the one that trains leaves the weights in the
scratch folder of their host, or in the store where the two are on different hosts; they are those of the artifact only
where they have the fingerprint that it records.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.store.artifacts import Artifact, Store
from tuning.atomic import whole_folder

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from tuning.models.config import DecoderConfig

FOLDER, FAR = "policies", "handed"
"""In the scratch folder of a host, and in the store."""
COMPLETE = "complete.json"
"""Written last in the store: the names of its files."""


def place_of(store: Store, digest: str) -> Path:
    """Where a policy is left for the other workers of this host."""
    return store.scratch / FOLDER / digest


def claim(store: Store, digest: str, run: str, far: bool = False) -> None:
    """Notes that a run reads a policy which may be left here, or in the store where `far`: it stays until no run does
    (`drop`)."""
    # What is lost is trained once more. Clients of object stores have errors of their own.
    with contextlib.suppress(Exception):
        if far:
            store.write_bytes(b"", FAR, _readers(digest), run)
        else:
            place = store.scratch / FOLDER / _readers(digest)
            place.mkdir(parents=True, exist_ok=True)
            (place / run).touch()


def _readers(digest: str) -> str:
    return f"{digest}.readers"


def hand_over(artifact: Artifact, config: DecoderConfig, params: Any, *, far: bool = False) -> None:
    """Leaves the policy of an artifact that stores none for the other workers of this host, or for those of others
    where `far`."""
    from tuning.models.huggingface import save_decoder

    store, digest = artifact.store, artifact.digest
    place = place_of(store, digest)
    # What is lost is trained once more.
    if not far:
        if not place.exists():
            with whole_folder(place, synced=False) as partial:
                save_decoder(partial, config, params, {})
        return
    there = store.read_json(FAR, digest, COMPLETE)
    if there is not None and set(there) <= set(store.names(FAR, digest)):
        return
    passing = place.with_name(f"{digest}.{uuid.uuid4().hex[:8]}")
    try:
        with whole_folder(passing, synced=False) as partial:
            save_decoder(partial, config, params, {})
        names = sorted(path.name for path in passing.iterdir())
        store.fs.makedirs(store.join(FAR, digest), exist_ok=True)
        for name in names:
            store.fs.put_file(str(passing / name), store.join(FAR, digest, name))
        store.write_json(names, FAR, digest, COMPLETE)
    finally:
        shutil.rmtree(passing, ignore_errors=True)


def taken(artifact: Artifact, mesh: Mesh | None) -> tuple[DecoderConfig, Any] | None:
    """The policy of an artifact that another worker has left here or in the store; None where there is none, or another
    one."""
    store, digest = artifact.store, artifact.digest
    place = place_of(store, digest)
    wanted = json.loads(artifact.local("policy.json").read_text())["fingerprint"]
    if place.is_dir():
        found = _loaded(artifact, place, wanted, mesh)
        if found is None:
            # It was collected meanwhile, or a disk has lost a part of it: a whole one may take its place.
            shutil.rmtree(place, ignore_errors=True)
        return found
    passing = place.with_name(f"{digest}.{uuid.uuid4().hex[:8]}")
    try:
        names = store.read_json(FAR, digest, COMPLETE)
        if names is None:
            return None
        passing.mkdir(parents=True)
        for name in names:
            store.fs.get_file(store.join(FAR, digest, name), str(passing / name))
        found = _loaded(artifact, passing, wanted, mesh)
    except FileNotFoundError:
        found = None
    except Exception:
        # Out of reach, of which a client has errors of its own: what it was is trained once more.
        return None
    finally:
        shutil.rmtree(passing, ignore_errors=True)
    if found is None:
        # A whole one may take its place.
        _remove_far(store, digest)
    return found


def _remove_far(store: Store, digest: str) -> None:
    # The mark first: what is removed in part is not there.
    with contextlib.suppress(Exception):
        store.remove(store.join(FAR, digest, COMPLETE))
    with contextlib.suppress(Exception):
        store.remove_folder(store.join(FAR, digest))


def _loaded(artifact: Artifact, place: Path, wanted: str, mesh: Mesh | None) -> tuple[DecoderConfig, Any] | None:
    """The policy in a folder where it is the wanted one, of which an artifact records the fingerprint."""
    from tuning import precision
    from tuning.models.huggingface import fingerprint, load_decoder

    # The fingerprint is of the type that it was trained in.
    with precision.using(artifact.manifest["config"]["compute"]["dtype"]):
        try:
            config, params = load_decoder(place, mesh)
        except (OSError, ValueError):
            return None
        if fingerprint(params) != wanted:
            return None
    return config, precision.in_real(params)


def drop(store: Store, digest: str, run: str, far: bool = False) -> None:
    """Removes what was left of a policy which a run reads no more, unless another one does."""
    if far:
        # What stays is collected.
        with contextlib.suppress(Exception):
            store.remove(store.join(FAR, _readers(digest), run))
        with contextlib.suppress(Exception):
            if not store.names(FAR, _readers(digest)):
                if store.is_local:
                    # Not where another claim has come meanwhile.
                    store.fs.rmdir(store.join(FAR, _readers(digest)))
                _remove_far(store, digest)
        return
    readers = store.scratch / FOLDER / _readers(digest)
    with contextlib.suppress(OSError):
        (readers / run).unlink()
    with contextlib.suppress(OSError):
        readers.rmdir()
    if not readers.exists():
        shutil.rmtree(place_of(store, digest), ignore_errors=True)
