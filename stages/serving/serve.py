"""The program `rlhf serve`: a server of an artifact's policy.

`rlhf serve NAME --follow`: a promotion or a rollback of the name replaces the policy of the server.

If the server cannot load a policy (another base model, weights that are not stored), it keeps the old policy and prints
the reason; a restart loads the new one.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
from typing import Any

from rlhf.stages.common.compilation import configure_jax
from rlhf.stages.sampling.settings import NATIVE
from rlhf.stages.serving.access import AccessError, keys_of
from rlhf.stages.serving.api import TOP_LOGPROBS
from rlhf.stages.serving.app import Weights, make_app
from rlhf.stages.serving.policy import folder_of, open_policy
from rlhf.stages.serving.server import Server
from rlhf.stages.serving.sessions import Sessions
from rlhf.stages.serving.settings import Named, Serve
from rlhf.stages.serving.web import Web
from rlhf.stages.store import registry
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.registry import Entry
from rlhf.tuning.models.config import UnsupportedModel

SECONDS = 30.0
"""Between two reads of the name."""


class Follower:
    """Keeps a server at the newest entry of a name."""

    def __init__(self, server: Server, weights: Weights, store: Store, named: Named, base: str):
        """named: the entry that is served. base: key of its base model."""
        self._server, self._weights, self._store, self._named, self._base = server, weights, store, named, base
        self._printed = ""
        self._refused = 0
        """An entry that this server cannot load: each try holds back all requests."""

    def start(self) -> None:
        """Read the name in a thread until the process ends."""
        threading.Thread(target=self._run, name="follower", daemon=True).start()

    def _run(self) -> None:
        while self._server.live.failure is None:
            time.sleep(SECONDS)
            self.look()

    def look(self) -> None:
        """Load the policy of the newest entry if it has changed; print the reason if that fails."""
        which = self._named.name
        try:
            entry = registry.current(self._store, which)
            if entry is None or entry.number in (self._named.entry, self._refused):
                return
            which = f"{which} {entry.number}"
            self._load(entry)
            line = f"serving {which}: {self._server.name}"
        # If the store does not answer or the policy is gone, the old policy continues to answer.
        except Exception as error:
            line = f"{which} is not served: {error}"
        if line != self._printed:
            print(line, file=sys.stderr, flush=True)
        self._printed = line

    def _load(self, entry: Entry) -> None:
        policy = entry.policy
        if policy.base != self._base:
            raise ValueError("its base model is another one: restart the server")
        artifact = self._store.with_digest(policy.stage, policy.key, policy.digest)
        if artifact is None:
            raise ValueError(f"its policy is gone from {self._store.shown}: roll back, or promote another")
        self._store.ensure_whole(artifact)
        folder = folder_of(artifact)
        if folder is None:
            raise ValueError("its weights are not stored: restart the server, which rebuilds them")
        try:
            self._weights.change(policy.trained or policy.digest, folder)
        except UnsupportedModel:
            self._refused = entry.number
            raise
        self._named = Named(name=self._named.name, entry=entry.number)
        self._server.named, self._server.name = self._named, f"{policy.run}:{policy.node}"


STEP_SECONDS = 5.0
"""Time for the engine's last step after the server has ended."""
CONTEXT = 4096
"""Longest prompt with its answer in tokens, unless the options or the model say less."""


def main() -> None:
    """Read the settings, as JSON, from the command line, and serve until a signal."""
    settings = Serve.model_validate_json(sys.argv[1])
    options = settings.options
    try:
        keys = keys_of(options)
    except AccessError as error:
        sys.exit(f"error: {error}")
    try:
        # Before a policy is loaded.
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        socket.create_server((options.host, options.port), family=family).close()
    except OSError as error:
        sys.exit(f"error: cannot listen at --host {options.host} --port {options.port}: {error.strerror}")
    configure_jax()
    from rlhf.tuning.axes import Axes
    from rlhf.tuning.device import choose
    from rlhf.tuning.rollout.engine.limits import FREE_SHARE, Limits
    from rlhf.tuning.rollout.engine.live import Live
    from rlhf.tuning.rollout.engine.placement import replicas_of, sampling_mesh

    policy = open_policy(settings.policy)
    artifact = policy.artifact
    device, mesh = choose(), sampling_mesh(Axes(tensor=options.tensor))
    # A long prompt is prefilled a chunk at a time between decoding steps, which continue running answers.
    limits = Limits(
        slots=-(-options.slots // replicas_of(mesh)) or device.rollout_rows,
        context=min(options.context or CONTEXT, policy.config.max_positions),
        cache_bytes=device.cache_bytes,
        cache_share=FREE_SHARE,
        chunks=device.chunk_tokens,
        steps=4,
        prefill_chunks=1,
    )
    smaller = {name: getattr(options, name) for name in NATIVE}
    engine = policy.engine(limits, device.compute.dtype, mesh, top=TOP_LOGPROBS, **smaller)
    live, context = Live(engine), engine.context
    # Clients know a policy by the digest of the trained policy, also if its export is served.
    exported = artifact.manifest["inputs"]["policy"]["digest"] if artifact.stage == "export" else artifact.digest
    sessions = Sessions(options.sessions, options.session_tokens)
    server = Server(live, policy.tokenizer, settings.name, policy.stop_ids, context, exported, sessions)
    weights = Weights(server, options.take_weights)
    server.named = settings.named
    if options.follow and settings.named is not None:
        Follower(server, weights, Store(settings.policy.store), settings.named, settings.policy.base).start()
    print(
        f"serving {settings.name} at http://{options.host}:{options.port}/v1, {context} tokens of context", flush=True
    )
    print(f"the engine has {engine.size}", flush=True)
    serve(make_app(server, options, keys, weights), live, options.host, options.port)


def serve(app: Any, live: Any, host: str, port: int) -> None:
    """Serve an application over an engine until Ctrl-C, SIGTERM, or the end of the engine.

    Requests under way get their time before it returns.
    """
    failure: BaseException | None = None

    def on_end() -> None:
        nonlocal failure
        failure = live.failure
        # Threads of the server may wait for a step that hangs.
        live.stop()

    web = Web(app, host, port, on_end)
    threading.Thread(target=end_with, args=(live, web), daemon=True).start()

    def ask_to_end(*_: Any) -> None:
        web.should_exit = True

    # uvicorn raises its signals again after it has closed: SIGTERM would then end this process.
    signal.signal(signal.SIGTERM, ask_to_end)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            web.run()
    finally:
        live.close(STEP_SECONDS)
    if failure is not None:
        # The status of a failure makes a supervisor start the server again.
        sys.exit(f"the engine has stopped: {failure}")


def end_with(live: Any, web: Any, every: float = 1.0) -> None:
    """End the web server after the engine has stopped."""
    while live.failure is None:
        time.sleep(every)
    web.should_exit = True


if __name__ == "__main__":
    main()
