"""A law that computes: an update that is made again has the content that it had."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from rlhf.stages.auditing.laws import Finding, Law
from rlhf.stages.auditing.run import AuditedRun
from rlhf.stages.contract.fingerprint import library_versions, reached
from rlhf.stages.contract.registry import stage
from rlhf.stages.store.artifacts import MANIFEST, Artifact, Store
from rlhf.stages.worker.client import CodeChanged, StageFailed, Worker
from rlhf.stages.worker.protocol import Request


def replayed(run: AuditedRun, finding: Finding) -> None:
    """The last round's update, made once more from its stored rollouts and scores, has the same content."""
    updates = [(f"{round_.name}.update", round_.update) for round_ in run.rounds if round_.update is not None]
    if not updates:
        return
    name, stored = updates[-1]
    if why := _changed_since(stored):
        finding.left_out.append(f"{name}: {why}")
        return
    try:
        with tempfile.TemporaryDirectory(prefix="audit-") as folder:
            again = _made_again(run, stored, Path(folder))
    except (CodeChanged, StageFailed) as e:
        finding.left_out.append(f"{name}: {e}")
        return
    now, then = again["digest"], stored.digest
    finding.check(now == then, f"{name} made again is {now[:12]}, the run has {then[:12]}")


def _changed_since(stored: Artifact) -> str:
    """What is not as it was when the artifact was made, so that other bits would mean nothing; empty where all is."""
    definition = stage(stored.stage)
    parts = stored.manifest["key_parts"]
    config = definition.config.model_validate(stored.manifest["config"], strict=False)
    code = reached(definition.module, *definition.loads(config))
    if sorted(code.modules.values()) != sorted(parts["code"].values()):
        return "the code has changed since"
    if library_versions(definition.libraries) != parts["versions"]:
        return "versions of libraries have changed since"
    return ""


def _made_again(run: AuditedRun, stored: Artifact, folder: Path) -> dict[str, str]:
    """The manifest of the artifact made again in a store of its own, whose other artifacts are links to the run's."""
    for artifact in run.artifacts.values():
        if (artifact.stage, artifact.key) != (stored.stage, stored.key):
            _link(artifact, folder / "store" / "artifacts" / artifact.stage)
    manifest = stored.manifest
    request = Request(
        stage=stored.stage,
        key=stored.key,
        key_parts=manifest["key_parts"],
        config=manifest["config"],
        inputs={
            name: (source["stage"], source["key"], source["digest"]) for name, source in manifest["inputs"].items()
        },
        seed=manifest["seed"],
        store=Store(str(folder / "store")).url,
        run="audit",
    )
    worker = Worker(folder / "worker.log")
    try:
        return worker.run(request, lambda event: None)
    finally:
        worker.close()


def _link(artifact: Artifact, place: Path) -> None:
    """The artifact in another store: its manifest, and links to its files."""
    for file in artifact.manifest["files"]:
        link = place / artifact.folder / file["path"]
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            os.symlink(artifact.local(file["path"]).absolute(), link)
    # Under the key, also where the files of an artifact that was made anew have a folder of their own.
    (place / artifact.key).mkdir(parents=True, exist_ok=True)
    (place / artifact.key / MANIFEST).write_text(json.dumps(artifact.manifest))


LAWS = [Law("replay", "an update that is made again has the same content", "updates", replayed, deep=True)]
