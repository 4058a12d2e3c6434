"""The worker: the process that holds the devices and runs stages, one request at a time.

Requests and events (`rlhf.stages.worker.protocol`) travel over two pipes, whose descriptors the command line has.
stdout and stderr of a stage are the worker's log. The worker ends when its parent does.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TextIO

from rlhf.stages.common.compilation import configure_jax, use_precision
from rlhf.stages.contract.definition import Context, Stage, StageConfig
from rlhf.stages.contract.error_location import place_of
from rlhf.stages.contract.fingerprint import library_versions
from rlhf.stages.contract.registry import stage as find_stage
from rlhf.stages.sampling.settings import SERVERS
from rlhf.stages.store import leases
from rlhf.stages.store.artifacts import Artifact, Store, content_digest
from rlhf.stages.store.disk import check_room, disk_fault
from rlhf.stages.store.keys import published, without_userinfo
from rlhf.stages.store.transfers import files_of
from rlhf.stages.store.work import OUT, WorkFolder
from rlhf.stages.worker import loaded_code
from rlhf.stages.worker.interpreter import escape_output
from rlhf.stages.worker.parent_death import die_with_parent
from rlhf.stages.worker.protocol import Changed, Done, Event, Failed, Heartbeat, Log, Progress, Request, event_line
from rlhf.tuning import multihost

HEARTBEAT_SECONDS = 2.0
FOLDER = "logs/tensorboard"
"""The folder in which TensorBoard's plugin looks for traces; logs are not content of an artifact."""

# Modules of JAX that are on the stack only while a program is compiled, in each version that this project supports.
_COMPILING = tuple(
    os.path.join("jax", "_src", *path)
    for path in (("compiler.py",), ("interpreters", "partial_eval.py"), ("interpreters", "mlir.py"))
)
_IMPORTING = "<frozen importlib._bootstrap>"
WRITES_MODELS = ("sft", "distill", "preference", "reward")
"""Stages of hours whose artifact is a model, always."""


class Events:
    """The event pipe; a lock keeps the lines of the heartbeat thread and of the stage apart."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, event: Event) -> None:
        """Write one event; it is sent when this returns."""
        with self._lock:
            self._stream.write(event_line(event))
            self._stream.flush()


def is_compiling() -> bool:
    """Whether a thread of this process is in JAX's tracing, lowering or compilation, and not importing it."""
    for frame in list(sys._current_frames().values()):
        at: FrameType | None = frame
        files = set()
        while at is not None:
            files.add(at.f_code.co_filename)
            at = at.f_back
        if any(file.endswith(_COMPILING) for file in files) and _IMPORTING not in files:
            return True
    return False


def run_request(request: Request, memory: dict[str, Any], events: Events) -> dict[str, Any]:
    """Run one stage, commit its artifact and return the manifest.

    It is empty in the other processes of a group for a stage that process 0 runs alone.
    """
    stage = find_stage(request.stage)
    # Through JSON: strict models take lists and numbers as JSON has them.
    config = stage.config.model_validate_json(json.dumps(request.config))
    is_common = stage.processes(config) == "all"
    if not is_common and not multihost.is_primary():
        return {}
    store = Store(request.store)
    with contextlib.nullcontext() if is_common else multihost.alone():
        if request.elsewhere:
            # First: a fresh process of this host would have the same code.
            loaded_code.check_elsewhere(request, stage.sources(config), "where the run is")
        loaded_code.check_before(request)
        use_precision(config, memory)
        forget_unless_equal(memory)
        inputs = inputs_of(store, request)
        if request.stage in WRITES_MODELS:
            # The model is as large as one that the stage reads: known before hours of work.
            check_room(store.scratch, smallest_model(inputs.values()))
        return _make(request, stage, config, store, inputs, memory, events).manifest


