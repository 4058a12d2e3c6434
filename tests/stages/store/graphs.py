"""Stores of artifacts that depend on each other, made through the store's own interface from small files."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlhf.stages.store.artifacts import Artifact, Store
from rlhf.stages.store.keys import digest
from rlhf.stages.store.reachability import Roots, Run

STAGES = ("base", "sft", "rollout", "score", "update")


def put(store: Store, name: int, inputs: Sequence[Artifact] = (), content: str = "", replace: bool = False) -> Artifact:
    """Commits the artifact of a number, made from others; its stage follows from the number."""
    stage = STAGES[name % len(STAGES)]
    folder = Path(tempfile.mkdtemp(dir=made_dir(store)))
    (folder / "state").mkdir()
    (folder / "data.txt").write_text(f"{name} {content}")
    (folder / "state" / "moments.bin").write_bytes(b"m" * 100)
    manifest = {
        "stage": stage,
        "key": digest(["key", name]),
        "metrics": {},
        "inputs": {f"in{i}": {"stage": a.stage, "key": a.key, "digest": a.digest} for i, a in enumerate(inputs)},
    }
    return store.commit(folder, manifest, replace=replace)


def made_dir(store: Store) -> Path:
    """A folder that commits can rename from."""
    place = store.scratch / "out"
    place.mkdir(parents=True, exist_ok=True)
    return place


def run_of(name: str, artifacts: list[Artifact], why: str = "", active: bool = False) -> Run:
    """A run that has these artifacts."""
    return Run(name, why, active, tuple((a.stage, a.key, a.digest) for a in artifacts))


def below(artifacts: list[Artifact], made: dict[tuple[str, str], Artifact]) -> set[tuple[str, str]]:
    """(stage, key) of artifacts and of everything that they were made from."""
    found: set[tuple[str, str]] = set()
    for artifact in artifacts:
        inputs = [made[i["stage"], i["key"]] for i in artifact.manifest["inputs"].values()]
        found |= {(artifact.stage, artifact.key)} | below(inputs, made)
    return found


def roots(*runs: Run, named: frozenset[str] = frozenset()) -> Roots:
    return Roots(tuple(runs), named)
