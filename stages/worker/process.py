"""The worker: the process that holds the devices and runs stages, one request at a time.

Requests and events are JSON lines over two pipes whose descriptors are given on the command
line. What a stage prints goes to the worker's log. The worker ends when its parent does.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

HEARTBEAT_SECONDS = 2.0
PARENT_SECONDS = 0.5
COMPILE_CACHE = "RLHF_COMPILE_CACHE"


def die_with_parent(parent: int, kernel: bool) -> None:
    """Ends this process when its parent dies: by a thread that looks, and with `kernel` by the kernel as well.

    The kernel counts the end of the thread that started this process as the death of the parent, so it may
    be asked only where that was the parent's main thread.
    """
    if kernel and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class Events:
    """The event pipe; a lock keeps lines of the heartbeat and the stage whole."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, event: str, **values: Any) -> None:
        with self._lock:
            self._stream.write(json.dumps({"event": event} | values) + "\n")
            self._stream.flush()


def configure_jax() -> None:
    """Persistent compilation cache: a cold worker reads what an earlier one compiled."""
    import jax

    folder = os.environ.get(COMPILE_CACHE, str(Path.home() / ".cache" / "rlhf-pipeline" / "jax"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def run_request(request: dict[str, Any], memory: dict[str, Any], events: Events) -> dict[str, Any]:
    """Runs one stage and commits its artifact; returns the manifest."""
    from stages.contract.definition import Context
    from stages.contract.fingerprint import library_versions
    from stages.contract.registry import stage as find_stage
    from stages.store.artifacts import Artifact, Store
    from stages.store.work import WorkFolder

    store = Store(request["store"])
    stage = find_stage(request["stage"])
    key = request["key"]
    config = stage.config.model_validate_json(json.dumps(request["config"]))
    inputs = {}
    for name, (input_stage, input_key) in request["inputs"].items():
        artifact = store.get(input_stage, input_key)
        if artifact is None:
            raise RuntimeError(f"input {name} ({input_stage}/{input_key[:12]}) is gone from {store.url}; run again")
        inputs[name] = artifact
    # A forced run starts from nothing: what an earlier try left must not leak into it.
    work_key = key if not request.get("force") else f"{key}-{request['force']}"
    folder = WorkFolder(store, request["stage"], work_key)
    work = folder.open()
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    started = time.time()

    def progress(done: int, total: int, unit: str, **metrics: float) -> None:
        events.send("progress", done=done, total=total, unit=unit, metrics={k: float(v) for k, v in metrics.items()})

    context = Context(
        config=config,
        inputs=inputs,
        out=out,
        work=work,
        seed=request["seed"],
        progress=progress,
        log=lambda line: events.send("log", line=str(line)),
        memory=memory,
        saved=folder.mirror,
        name=f"{request['run']}.{request['stage']}",
    )
    try:
        metrics = stage.run(context)
    finally:
        context.close()
    manifest = {
        "stage": request["stage"],
        "key": key,
        "key_parts": request["key_parts"],
        "config": config.model_dump(mode="json"),
        "inputs": {n: {"stage": a.stage, "key": a.key, "digest": a.digest} for n, a in inputs.items()},
        "seed": request["seed"],
        "versions": library_versions(),
        "python": sys.version.split()[0],
        "device": _device(),
        "host": socket.gethostname(),
        "run": request["run"],
        "metrics": metrics,
        "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(),
        "seconds": round(time.time() - started, 3),
    }
    committed: Artifact = store.commit(out, manifest, replace=bool(request.get("force")))
    for name in [n for n in memory if n.endswith(":new")]:
        memory[name.removesuffix("new") + committed.digest] = memory.pop(name)
    folder.drop()
    return committed.manifest


def _device() -> str:
    jax = sys.modules.get("jax")
    if jax is None:
        return "none"
    device = jax.devices()[0]
    return f"{device.platform}:{device.device_kind} x{jax.device_count()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--kernel-watches-parent", action="store_true")
    args = parser.parse_args()
    die_with_parent(args.parent, args.kernel_watches_parent)
    # Ctrl-C goes to the whole foreground group; the parent decides when the worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = os.fdopen(args.requests, "r")
    events = Events(os.fdopen(args.events, "w"))
    memory: dict[str, Any] = {}

    def heartbeat() -> None:
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            events.send("heartbeat")

    threading.Thread(target=heartbeat, daemon=True).start()
    configure_jax()
    for line in requests:
        request = json.loads(line)
        try:
            events.send("done", manifest=run_request(request, memory, events))
        except BaseException as e:
            traceback.print_exc()
            sys.stderr.flush()
            events.send("failed", error=f"{type(e).__name__}: {e}", traceback=traceback.format_exc())
            if not isinstance(e, Exception):
                raise


if __name__ == "__main__":
    main()
