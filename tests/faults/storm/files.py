"""Files that are damaged between tries, leases that are not what they seem, and a disk that is full for a while."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path

from rlhf.stages.store.leases import host_scope
from tests.faults.storm.ground import Broken, Command
from tests.faults.storm.moments import ROUNDS, choose
from tests.faults.storm.power import shim
from tests.faults.storm.scene import Scene

HARMS = ("truncated", "emptied", "flipped", "deleted")


def harm(scene: Scene, path: Path, how: str) -> None:
    """Damages a file."""
    data = path.read_bytes()
    # Another file of this name: one that is linked elsewhere stays as it is there.
    path.unlink()
    if how == "deleted":
        return
    if how == "flipped" and data:
        at = scene.rng.randrange(len(data))
        data = data[:at] + bytes([data[at] ^ (1 << scene.rng.randrange(8))]) + data[at + 1 :]
    elif how == "truncated" and data:
        data = data[: scene.rng.randrange(len(data))]
    else:
        data = b""
    path.write_bytes(data)


def artifacts(scene: Scene) -> None:
    """Files of artifacts are damaged; `rlhf verify` finds what no size tells, and the same command makes them again."""
    scene.partly()
    hit: set[Path] = set()
    for _ in range(8):
        stage = scene.rng.choice(scene.ground.stages())
        files = sorted(p for p in (scene.store / "artifacts" / stage).glob("*/**/*") if p.is_file())
        folders = {p.relative_to(scene.store / "artifacts" / stage).parts[0] for p in files}
        folder = scene.rng.choice(sorted(folders))
        if (place := scene.store / "artifacts" / stage / folder) in hit:
            continue
        hit.add(place)
        path = scene.rng.choice([p for p in files if p.is_relative_to(place)])
        how = scene.rng.choice(HARMS)
        harm(scene, path, how)
        scene.damaged.add((stage, folder))
        scene.struck(f"artifact's file {how}", stage, "manifest" if path.name == "manifest.json" else "data")
    if scene.rng.random() < 0.5:
        # A stage that is missing reads what is damaged: it must not take it.
        gone = scene.rng.choice(("update", "evaluate", "export", "score"))
        shutil.rmtree(scene.store / "artifacts" / gone)
        scene.damaged |= {p for p in scene.before if p[0] == gone}
        run = scene.start()
        scene.over(run)
    with contextlib.suppress(Broken):
        scene.says(["verify", "--store", scene.url])
    # A run that had finished before `verify` is made again under another name.
    scene.finish("again")


def work(scene: Scene) -> None:
    """Finished pieces of unfinished work are damaged between a kill and the next try."""
    stage = scene.rng.choice(("sft", "reward", "rollout", "score", "evaluate", "prepare"))
    scene.partly(stage)
    run = scene.start(sets={"data.chunk_megabytes": 0.01})
    while True:
        label, reached = choose(scene.store, stage, scene.rng)
        if label.startswith("has ") and label != "has its lease":
            break
    if not run.until(reached):
        scene.over(run)
        scene.finish()
        return
    scene.pause(0.3)
    scene.cut(run)
    folder = scene.store / "work" / stage
    files = sorted(
        p for p in folder.glob("*/**/*") if p.is_file() and p.relative_to(folder).parts[1].partition(".")[0] != "out"
    )
    scene.may_redo = True
    for path in scene.rng.sample(files, min(12, len(files))):
        how = scene.rng.choice(HARMS)
        harm(scene, path, how)
        scene.struck(f"{_what(path)} {how}", stage, label)
    if not files:
        scene.may_redo = False
    if scene.rng.random() < 0.3:
        programs = sorted(p for p in scene.ground.compiled.glob("*-cache"))
        own = scene.folder / "compiled"
        shutil.copytree(scene.ground.compiled, own, copy_function=os.link)
        for path in scene.rng.sample(programs, min(3, len(programs))):
            how = scene.rng.choice(("truncated", "emptied", "deleted"))
            harm(scene, own / path.name, how)
            scene.struck(f"compiled program {how}", stage, "before the run")
        scene.environment["RLHF_COMPILE_CACHE"] = str(own)
    scene.finish(sets={"data.chunk_megabytes": 0.01})


def _what(path: Path) -> str:
    parts = path.parts
    if path.suffix == ".jsonl":
        return "journal"
    if "checkpoints" in parts and ".sealed" not in parts:
        return "checkpoint's file"
    if "pieces" in parts:
        return "piece of data"
    return "seal" if ".sealed" in parts else "shard" if path.suffix == ".parquet" else "other work file"


def leases(scene: Scene) -> None:
    """Leases of dead processes and hosts, empty and torn ones, and one that is stolen while its holder is at work."""
    stage = scene.rng.choice(("sft", "rollout", "score", "evaluate"))
    scene.partly(stage)
    folder = scene.store / "leases"
    folder.mkdir()
    keys = [key for s, key in scene.ground.keys().values() if s == stage]
    here = subprocess.Popen(["true"])
    here.wait()
    for key in dict.fromkeys(keys):
        kind = scene.rng.choice(("dead process", "reused process id", "empty lease", "torn lease"))
        record = {"token": uuid.uuid4().hex, "beat": time.time() + scene.rng.choice((-60, 0, 60))}
        record |= {"pid": here.pid, "started": 1.0, "host": host_scope()}
        if kind == "reused process id":
            record["pid"] = os.getpid()
        text = json.dumps(record)
        text = {"empty lease": "", "torn lease": text[: len(text) // 2]}.get(kind, text)
        (folder / f"{stage}-{key}.json").write_text(text)
        scene.struck(f"lease: {kind}", stage, "before the run")
        if kind.endswith("lease"):
            # Each of these costs half a minute of waiting.
            break
    run = scene.start()
    if scene.rng.random() < 0.7:
        path = folder / f"{stage}-{keys[-1]}.json"
        held = run.until(lambda: f'"pid": {run.process.pid},' in _text(path))
        scene.pause(0.5)
        if held and path.exists():
            record = {"token": uuid.uuid4().hex, "beat": time.time(), "pid": here.pid, "started": 1.0}
            path.write_text(json.dumps(record | {"host": host_scope()}))
            scene.struck("lease: stolen by another token", stage, "at work")
    scene.over(run)
    scene.finish()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def full_disk(scene: Scene) -> None:
    """The disk of the store is full for a while, at any moment; then there is room again."""
    scene.store.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "storm", str(scene.store)], check=True)
    try:
        gone = scene.rng.choice((("sft",), ("reward",), ROUNDS, ("evaluate", "export"), ("prepare",)))
        scene.partly(*gone)
        for _ in range(2):
            stage = scene.rng.choice(gone)
            run = scene.start()
            label, reached = choose(scene.store, stage, scene.rng)
            if not run.until(reached):
                scene.over(run)
                continue
            ballast = scene.store / "ballast"
            left = scene.rng.choice((0, 0, 4096, 65536))
            _fill(ballast, left)
            scene.struck("full disk", stage, f"{label}, {left} bytes left")
            if scene.rng.random() < 0.4:
                scene.pause(1.5)
                ballast.unlink()
            code = run.wait()
            ballast.unlink(missing_ok=True)
            if code != 0 and "No space left on device" not in run.output():
                raise Broken(f"the error does not name the full disk:\n{run.output()[-3000:]}")
            scene.over(run)
        scene.finish()
    finally:
        subprocess.run(["umount", "--lazy", str(scene.store)], check=True)


def _fill(path: Path, left: int) -> None:
    """Fills a file system but for some bytes."""
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * (1 << 16))
        with contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
        file.truncate(max(0, file.tell() - left))


def host(name: str) -> tuple[str, ...]:
    """Words in front of a command that make it one of another host: a host name of its own."""
    return ("unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh")


def clocks(scene: Scene) -> None:
    """Two hosts whose clocks differ by two minutes share a disk; one is killed or suspended while it holds a lease."""
    stage = scene.rng.choice(("sft", "reward"))
    scene.partly(stage)
    ahead = scene.rng.choice((60, -60))
    preload = {"LD_PRELOAD": str(shim(scene.ground.folder))}
    first = scene.start("one", before=host("storm-a"), STORM_CLOCK=str(ahead), **preload)

    def held() -> bool:
        return any((scene.store / "leases").glob(f"{stage}-*.json"))

    first.until(held)
    second = scene.start("two", before=host("storm-b"), STORM_CLOCK=str(-ahead), **preload)
    scene.struck(f"clock off by {ahead} s", stage, "holds the lease")
    scene.struck(f"clock off by {-ahead} s", stage, "waits for the lease")
    second.until(lambda: "waiting for it" in second.output() or not held())
    if held() and not first.over:
        if scene.rng.random() < 0.5:
            kill(first)
            scene.struck("kill a host that holds a lease", stage, "another waits")
        else:
            _suspend(scene, first, second, stage)
    for run in (first, second):
        scene.over(run)
    for name in ("one", "two"):
        scene.finish(name, before=host(f"storm-{'a' if name == 'one' else 'b'}"))


def kill(run: Command) -> None:
    """Kills a command's flow and worker."""
    for process in [*run.family()]:
        with contextlib.suppress(Exception):
            process.kill()
    run.process.kill()


def _suspend(scene: Scene, first: Command, second: Command, stage: str) -> None:
    """Stops a holder until another has taken its lease over, and lets it go on in the middle of the other's work."""
    stopped = [*first.family()]
    for process in stopped:
        process.suspend()
    first.process.send_signal(signal.SIGSTOP)
    scene.struck("suspended host whose lease another takes over", stage, "at work")
    second.until(lambda: bool(second.worker()), 120)
    scene.pause(4.0)
    first.process.send_signal(signal.SIGCONT)
    for process in stopped:
        with contextlib.suppress(Exception):
            process.resume()