def _make(
    request: Request,
    stage: Stage,
    config: StageConfig,
    store: Store,
    inputs: dict[str, Artifact],
    memory: dict[str, Any],
    events: Events,
) -> Artifact:
    # A forced run starts from nothing: partial work of an unforced one must not leak into it.
    work_key = f"{request.key}-{request.force}" if request.force else request.key
    folder = WorkFolder(store, request.stage, work_key)
    work = folder.open()
    # Output of killed tries; reusable work is next to it.
    for left in work.glob(f"{OUT}*"):
        shutil.rmtree(left, ignore_errors=True)
    # Each holder of the lease has its own: a process that lost the lease may continue later.
    out = work / f"{OUT}.{(request.lease or 'none')[:8]}"
    out.mkdir(parents=True)

    def check_lease() -> None:
        if request.lease is not None:
            leases.check(store, request.stage, request.key, request.lease)

    def progress(done: int, total: int, unit: str, **metrics: float) -> None:
        events.send(Progress(done, total, unit, {k: float(v) for k, v in metrics.items()}))

    started = time.time()
    context = Context(
        config=config,
        inputs=inputs,
        out=out,
        work=work,
        seed=request.seed,
        progress=progress,
        log=lambda line: events.send(Log(str(line))),
        memory=memory,
        is_primary=multihost.is_primary(),
        name=f"{request.run}.{request.stage}",
    )
    context.saved, context.fetch = folder.save, folder.fetch
    try:
        try:
            with profiled(context):
                metrics = stage.run(context)
            # Files of data are on the host of process 0, which has read them.
            read = stage.sources(config) if multihost.is_primary() else request.key_parts.get("sources", {})
            loaded_code.check_after(request, read)
        finally:
            context.close()
            # Only stages that sample by servers load the module, and have its code in their keys.
            if (servers := sys.modules.get(SERVERS)) is not None:
                servers.rest()
        manifest = _manifest(request, config, inputs, metrics, started)
        files = files_of(out)
        committed = store.commit(out, manifest, replace=bool(request.force), files=files, check=check_lease)
    except BaseException as e:
        # Else the next request would take it for its own.
        name_new(memory, None)
        # A process that took over may have removed files that the stage was about to read: that is the error then.
        with contextlib.suppress(OSError):
            check_lease()
        if isinstance(e, loaded_code.SourceDiffers):
            # If the edit were undone, the next try would resume from this work.
            folder.drop()
            stage.tidied(context)
        raise
    # If another process has committed the key meanwhile, its artifact stays, and memory has other values.
    ours = multihost.from_primary(lambda: committed.digest == content_digest(files))
    name_new(memory, committed.digest if ours else None)
    folder.drop()
    stage.tidied(context)
    return committed


def smallest_model(artifacts: Iterable[Artifact]) -> int:
    """Return the bytes of the smallest model among artifacts, without data and moments; 0 without a model."""
    weights = ("model/", "state/model/")
    sizes = (sum(f["size"] for f in a.manifest["files"] if f["path"].startswith(weights)) for a in artifacts)
    return min(filter(None, sizes), default=0)


def name_new(memory: dict[str, Any], digest: str | None) -> None:
    """Name the values that a stage left in memory as `...:new` by the digest of its artifact; drop them if None."""
    for name in [n for n in memory if n.endswith(":new")]:
        value = memory.pop(name)
        if digest is not None:
            memory[name.removesuffix("new") + digest] = value


def forget_unless_equal(memory: dict[str, Any]) -> None:
    """Clear the memory unless all processes of the group keep the same values on devices, in the same order.

    The processes compute with these values together, and the order determines which of them leaves first.
    """
    from rlhf.stages.common.models import bytes_by_device

    kept = multihost.gather([name for name, value in memory.items() if bytes_by_device(value)])
    if any(names != kept[0] for names in kept):
        memory.clear()


def inputs_of(store: Store, request: Request) -> dict[str, Artifact]:
    """Return the artifacts of a request's inputs. Raises RuntimeError with the name of an input that is gone."""
    inputs = {}
    for name, (stage, key, digest) in request.inputs.items():
        artifact = store.with_digest(stage, key, digest)
        if artifact is None:
            place = f"input {name} ({stage}/{key[:12]}) with digest {digest[:12]}"
            raise RuntimeError(f"{place} is gone from {store.shown}, or another replaced it; run again")
        inputs[name] = artifact
    return inputs


def _manifest(
    request: Request,
    config: StageConfig,
    inputs: dict[str, Artifact],
    metrics: dict[str, Any],
    started: float,
) -> dict[str, Any]:
    """Return the manifest without its files. started: seconds since 1970."""
    jax = sys.modules.get("jax")
    device = "none"
    if jax is not None:
        first = jax.devices()[0]
        device = f"{first.platform}:{first.device_kind} x{jax.device_count()}"
    return {
        "stage": request.stage,
        "key": request.key,
        "key_parts": request.key_parts,
        "config": published(config.model_dump(mode="json")),
        "inputs": {n: {"stage": a.stage, "key": a.key, "digest": a.digest} for n, a in inputs.items()},
        "seed": request.seed,
        "versions": library_versions(),
        "python": sys.version.split()[0],
        "device": device,
        "host": socket.gethostname(),
        "run": request.run,
        "metrics": metrics,
        "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(),
        "seconds": round(time.time() - started, 3),
    }


def heartbeat(events: Events, compiling: Callable[[], bool]) -> None:
    """Report every HEARTBEAT_SECONDS that this process lives, until the pipe closes."""
    # A run that ends closes the pipe a moment before this process has left: not an error.
    with contextlib.suppress(BrokenPipeError):
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            events.send(Heartbeat(compiling()))


