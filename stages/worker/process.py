"""The worker: the process that holds the devices and runs stages, one request at a time.

Requests and events (`rlhf.stages.worker.protocol`) travel over two pipes whose descriptors are given on the command
line. stdout and stderr of a stage are the worker's log. The worker ends when its parent does.
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
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from rlhf.stages.common.compilation import configure_jax, use_precision
from rlhf.stages.worker import loaded_code
from rlhf.stages.worker.interpreter import escape_output
from rlhf.stages.worker.manifest import manifest_of
from rlhf.stages.worker.parent_death import die_with_parent
from rlhf.stages.worker.protocol import (
    Changed,
    Done,
    Event,
    Heartbeat,
    Lines,
    Log,
    Progress,
    Request,
    event_line,
)
from rlhf.tuning import multihost

if TYPE_CHECKING:
    from rlhf.stages.contract.definition import Context, Stage, StageConfig
    from rlhf.stages.store.artifacts import Artifact, Store


from collections.abc import Iterator

from rlhf.stages.contract.definition import Context
from rlhf.stages.contract.error_location import place_of
from rlhf.stages.worker.loaded_code import DataDiffers
from rlhf.stages.worker.protocol import Failed

HEARTBEAT_SECONDS = 2.0

# Modules of JAX that are on the stack only while a program is made, in each version that this project supports.
_COMPILING = tuple(
    os.path.join("jax", "_src", *path)
    for path in (("compiler.py",), ("interpreters", "partial_eval.py"), ("interpreters", "mlir.py"))
)
WRITES_MODELS = ("sft", "distill", "preference", "reward", "export")
"""Stages whose artifact is a model; an update may be one, or what a replay makes it of."""


class Events:
    """The event pipe; a lock keeps the lines of the heartbeat thread and of the stage apart."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, event: Event) -> None:
        """Writes one event; it is sent when this returns."""
        with self._lock:
            self._stream.write(event_line(event))
            self._stream.flush()


def is_compiling() -> bool:
    """Whether a thread of this process is in JAX's tracing, lowering or compilation."""
    for frame in list(sys._current_frames().values()):
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_filename.endswith(_COMPILING):
                return True
            at = at.f_back
    return False


def run_request(request: Request, memory: dict[str, Any], events: Events) -> dict[str, Any]:
    """Runs one stage and commits its artifact; returns the manifest, empty where process 0 of a group runs it alone."""
    stage, config = settings_of(request)
    if stage.processes(config) == "all":
        return _run(request, stage, config, memory, events)
    if not multihost.is_primary():
        return {}
    with multihost.alone():
        return _run(request, stage, config, memory, events)


def _run(request: Request, stage: Stage, config: StageConfig, memory: dict[str, Any], events: Events) -> dict[str, Any]:
    from rlhf.stages.store.artifacts import Store, content_digest
    from rlhf.stages.store.disk import check_room
    from rlhf.stages.store.leases import check
    from rlhf.stages.store.transfers import files_of
    from rlhf.stages.store.work import OUT, WorkFolder

    store = Store(request.store)
    if request.elsewhere:
        # First: a fresh process of this host would have no other code.
        loaded_code.check_elsewhere(request, stage.sources(config), "where the run is")
    loaded_code.check_before(request)
    use_precision(config, memory)
    forget_unless_equal(memory)
    inputs = inputs_of(store, request)
    if request.stage in WRITES_MODELS:
        # The model that a stage makes is as large as the one that it begins with: known before hours of work.
        check_room(
            store.scratch, max((sum(f["size"] for f in a.manifest["files"]) for a in inputs.values()), default=0)
        )
    # A forced run starts from nothing: partial work of an unforced one must not leak into it.
    work_key = f"{request.key}-{request.force}" if request.force else request.key
    folder = WorkFolder(store, request.stage, work_key)
    work = folder.open()
    # Output of killed tries: what can be used again is beside it.
    for left in work.glob(f"{OUT}*"):
        shutil.rmtree(left, ignore_errors=True)
    # Of each holder of the lease its own: one that another has taken over from may go on later.
    out = work / f"{OUT}.{(request.lease or 'none')[:8]}"
    out.mkdir(parents=True)

    def still_ours() -> None:
        if request.lease is not None:
            check(store, request.stage, request.key, request.lease)

    started = time.time()
    context = _context(request, config, inputs, out, work, memory, events)
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
        manifest = manifest_of(request, config, inputs, metrics, started)
        files = files_of(out)
        committed = store.commit(out, manifest, replace=bool(request.force), files=files, check=still_ours)
    except BaseException as e:
        # Else the next request would take it for its own.
        name_new(memory, None)
        # Whoever has taken over may have removed what it was about to read: that is the error then.
        with contextlib.suppress(OSError):
            still_ours()
        if isinstance(e, loaded_code.SourceDiffers):
            # Were the edit undone, the next try would go on with it.
            folder.drop()
            stage.tidied(context)
        raise
    # Another process may have committed the key meanwhile: its artifact stays, and is not what is in memory here.
    ours = multihost.from_primary(lambda: committed.digest == content_digest(files))
    name_new(memory, committed.digest if ours else None)
    folder.drop()
    stage.tidied(context)
    return committed.manifest


def settings_of(request: Request) -> tuple[Stage, StageConfig]:
    """The stage of a request, and its settings."""
    from rlhf.stages.contract.registry import stage as find_stage

    stage = find_stage(request.stage)
    # Through JSON: strict models take lists and numbers as JSON has them.
    return stage, stage.config.model_validate_json(json.dumps(request.config))


