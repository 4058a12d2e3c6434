"""Each file operation in the life of an artifact fails once: `python -m tests.faults.store_life FOLDER STEP`.

The life is what a run and the commands after it do in a store: a lease, units of work, a commit, one that replaces it,
records, a pin, a name, a collection. It takes a hundredth of a second, so that every operation,
or one of STEP, has its turn.
"""

import hashlib
import itertools
import json
import shutil
import sys
from pathlib import Path

from rlhf.stages.store import audit_log, collect, leases, registry, runs
from rlhf.stages.store.artifacts import ArtifactError, Store, content_digest
from rlhf.stages.store.pins import pin, pins
from rlhf.stages.store.work import OUT, WorkFolder
from rlhf.tuning.atomic import whole_folder
from tests.faults.files import Faults
from tests.stages.store.graphs import put, roots, run_of

KEY = "a" * 64
SHARDS = 2
FORCED = content_digest([{"path": "data.txt", "sha256": hashlib.sha256(b"5 forced").hexdigest()}])
"""The content of an artifact that replaces another."""
LEFT = ("leases", "damaged", "condemned", "work", "replaced")
MISSED = ("remove", "remove folder", "list", "stat", "open")
"""Operations in the removal of work after which some is left, for a collection."""


def live(store: Store, made: list[int]) -> str:
    """What a run does; does the rest where it was cut. Returns the digest; made: gets each shard that is computed."""
    recorder = runs.Recorder(store, "run")
    recorder.write({"name": "run", "nodes": {}})
    with leases.lease(store, "sft", KEY, print) as token:
        artifact = store.get("sft", KEY, repair=True)
        if artifact is None:
            work = WorkFolder(store, "sft", KEY)
            folder = work.open()
            for left in folder.glob(f"{OUT}*"):
                shutil.rmtree(left, ignore_errors=True)
            for number in range(SHARDS):
                if not (folder / f"shard-{number}").exists():
                    with whole_folder(folder / f"shard-{number}") as partial:
                        (partial / "part.txt").write_text(f"shard {number}")
                    work.save()
                    made.append(number)
            out = folder / f"{OUT}.{token[:8]}"
            (out / "state").mkdir(parents=True)
            (out / "state" / "moments").write_text("moments")
            shards = [folder / f"shard-{number}" / "part.txt" for number in range(SHARDS)]
            (out / "data.txt").write_text("".join(shard.read_text() for shard in shards))
            manifest = {"stage": "sft", "key": KEY, "metrics": {}, "inputs": {}}
            artifact = store.commit(out, manifest, check=lambda: leases.check(store, "sft", KEY, token))
            work.drop()
    recorder.write({"name": "run", "nodes": {"sft": {"state": "made", "key": KEY}}})
    new = put(store, 5)
    if (store.get("base", new.key) or new).digest != FORCED:
        new = put(store, 5, content="forced", replace=True)
    policy = registry.Policy("run", "sft", "sft", KEY, artifact.digest, new.key, new.digest)
    entry = registry.current(store, "champion")
    if entry is None or entry.policy.digest != policy.digest:
        registry.promote(store, "champion", policy, "")
    pin(store, "run")
    audit_log.append(store, "run", command="run")
    kept = run_of("run", [artifact, new], "pinned" if "run" in pins(store) else "")
    collect.collect(store, lambda: roots(kept), collect.Limits(grace_seconds=-60.0, settle_seconds=0.0))
    assert store.get("sft", KEY) and store.with_digest(new.stage, new.key, new.digest), "a collection took what stays"
    return artifact.digest


def whole(store: Store) -> list[str]:
    """What is visible in a store and not whole."""
    found = []
    for stage, key in store.all_keys():
        artifact, fault = store.examine(stage, key)
        fault = fault or (store.verify(artifact) if artifact else "")
        found += [f"{stage}/{key[:8]}: {fault}"] if fault else []
    return found


def trial(faults: Faults, number: int, wanted: str) -> tuple[str, str, str]:
    """Operation, path, and what does not hold."""
    shutil.rmtree(faults.store, ignore_errors=True)
    store, made = Store(str(faults.store)), list[int]()
    faults.arm(number)
    error: Exception | None = None
    try:
        digest = live(store, made)
    except Exception as e:
        error = e
    operation, path = faults.disarm()
    wrong = whole(store)
    if error is not None:
        if not isinstance(error, OSError | ArtifactError | registry.RegistryError):
            wrong.append(f"raises {type(error).__name__}: {error}")
        sealed = len(list(faults.store.glob(f"work/sft/{KEY}/.sealed/shard-*")))
        before, digest = len(made), live(store, made)
        if len(made) - before > SHARDS - sealed and not (faults.store / "artifacts" / "sft" / KEY).exists():
            wrong.append(f"sealed shards were computed again: {made}")
    if digest != wanted:
        wrong.append("other bits")
    if len(registry.history(store, "champion")) != 1:
        wrong.append("promoted twice")
    # A collection takes what the run could not remove.
    if operation in MISSED:
        live(store, made)
    for place in LEFT:
        wrong += [f"left over: {p.relative_to(faults.store)}" for p in (faults.store / place).rglob("*") if p.is_file()]
    wrong += [f"left over: {p.relative_to(faults.store)}" for p in faults.store.rglob(".*.part")]
    return operation, path, "; ".join(wrong + [f"{type(error).__name__}: {error}"] if wrong and error else wrong)


def main() -> int:
    faults, step = Faults(Path(sys.argv[1])), int(sys.argv[2])
    # No checkout: two processes of git take longer than all the rest.
    leases.FIRST_PAUSE_SECONDS, audit_log.PROJECT = 0.001, faults.folder
    wanted, broken = live(Store(str(faults.store)), []), 0
    for number in itertools.count(1, step):
        operation, path, wrong = trial(faults, number, wanted)
        if not operation:
            break
        if wrong:
            broken += 1
            print(json.dumps({"number": number, "operation": operation, "path": path, "wrong": wrong}), flush=True)
    print(f"{number - 1} operations, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
