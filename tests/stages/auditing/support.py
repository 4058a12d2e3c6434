"""Artifacts of a run, edited after they were made."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.stages.auditing.audit import LAWS, audit
from rlhf.stages.auditing.laws import Finding
from rlhf.stages.auditing.run import AuditedRun
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.disk import sha256_file
from rlhf.stages.store.manifests import with_checksum


def edited(
    run: tuple[Store, dict[str, Any]], node: str, part: str, edit: Callable[[list[dict[str, Any]]], Any]
) -> None:
    """Change rows of a table below `part`; its first file then has all rows."""

    def rewrite(manifest: dict[str, Any]) -> None:
        paths = sorted(AuditedRun(*run).artifacts[node].local(part).glob("*.parquet"))
        tables = [pq.read_table(path) for path in paths]
        rows = [row for table in tables for row in table.to_pylist()]
        edit(rows)
        assert rows != [row for table in tables for row in table.to_pylist()]
        for path in paths:
            pq.write_table(pa.Table.from_pylist(rows if path == paths[0] else [], schema=tables[0].schema), path)
            (entry,) = [f for f in manifest["files"] if path.as_posix().endswith(f["path"])]
            entry |= {"size": path.stat().st_size, "sha256": sha256_file(path)}

    restated(run, node, rewrite)


def restated(run: tuple[Store, dict[str, Any]], node: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest of a node."""
    artifact = AuditedRun(*run).artifacts[node]
    edit(artifact.manifest)
    path = Path(run[0].root, "artifacts", artifact.stage, artifact.key, "manifest.json")
    path.write_text(json.dumps(with_checksum(artifact.manifest)))


def change(number: int = 0, **values: Any) -> Callable[[list[dict[str, Any]]], None]:
    """An edit that sets columns of a row; a function computes the value from the old one."""

    def edit(rows: list[dict[str, Any]]) -> None:
        rows[number] |= {name: v(rows[number][name]) if callable(v) else v for name, v in values.items()}

    return edit


def plus(number: float) -> Callable[[float], float]:
    return lambda value: value + number


def drop_last(rows: list[dict[str, Any]]) -> None:
    rows.pop()


def broken(run: tuple[Store, dict[str, Any]]) -> dict[str, list[str]]:
    """The cases of each broken law."""
    return {v.law.name: v.broken for v in audit(*run) if v.broken}


def finding_of(name: str, store: Store, record: dict[str, Any]) -> Finding:
    """The finding of one law."""
    (finding,) = audit(store, record, [law for law in LAWS if law.name == name])
    return finding
