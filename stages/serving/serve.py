"""The program `rlhf serve`: a server over the policy of an artifact."""

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
from rlhf.stages.serving.app import make_app
from rlhf.stages.serving.connection import web_server
from rlhf.stages.serving.follow import Follower
from rlhf.stages.serving.guard import Bounds
from rlhf.stages.serving.policy import open_policy
from rlhf.stages.serving.server import TOP_LOGPROBS, Server
from rlhf.stages.serving.sessions import Sessions
from rlhf.stages.serving.settings import Serve
from rlhf.stages.serving.weights import Weights
from rlhf.stages.store.artifacts import Store

STEP_SECONDS = 5.0
"""For the step that the engine is in when the server has ended; one that hangs is left."""
CONTEXT = 4096
"""Longest prompt with its answer in tokens, unless the options or the model say less."""


def main() -> None:
    """Reads the settings, as JSON, from the command line, and serves until a signal."""
    settings = Serve.model_validate_json(sys.argv[1])
    options = settings.options
    try:
        keys = keys_of(options)
    except AccessError as error:
        sys.exit(f"error: {error}")
    if fault := unusable(options.host, options.port):
        sys.exit(f"error: --host {options.host} --port {options.port} cannot be listened at: {fault}")
    configure_jax()
    from rlhf.tuning.axes import Axes
    from rlhf.tuning.device import choose
    from rlhf.tuning.rollout.engine.limits import FREE_SHARE, Limits
    from rlhf.tuning.rollout.engine.live import Live
    from rlhf.tuning.rollout.engine.placement import replicas_of, sampling_mesh

    policy = open_policy(settings.policy)
    artifact = policy.artifact
    device, mesh = choose(), sampling_mesh(Axes(tensor=options.tensor))
    # A long prompt is prefilled a chunk at a time between decoding steps: running answers go on meanwhile.
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
    # The digest of the trained policy, also for its export: clients know the policy by it.
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
    bounds = Bounds(
        body_bytes=int(options.body_megabytes * 2**20),
        requests=options.requests,
        request_seconds=options.request_seconds,
    )
    serve(make_app(server, bounds, keys, weights), live, options.host, options.port)


def unusable(host: str, port: int) -> str | None:
    """Why an address cannot be listened at, before a policy is loaded for it; None where it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None


def serve(app: Any, live: Any, host: str, port: int) -> None:
    """Serves an application over an engine until a signal, or until the engine has stopped.

    Ctrl-C and SIGTERM end it alike: requests under way get their time, and then it returns.
    """
    failure: BaseException | None = None

    def ended() -> None:
        nonlocal failure
        failure = live.failure
        # Threads of the server may wait for a step that hangs.
        live.stop()

    web = web_server(app, host, port, ended=ended)
    threading.Thread(target=end_with, args=(live, web), daemon=True).start()

    def ask_to_end(*_: Any) -> None:
        web.should_exit = True

    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal again once all is closed: by itself that would be this process's death.
        signal.signal(signal.SIGTERM, ask_to_end)
    try:
        # Ctrl-C, which uvicorn raises again once all is closed.
        with contextlib.suppress(KeyboardInterrupt):
            web.run()
    finally:
        live.close(STEP_SECONDS)
    if failure is not None:
        # For the supervisor, which starts another one.
        sys.exit(f"the engine has stopped: {failure}")


def end_with(live: Any, web: Any, every: float = 1.0) -> None:
    """Ends the web server once the engine has stopped for good."""
    while live.failure is None:
        time.sleep(every)
    web.should_exit = True


if __name__ == "__main__":
    main()