def main() -> None:
    """Serve requests until the parent closes the pipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent)
    escape_output()
    # Ctrl-C goes to the whole foreground group; the parent decides when the worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Beam reports on import that Google's client for BigQuery is missing: as the last line of a log it misleads.
    logging.getLogger().addFilter(lambda record: not record.getMessage().startswith("apitools not found"))
    events = Events(os.fdopen(args.events, "w"))

    # The parent sends this signal before it ends a process that makes no progress.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=heartbeat, args=(events, is_compiling), daemon=True).start()
    status = 1
    try:
        _join()
        _serve(os.fdopen(args.requests, "rb"), {}, events)
        status = 0
    except BaseException:
        if multihost.process_count() > 1:
            traceback.print_exc()
        raise
    finally:
        # Not at exit, which comes after the end of all threads, and in a group never.
        if (servers := sys.modules.get(SERVERS)) is not None:
            servers.end_all()
        if multihost.process_count() > 1:
            # JAX would wait for the other processes, which may have ended already.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(status)


def _join() -> None:
    """Set JAX up, over all processes of the group if the environment describes one."""
    multihost.initialize()
    configure_jax()
    if multihost.process_count() > 1:
        from rlhf.tuning.device import memory_bytes

        # Cached from now on: all processes use the least memory of any of them.
        memory_bytes()


def _serve(lines: Iterable[bytes], memory: dict[str, Any], events: Events) -> None:
    for line in lines:
        if not line.endswith(b"\n"):
            # The parent has died in the middle of a request.
            return
        request = Request.parse(line)
        if request.log:
            write_to(request.log)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):
            # `rlhf logs --node NODE` finds this line. The log's disk may be full, which fails no stage.
            print(f"---- {request.node or request.stage} ({request.stage} {request.key[:12]}) {now} ----", flush=True)
        try:
            try:
                made = run_request(request, memory, events)
            finally:
                # Before the parent gets the event: it may end this process at once.
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
            events.send(Done(made))
        except loaded_code.CodeDiffers as e:
            events.send(Changed(str(e)))
        except BaseException as e:
            events.send(failure_of(e, request.store))
            # SystemExit and the like: reported, and then the worker ends.
            if not isinstance(e, Exception):
                raise


def write_to(path: str) -> None:
    """Append this process's output to another file; it stays with the old one if that cannot be opened."""
    with contextlib.suppress(OSError), open(path, "ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)


def failure_of(error: BaseException, store: str) -> Failed:
    """Return the event of an error, and write its traceback to the log.

    store: the store's URL; a fault of a disk that names no file is attributed to its scratch folder.
    """
    from rlhf.tuning.rewards.failures import kind_of

    # Errors of files and services name their URLs.
    trace: str = without_userinfo(traceback.format_exc())
    with contextlib.suppress(OSError):
        # The log may be on the full disk; the error is reported nevertheless.
        print(trace, file=sys.stderr, flush=True)
    text: Any = f"{place_of(error)}{type(error).__name__}: {error}"
    outage = kind_of(error) != "sample" or isinstance(error, loaded_code.DataDiffers)
    full = disk_fault(error, Store(store).scratch) if isinstance(error, Exception) else None
    if full is not None:
        text, outage = full.strerror if full is error else f"{full.strerror} ({text})", True
    return Failed(without_userinfo(str(text)), trace, outage)


@contextlib.contextmanager
def profiled(ctx: Context) -> Iterator[None]:
    """Trace the stage in the block while its progress is in the interval of `compute.profile`, if it has one."""
    interval = getattr(getattr(ctx.config, "compute", None), "profile", None)
    if interval is None:
        yield
        return
    import jax

    first, last = interval
    report, running, ended = ctx.progress, False, False
    options = jax.profiler.ProfileOptions()
    # Python's own calls would make a trace of gigabytes.
    options.python_tracer_level = 0

    def reached(done: int) -> None:
        nonlocal running, ended
        # Progress may leap over the interval: then the trace begins after it.
        if not running and not ended and first <= done:
            running = True
            folder = str(ctx.out / FOLDER)
            jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
        elif running and done >= last:
            running, ended = False, True
            jax.profiler.stop_trace()
            ctx.log(f"a trace of JAX's profiler is in {FOLDER}/plugins/profile of the artifact")

    def progress(done: int, total: int, unit: str, **metrics: float) -> None:
        reached(done)
        report(done, total, unit, **metrics)

    ctx.progress = progress
    reached(0)
    try:
        yield
    finally:
        if running:
            reached(last)


if __name__ == "__main__":
    main()
