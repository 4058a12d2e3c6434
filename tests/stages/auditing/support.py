"""Artifacts of a run that say something else than what was made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.stages.auditing.laws import audit
from rlhf.stages.auditing.run import AuditedRun
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.disk import sha256_file
from rlhf.stages.store.manifests import with_checksum


def edited(
    run: tuple[Store, dict[str, Any]], node: str, part: str, edit: Callable[[list[dict[str, Any]]], Any]
) -> None:
    """Changes rows of an artifact's table below `part`, and what its manifest says of its files: the first one has all
    rows then, the others none."""
    store, record = run
    artifact = AuditedRun(store, record).artifacts[node]
    paths = sorted(artifact.local(part).glob("*.parquet"))
    tables = [pq.read_table(path) for path in paths]
    rows = [row for table in tables for row in table.to_pylist()]
    edit(rows)
    manifest = artifact.manifest
    for path in paths:
        pq.write_table(pa.Table.from_pylist(rows if path == paths[0] else [], schema=tables[0].schema), path)
        (entry,) = [f for f in manifest["files"] if path.as_posix().endswith(f["path"])]
        entry |= {"size": path.stat().st_size, "sha256": sha256_file(path)}
    Path(store.root, "artifacts", artifact.stage, artifact.key, "manifest.json").write_text(
        json.dumps(with_checksum(manifest))
    )


def restated(run: tuple[Store, dict[str, Any]], node: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Changes what the manifest of a node says."""
    store, record = run
    artifact = AuditedRun(store, record).artifacts[node]
    edit(artifact.manifest)
    path = Path(store.root, "artifacts", artifact.stage, artifact.key, "manifest.json")
    path.write_text(json.dumps(with_checksum(artifact.manifest)))


def broken(run: tuple[Store, dict[str, Any]]) -> dict[str, list[str]]:
    """The cases of each broken law."""
    return {v.law.name: v.broken for v in audit(*run) if v.broken}
