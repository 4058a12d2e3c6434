"""The prompts that a policy and its ancestors were trained on, found by way of manifests.

A prompt has one name by its text, and one by each of its turns without the system's (`rlhf.tuning.data.pipeline`); a
document has one by its content. The walk ends at a policy that stores the names of its ancestors (stage `start`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.stages.common.tables import batches, table_paths
from rlhf.stages.contract.registry import modules, stage
from rlhf.stages.store.artifacts import Artifact, ArtifactError
from rlhf.tuning.rows import PROMPT_GROUP, write_arrow
from rlhf.tuning.texts import normal

FOLDER = "trained"
"""The folder of an artifact's table of names."""
DATA = ("prepare", "fresh")
"""Stages whose artifacts are data."""
SPLITS = ("sft", "preference", "labelled", "prompts")
"""Parts of the data for training."""
COLUMNS = ("id", "prompt", "content", "turns", "group")
"""The columns that name a row of any part."""
_SAMPLED = ("rollout", "refill")
_BLIND = ("base", "evaluate")
"""Stages whose artifacts have not learned from training data."""


def names_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row, first that of its text."""
    if not row["prompt"]:
        return [f"content {row.get('content') or row['id']}"]
    return [
        f"prompt {_digest(normal(row['prompt']))}",
        *(f"turns {name}" for name in row.get("turns") or ()),
        *_grouped(row),
    ]


def _grouped(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's turns within the group that its record names; none without such a group.

    Records name groups if tasks differ only in the system's turn, so that turns alone do not identify a prompt.
    """
    group = row.get("group") or PROMPT_GROUP
    if group.startswith(PROMPT_GROUP):
        return []
    return [f"turns {name} of {_digest(group)}" for name in row.get("turns") or ()]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def prompts_among(names: Collection[str]) -> int:
    """Return the number of prompts and documents among names: each has one besides those of its turns."""
    return sum(not name.startswith("turns ") for name in names)


def is_trained(row: Mapping[str, Any], trained: Collection[str]) -> bool:
    """Whether a training row was trained on before: its text, or each of the turns that it trains.

    Turns of a record with a named group count only within that group.
    """
    text, *turns = names_of(row)
    turns = _grouped(row) or turns
    return text in trained or (bool(turns) and all(name in trained for name in turns))


def was_seen(row: Mapping[str, Any], trained: Collection[str]) -> bool:
    """Whether the text or any turn of a held-out row was trained on."""
    return any(name in trained for name in names_of(row))


def trained_names(policy: Artifact) -> set[str]:
    """Return the names of all prompts that a policy and its ancestors were trained on.

    Raise ArtifactError if an ancestor is not in the store any more, because its training data is unknown.
    """
    found: set[str] = set()
    seen: set[tuple[str, str, str]] = set()
    # By digest and part: the data, and the ids of its rows (None: all). Rounds share a table, which is read once.
    tables: dict[tuple[str, str], tuple[Artifact, set[str] | None]] = {}
    waiting = [policy]
    while waiting:
        artifact = waiting.pop()
        identity = (artifact.stage, artifact.key, artifact.digest)
        if identity in seen:
            continue
        seen.add(identity)
        if artifact.has(f"{FOLDER}/"):
            found.update(read_names(artifact))
            continue
        # The policy is the chosen candidate, which has not seen the data of later rounds.
        chosen = f"candidate_{artifact.metrics['round']:03d}" if artifact.stage == "select" else None
        for role, ref in artifact.manifest["inputs"].items():
            if ref["stage"] in _BLIND or chosen not in (None, role):
                continue
            source = _input(artifact, role, ref)
            if ref["stage"] not in DATA:
                waiting.append(source)
                continue
            ids = _sampled(artifact) if artifact.stage in _SAMPLED else None
            for part in _parts(artifact, role):
                before = tables.get((source.digest, part), (source, set()))[1]
                tables[source.digest, part] = source, None if ids is None or before is None else before | ids
    for (_, part), (data, ids) in tables.items():
        for row in rows_of(data, part) if data.has(f"{part}/") else ():
            if ids is None or row["id"] in ids:
                found.update(names_of(row))
    return found


def _sampled(rollouts: Artifact) -> set[str]:
    """Return the ids of the prompts of rollouts."""
    columns = (batch.column("prompt_id").to_pylist() for batch in batches(rollouts, "rollouts/", ["prompt_id"]))
    return {name for column in columns for name in column}


def _input(artifact: Artifact, role: str, ref: Mapping[str, str]) -> Artifact:
    found = artifact.store.with_digest(ref["stage"], ref["key"], ref["digest"])
    if found is None:
        raise ArtifactError(
            f"{artifact.url}: its {role} ({ref['stage']}/{ref['key'][:12]}) is gone from {artifact.store.shown}, "
            "so the policy's training data is unknown; restore a backup, or promote another policy"
        )
    return found


def _parts(artifact: Artifact, role: str) -> Sequence[str]:
    """Return the parts of the data that a stage reads in this role and trains on."""
    reads = stage(artifact.stage).reads.get(role) if artifact.stage in modules() else None
    wanted = {part.rstrip("/") for part in reads.parts} if reads is not None and reads.parts else set(SPLITS)
    return [part for part in SPLITS if part in wanted]


def rows_of(data: Artifact, part: str) -> Iterator[dict[str, Any]]:
    """Yield the naming columns of the rows of a part, in file order."""
    for path in table_paths(data, part):
        file = pq.ParquetFile(path)
        for batch in file.iter_batches(columns=[c for c in COLUMNS if c in file.schema_arrow.names]):
            yield from batch.to_pylist()


def write_names(folder: Path, names: Collection[str]) -> None:
    """Write the table of names into a folder."""
    write_arrow(folder / "part-00000.parquet", pa.table({"name": pa.array(sorted(names), pa.string())}))


def read_names(artifact: Artifact) -> set[str]:
    """Return the names that an artifact stores (`write_names`)."""
    return {name for batch in batches(artifact, f"{FOLDER}/", ["name"]) for name in batch.column("name").to_pylist()}
