"""What a policy and its ancestors were trained on: names of prompts, found by way of manifests.

A prompt has a name by its text, and one by each of its turns without the system's (`rlhf.tuning.data.overlap`); a
document has one by its content. The walk ends at a policy that brings the names of all before it (stage `start`).
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
"""The folder of the table of names, in an artifact that has one."""
DATA = ("prepare", "fresh")
"""Stages whose artifacts are data."""
SPLITS = ("sft", "preference", "labelled", "prompts")
"""Parts of the data that are trained on."""
COLUMNS = ("id", "prompt", "content", "turns", "group")
"""The columns of a row of any part that name it."""
_SAMPLED = ("rollout", "refill")
_BLIND = ("base", "evaluate")
"""Stages whose artifacts have learned nothing from data to train on."""


def names_of(row: Mapping[str, Any]) -> list[str]:
    """The names of a row, its text's first."""
    if not row["prompt"]:
        return [f"content {row.get('content') or row['id']}"]
    return [
        f"prompt {_digest(normal(row['prompt']))}",
        *(f"turns {name}" for name in row.get("turns") or ()),
        *_grouped(row),
    ]


def _grouped(row: Mapping[str, Any]) -> list[str]:
    """The names of a row's turns within the group that its record names; none where it names none.

    Where only the system's turn tells tasks apart, records name their groups: turns alone say nothing there.
    """
    group = row.get("group") or PROMPT_GROUP
    if group.startswith(PROMPT_GROUP):
        return []
    return [f"turns {name} of {_digest(group)}" for name in row.get("turns") or ()]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def prompts_among(names: Collection[str]) -> int:
    """How many prompts and documents there are among names: each has one besides those of its turns."""
    return sum(not name.startswith("turns ") for name in names)


def is_trained(row: Mapping[str, Any], trained: Collection[str]) -> bool:
    """Whether a row to train on was trained on before: its text, or each of the turns that it trains.

    Turns of a record that names its group are those of the same group alone.
    """
    text, *turns = names_of(row)
    turns = _grouped(row) or turns
    return text in trained or (bool(turns) and all(name in trained for name in turns))


def was_seen(row: Mapping[str, Any], trained: Collection[str]) -> bool:
    """Whether a held-out row says in any way what was trained on."""
    return any(name in trained for name in names_of(row))


def trained_names(policy: Artifact) -> set[str]:
    """The names of all prompts that a policy and its ancestors were trained on.

    Raises ArtifactError where an ancestor is not in the store any more: its training data is unknown.
    """
    found: set[str] = set()
    seen: set[str] = set()
    learned = _Learned()
    waiting = [policy]
    while waiting:
        artifact = waiting.pop()
        identity = f"{artifact.stage}/{artifact.key}/{artifact.digest}"
        if identity in seen:
            continue
        seen.add(identity)
        if artifact.has(f"{FOLDER}/"):
            found.update(read_names(artifact))
            continue
        # Of several candidates the chosen one is the policy: what the later rounds saw it has not.
        chosen = f"candidate_{artifact.metrics['round']:03d}" if artifact.stage == "select" else None
        for role, ref in artifact.manifest["inputs"].items():
            if ref["stage"] in _BLIND or chosen not in (None, role):
                continue
            source = _input(artifact, role, ref)
            if ref["stage"] in DATA:
                learned.add(artifact, role, source)
            else:
                waiting.append(source)
    return found.union(learned.names())


def _input(artifact: Artifact, role: str, ref: Mapping[str, str]) -> Artifact:
    found = artifact.store.with_digest(ref["stage"], ref["key"], ref["digest"])
    if found is None:
        raise ArtifactError(
            f"{artifact.url}: its {role} ({ref['stage']}/{ref['key'][:12]}) is gone from {artifact.store.shown}: it is "
            "not known what the policy was trained on; bring it back from a backup, or promote another policy"
        )
    return found


class _Learned:
    """Rows of data that were learned from. Rounds share a table, which is read once."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, str], tuple[Artifact, set[str] | None]] = {}
        """By digest and part: the data, and ids of the rows; None: all of them."""

    def add(self, artifact: Artifact, role: str, data: Artifact) -> None:
        """Notes the rows of `data` that an artifact has learned from."""
        ids = None
        if artifact.stage in _SAMPLED:
            columns = (batch.column("prompt_id").to_pylist() for batch in batches(artifact, "rollouts/", ["prompt_id"]))
            ids = {name for column in columns for name in column}
        for part in _parts(artifact, role):
            before = self._tables.get((data.digest, part), (data, set()))[1]
            both = None if ids is None or before is None else before | ids
            self._tables[data.digest, part] = data, both

    def names(self) -> Iterator[str]:
        """The names of all those rows."""
        for (_, part), (data, ids) in self._tables.items():
            for row in rows_of(data, part) if data.has(f"{part}/") else ():
                if ids is None or row["id"] in ids:
                    yield from names_of(row)


def _parts(artifact: Artifact, role: str) -> Sequence[str]:
    """The parts of the data that a stage trains on among those that it reads in this role."""
    reads = stage(artifact.stage).reads.get(role) if artifact.stage in modules() else None
    wanted = {part.rstrip("/") for part in reads.parts} if reads is not None and reads.parts else set(SPLITS)
    return [part for part in SPLITS if part in wanted]


def rows_of(data: Artifact, part: str) -> Iterator[dict[str, Any]]:
    """The naming columns of the rows of a part, in file order."""
    for path in table_paths(data, part):
        file = pq.ParquetFile(path)
        for batch in file.iter_batches(columns=[c for c in COLUMNS if c in file.schema_arrow.names]):
            yield from batch.to_pylist()


def write_names(folder: Path, names: Collection[str]) -> None:
    """Writes the table of names into a folder."""
    write_arrow(folder / "part-00000.parquet", pa.table({"name": pa.array(sorted(names), pa.string())}))


def read_names(artifact: Artifact) -> set[str]:
    """The names that an artifact brings (`write_names`)."""
    return {name for batch in batches(artifact, f"{FOLDER}/", ["name"]) for name in batch.column("name").to_pylist()}
