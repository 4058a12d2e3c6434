"""Policies that no artifact holds, on their way from the worker that trains to those that sample.

Rounds between checkpoints store no weights: the worker that made one has it in memory, and any other would have to
train it once more. The processes that train write their shards to the store, below `handed/`. A reader loads those of
its own mesh, and takes them if they have the fingerprint that the artifact records.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.stages.store import disk, transfers
from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.manifests import sums_of
from rlhf.stages.store.orphans import READERS
from rlhf.stages.store.work import is_chunk
from rlhf.tuning import multihost

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf.tuning.models.config import DecoderConfig

FOLDER, COMPLETE = "handed", "complete.json"
"""In the store, and in the folder of a policy: written last, with the checksums of its files."""


def claim(store: Store, digest: str, run: str) -> None:
    """Notes that a run reads a policy, which stays until no run does (`drop`)."""
    # A policy that is lost is trained once more. Clients of object stores have errors of their own.
    with contextlib.suppress(Exception):
        store.write_bytes(b"", FOLDER, f"{digest}{READERS}", run)


def drop(store: Store, digest: str, run: str) -> None:
    """Removes a policy that a run reads no more, unless another run does. `rlhf gc` removes what stays."""
    readers = f"{digest}{READERS}"
    with contextlib.suppress(Exception):
        store.remove(store.join(FOLDER, readers, run))
    with contextlib.suppress(Exception):
        if not store.names(FOLDER, readers):
            store.remove_folder(store.join(FOLDER, readers))
            _remove(store, digest)


def _remove(store: Store, digest: str) -> None:
    # The marker first: without it nothing takes the rest for a policy.
    with contextlib.suppress(FileNotFoundError):
        store.remove(store.join(FOLDER, digest, COMPLETE))
    store.remove_folder(store.join(FOLDER, digest))


def hand_over(artifact: Artifact, config: DecoderConfig, params: Any) -> None:
    """Leaves the policy of an artifact that stores none for other workers; every process of a group calls this."""
    from rlhf.tuning import precision
    from rlhf.tuning.models.huggingface import write_config
    from rlhf.tuning.training.checkpoint import save_tree

    store, parts = artifact.store, (FOLDER, artifact.digest)
    if multihost.from_primary(lambda: store.read_json(*parts, COMPLETE) is not None):
        return
    with _scratch(store) as name:
        folder = Path(name)
        save_tree(folder / "params", params)
        write_config(folder, config, False, {}, precision.real().name)
        files = transfers.files_of(folder)
        transfers.send(store, folder, store.join(*parts))
        multihost.barrier()
        multihost.from_primary(lambda: store.write_json({f["path"]: f["sha256"] for f in files}, *parts, COMPLETE))


def taken(artifact: Artifact, mesh: Mesh | None) -> tuple[DecoderConfig, Any] | None:
    """The policy of an artifact that another worker has left; None if there is none, or it is another one."""
    from rlhf.tuning import precision
    from rlhf.tuning.models.identity import fingerprint

    store, wanted = artifact.store, json.loads(artifact.local("policy.json").read_bytes())["fingerprint"]
    sums = multihost.from_primary(lambda: _complete(store, artifact.digest))
    if sums is None:
        return None
    policy = None
    # The fingerprint is of the type that it was trained in.
    with precision.using(artifact.manifest["config"]["compute"]["dtype"]), _scratch(store) as folder:
        found = None
        with contextlib.suppress(Exception):
            found = _loaded(store, artifact.digest, sums, Path(folder), mesh)
        if all(multihost.gather(found is not None)) and found is not None and fingerprint(found[1]) == wanted:
            policy = found
    if policy is not None:
        # In the type of this stage.
        return policy[0], precision.in_real(policy[1])
    if multihost.is_primary():
        # A whole one may take its place.
        with contextlib.suppress(Exception):
            _remove(store, artifact.digest)
    return None


def _complete(store: Store, digest: str) -> dict[str, str] | None:
    # A store that cannot be reached: the policy is trained once more.
    with contextlib.suppress(Exception):
        return sums_of(store.read_bytes(FOLDER, digest, COMPLETE))
    return None


def _loaded(store: Store, digest: str, sums: dict[str, str], folder: Path, mesh: Mesh | None) -> tuple[Any, Any]:
    """The policy on this mesh. Raises the errors of the store, OSError for a damaged file, and those of `load_tree`."""
    from rlhf.tuning.mesh import laid_out
    from rlhf.tuning.models.decoder import abstract_decoder
    from rlhf.tuning.models.huggingface import read_config
    from rlhf.tuning.training.checkpoint import load_tree

    def one(name: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not disk.fetched(store.fs, store.join(FOLDER, digest, name), folder / name, sums[name]):
            raise OSError(f"{store.address(FOLDER, digest, name)} differs from its checksum")

    def fetch(paths: Iterable[Path]) -> None:
        error: Exception | None = None
        try:
            # Zarr writes no file for a chunk of zeros.
            transfers.each(one, sums.keys() & {path.relative_to(folder).as_posix() for path in paths})
        except Exception as e:
            error = e
        # Orbax waits for all processes: either all of them begin to read, or none does.
        if not all(multihost.gather(error is None)):
            raise error or OSError("another process could not fetch its part")

    fetch(folder / name for name in sums if not is_chunk(f"/{name}"))
    config = read_config(folder)
    return config, load_tree(folder / "params", laid_out(abstract_decoder(config)[1], mesh), fetch)


def _scratch(store: Store) -> tempfile.TemporaryDirectory[str]:
    store.scratch.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(".part", ".handed.", store.scratch, ignore_cleanup_errors=True)
