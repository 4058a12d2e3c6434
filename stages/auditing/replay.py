"""A law that computes: an update that is made again has the content that it had."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from stages.auditing.laws import Finding, Law
from stages.auditing.run import AuditedRun
from stages.store.artifacts import Artifact, Store
from stages.worker.client import Worker
from stages.worker.protocol import Request


def replayed(run: AuditedRun) -> Finding:
    """The last round's update, made once more from its stored rollouts and scores, has the same content."""
    finding = Finding("updates")
    updates = [round_.update for round_ in run.rounds if round_.update is not None]
    if not updates:
        return finding
    stored = updates[-1]
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        again = _made_again(run, stored, Path(folder))
    name = f"round-{len(updates) - 1:03d}.update"
    if again["device"] != stored.manifest["device"] and again["digest"] != stored.digest:
        finding.left_out.append(f"{name} was made on {stored.manifest['device']}: bits are promised on one device only")
        return finding
    now, then = again["digest"], stored.digest
    finding.check(now == then, f"{name} made again is {now[:12]}, the run has {then[:12]}")
    return finding


def _made_again(run: AuditedRun, stored: Artifact, folder: Path) -> dict[str, str]:
    """The manifest of the artifact made again in a store of its own, whose other artifacts are links to the run's."""
    for artifact in run.artifacts.values():
        place = folder / "store" / "artifacts" / artifact.stage / artifact.key
        if (artifact.stage, artifact.key) != (stored.stage, stored.key) and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(artifact.local().absolute(), place, target_is_directory=True)
    manifest = stored.manifest
    request = Request(
        stage=stored.stage,
        key=stored.key,
        key_parts=manifest["key_parts"],
        config=manifest["config"],
        inputs={name: (source["stage"], source["key"]) for name, source in manifest["inputs"].items()},
        seed=manifest["seed"],
        store=Store(str(folder / "store")).url,
        run="audit",
    )
    worker = Worker(folder / "worker.log")
    try:
        return worker.run(request, lambda event: None)
    finally:
        worker.close()


LAWS = [Law("replay", "an update that is made again has the same content", replayed, deep=True)]