def name_new(memory: dict[str, Any], digest: str | None) -> None:
    """Names what a stage left in memory as `...:new` by the digest of its artifact; drops it where that is None."""
    for name in [n for n in memory if n.endswith(":new")]:
        value = memory.pop(name)
        if digest is not None:
            memory[name.removesuffix("new") + digest] = value


def forget_unless_equal(memory: dict[str, Any]) -> None:
    """Drops what is in memory unless all processes of the group keep the same values on devices, in the same order.

    The processes compute with these values together, and the order decides which of them leaves first.
    """
    from rlhf.stages.common.models import bytes_by_device

    kept = multihost.gather([name for name, value in memory.items() if bytes_by_device(value)])
    if any(names != kept[0] for names in kept):
        memory.clear()


def inputs_of(store: Store, request: Request) -> dict[str, Artifact]:
    """The artifacts behind a request's inputs. Raises RuntimeError, naming the input, that is gone."""
    inputs = {}
    for name, (stage, key, digest) in request.inputs.items():
        artifact = store.with_digest(stage, key, digest)
        if artifact is None:
            place = f"input {name} ({stage}/{key[:12]}) with digest {digest[:12]}"
            raise RuntimeError(f"{place} is gone from {store.shown}, or another replaced it; run again")
        inputs[name] = artifact
    return inputs


def _context(
    request: Request,
    config: StageConfig,
    inputs: dict[str, Artifact],
    out: Path,
    work: Path,
    memory: dict[str, Any],
    events: Events,
) -> Context:
    """The stage's context, whose progress and log lines become events."""
    from rlhf.stages.contract.definition import Context

    def progress(done: int, total: int, unit: str, **metrics: float) -> None:
        events.send(Progress(done, total, unit, {k: float(v) for k, v in metrics.items()}))

    return Context(
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


def _begin(request: Request) -> None:
    """A line of the log that says what is made from here on (`rlhf logs --node NODE`)."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):
        # The log's disk may be full: that fails no stage.
        print(f"---- {request.node or request.stage} ({request.stage} {request.key[:12]}) {now} ----", flush=True)


def heartbeat(events: Events, compiling: Callable[[], bool]) -> None:
    """Says that this process lives, every HEARTBEAT_SECONDS, until nobody reads it."""
    # A run that ends closes the pipe a moment before this process has left: no error.
    with contextlib.suppress(BrokenPipeError):
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            events.send(Heartbeat(compiling()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent)
    escape_output()
    # Ctrl-C goes to the whole foreground group; the parent decides when the worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Beam says on import that Google's client for BigQuery is not there: as the last line of a log it misleads.
    logging.getLogger().addFilter(lambda record: not record.getMessage().startswith("apitools not found"))
    requests = Lines(args.requests)
    events = Events(os.fdopen(args.events, "w"))
    memory: dict[str, Any] = {}

    # The parent sends this signal before it ends a process that makes no progress.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=heartbeat, args=(events, is_compiling), daemon=True).start()
    status = 1
    try:
        _join()
        _serve(requests, memory, events)
        status = 0
    except BaseException:
        if multihost.process_count() > 1:
            traceback.print_exc()
        raise
    finally:
        if multihost.process_count() > 1:
            # JAX would wait for the other processes, which may have ended already.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(status)


def _join() -> None:
    """Sets JAX up, over all processes of the group where the environment describes one."""
    multihost.initialize()
    configure_jax()
    if multihost.process_count() > 1:
        from rlhf.tuning.device import memory_bytes

        # Kept from now on: all processes go by the least memory that one has.
        memory_bytes()


def _serve(requests: Lines, memory: dict[str, Any], events: Events) -> None:
    """Runs what is requested until the pipe closes."""
    for line in requests:
        request = Request.parse(line)
        _begin(request)
        try:
            try:
                made = run_request(request, memory, events)
            finally:
                # Before the flow learns of it: it may end this process at once.
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


if __name__ == "__main__":
    main()


def failure_of(error: BaseException, store: str) -> Failed:
    """The event of an error. Its traceback goes to the log.

    store: the store's URL; a fault of a disk that names no file is that of its scratch folder.
    """
    from rlhf.stages.store.artifacts import Store
    from rlhf.stages.store.disk import disk_fault
    from rlhf.stages.store.keys import without_userinfo
    from rlhf.tuning.rewards.failures import kind_of

    # Errors of files and services name their URLs.
    told: str = without_userinfo(traceback.format_exc())
    with contextlib.suppress(OSError):
        # The log may lie on the disk that is full: what has failed is told all the same.
        print(told, file=sys.stderr, flush=True)
    text: Any = f"{place_of(error)}{type(error).__name__}: {error}"
    outage = kind_of(error) != "sample" or isinstance(error, DataDiffers)
    full = disk_fault(error, Store(store).scratch) if isinstance(error, Exception) else None
    if full is not None:
        text, outage = full.strerror if full is error else f"{full.strerror} ({text})", True
    return Failed(without_userinfo(str(text)), told, outage)


FOLDER = "logs/tensorboard"
"""Where TensorBoard's plugin looks for traces; logs are no content of an artifact."""


@contextlib.contextmanager
def profiled(ctx: Context) -> Iterator[None]:
    """Traces the stage in the block while its progress is in the stretch of its settings, if they have one."""
    import jax

    first, last = getattr(getattr(ctx.config, "compute", None), "profile", None) or (0, 0)
    report, running, ended = ctx.progress, False, False
    options = jax.profiler.ProfileOptions()
    # Python's own calls would make a trace of gigabytes.
    options.python_tracer_level = 0

    def reached(done: int) -> None:
        nonlocal running, ended
        # Progress may leap over the stretch: then what follows its start is traced.
        if not running and not ended and first <= done and last > 0:
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
