"""The routes of the OpenAI-compatible server: answers whole or as streams of events.

`Guard` is ASGI middleware: keys, the check of `Host`, and limits on the number, size and time of requests. FastAPI's
dependencies do not fit: they run after the routes have been matched, and have no limit of time on a stream. Slow
clients and the number of connections are a proxy's job (docs/guides/serving.md).

`POST /weights` names files below the server's root, which replace its weights without a restart. Running requests
finish on the old policy, and later ones wait for the new one. If a policy does not fit, the server refuses it and keeps
the old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import importlib.metadata
import json
import logging
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from rlhf.stages.serving.access import is_loopback, owner_of
from rlhf.stages.serving.answers import Completed
from rlhf.stages.serving.api import Asked, ChatRequest, CompletionRequest
from rlhf.stages.serving.errors import ClientGone, RequestError, answer_of, error_of
from rlhf.stages.serving.server import Job, Metrics, Server
from rlhf.stages.serving.sessions import Session
from rlhf.stages.serving.settings import ServeOptions
from rlhf.tuning.rollout.engine.live import EngineStopped
from rlhf.tuning.rollout.requests import Completion
from rlhf.tuning.rollout.servers.transfer import pull


class NotTaken(RequestError):
    """This server takes no weights."""

    status, code = 403, "weights_not_taken"


class Given(BaseModel):
    """POST /weights: a `Transfer` below the server's root."""

    model_config = ConfigDict(extra="forbid")
    policy: Annotated[str, Field(min_length=1, max_length=256)]
    """Its name in answers (`weight_version`)."""
    folder: Annotated[str, Field(max_length=1024)]
    """Its folder below the root."""
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
    """SHA-256 of each file by its name."""


class Weights:
    """Changes the policy of one server. Thread-safe."""

    def __init__(self, server: Server, root: str | None):
        """root: folder or fsspec URL of policies; None: the server takes none."""
        self._server, self._root = server, root
        self._lock = threading.Lock()
        """Held while a policy is read."""

    def take(self, given: Given) -> dict[str, str]:
        """Serve a policy from now on, unless it is served already.

        Raises NotTaken, ValueError for files that are missing, damaged or of another model, and WeightsLost.
        """
        if self._root is None:
            raise NotTaken("this server takes no weights: start it with --take-weights and a folder or URL")
        with self._lock, tempfile.TemporaryDirectory(prefix="rlhf-weights-") as scratch:
            if self._server.policy != given.policy:
                try:
                    folder = pull(self._root, given.folder, given.files, Path(scratch))
                except FileNotFoundError as error:
                    raise ValueError(
                        f"{given.folder} is not complete below the root of this server: {error}"
                    ) from error
                self._swap(given.policy, folder)
        return {"policy": given.policy}

    def change(self, policy: str, folder: Path) -> None:
        """Serve the policy of a model folder of this machine. Raises UnsupportedModel and WeightsLost."""
        with self._lock:
            self._swap(policy, folder)

    def _swap(self, policy: str, folder: Path) -> None:
        self._server.live.swap(functools.partial(self._load, policy, folder))

    def _load(self, name: str, folder: Path, engine: Any, generation: int) -> None:
        from rlhf.tuning.models.config import UnsupportedModel
        from rlhf.tuning.rollout.engine.folder import load_folder
        from rlhf.tuning.rollout.engine.live import WeightsLost

        try:
            load_folder(engine, folder)
        except UnsupportedModel:
            raise
        except Exception as error:
            self._server.policies[generation - 1] = None
            raise WeightsLost(f"policy {name} could not be loaded, and the old one was dropped: {error}") from error
        self._server.policies[generation] = name


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OPEN = ("/health", "/ready")
"""Answered without a key and without limits: supervisors act on them."""
OWNER = "rlhf.owner"
"""In a request's scope: the position of its key."""
WEIGHTS = "/weights"
"""Not counted as a request: a busy server takes weights too."""
LAST_WORD_SECONDS = 5.0


class Refused(RequestError):
    """A request that is over a limit or has no key."""

    def __init__(self, status: int, message: str, code: str, **headers: str):
        super().__init__(message)
        # The rest of the body is not read.
        self.status, self.code, self.headers = status, code, headers | {"connection": "close"}


class Guard:
    """An ASGI application around a FastAPI application."""

    def __init__(self, app: Any, metrics: Metrics, options: ServeOptions | None = None, keys: Sequence[str] = ()):
        self._app, self._metrics, self._options, self._keys = app, metrics, options or ServeOptions(), keys
        self.busy = 0
        """Requests that are being answered."""

    @property
    def full(self) -> bool:
        """Whether a further request would be refused."""
        return self.busy >= self._options.requests

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status, streams = time.monotonic(), 0, False

        async def watch(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                status, streams = message["status"], headers.get(b"content-type", b"").startswith(b"text/event-stream")
            elif not message.get("more_body", False):
                streams = False
            await send(message)

        seconds = self._options.request_seconds
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await self._answer(scope, receive, watch)
        except Refused as refused:
            await (await answer_of(None, refused))(scope, receive, watch)
        except TimeoutError:
            # The application has timeouts too.
            if not limit.expired():
                raise
            message = f"no whole answer within {seconds:g} s: ask for fewer samples or tokens (--request-seconds)"
            answer = await answer_of(None, Refused(504, message, "time_limit"))
            # A client that reads nothing does not take the error either.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_SECONDS):
                    if status == 0:
                        await answer(scope, receive, watch)
                    elif streams:
                        await watch({"type": "http.response.body", "body": b"data: " + bytes(answer.body) + b"\n\n"})
        finally:
            matches = (route.path for route in self._app.routes if route.matches(scope)[0] is Match.FULL)
            self._metrics.requests.labels(next(matches, "other"), status).inc()
            self._metrics.seconds.observe(time.monotonic() - began)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN and scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope[OWNER] = owner_of(self._keys, headers.get("authorization", "").encode("latin-1"))
        if scope[OWNER] is None:
            fault = (
                "this server does not take the key that was sent" if "authorization" in headers else "a key is needed"
            )
            text = f"{fault}: send one of its keys as `Authorization: Bearer KEY`"
            raise Refused(401, text, "invalid_api_key", **{"www-authenticate": "Bearer"})
        host = headers.get("host", "localhost")
        if not self._keys and not is_loopback(host):
            # DNS rebinding: a page in a browser has pointed its own name at this machine.
            raise Refused(403, f"Host is {host!r}: without a key, send a loopback address or localhost", "host")
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        counted = scope["path"] != WEIGHTS
        if counted and self.full:
            text = f"{self._options.requests} requests are being answered (--requests): ask again"
            raise Refused(429, text, "too_many_requests", **{"retry-after": "1"})
        self.busy += counted
        try:
            await self._app(scope, self._limited(headers, receive), send)
        finally:
            self.busy -= counted

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """Return `receive` for a body of a limited size. It raises Refused for a larger one."""
        left = limit = int(self._options.body_megabytes * 2**20)

        async def receive_limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                # A client reads the answer after it has sent its whole body.
                while message.get("more_body"):
                    message = await receive()
                raise Refused(413, f"the body is larger than {limit} bytes (--body-megabytes)", "body_too_large")
            return message

        return receive_limited


ModelT = TypeVar("ModelT", bound=BaseModel)

REWARD_KEY = "x-rlhf-reward-key"
"""Header with the key of a session's reward; the model's key does not suffice."""
STALLED_SECONDS = 900.0
"""A step of the engine that takes longer has hung; a step that compiles takes minutes."""


class Rewarded(BaseModel):
    """POST /sessions/NAME/reward."""

    model_config = ConfigDict(extra="forbid")
    reward: Annotated[float, Field(ge=-1e30, le=1e30)]
    success: bool | None = None


class RewardRefused(RequestError):
    """A reward without the key of its session."""

    status, code = 403, "reward_refused"


def make_app(
    server: Server, options: ServeOptions | None = None, keys: Sequence[str] = (), weights: Weights | None = None
) -> Guard:
    """Return the web application inside its guard. Without `weights` no route changes the policy."""
    app = FastAPI(title=server.name, docs_url=None, redoc_url=None, openapi_url=None)
    guard = Guard(app, server.metrics, options, keys)
    for kind in (RequestError, ValueError, EngineStopped, HTTPException, Exception):
        app.add_exception_handler(kind, answer_of)
    _add_status(app, server, guard)

    async def body(kind: type[ModelT], http: Request) -> ModelT:
        try:
            content = await http.body()
        except ClientDisconnect as error:
            raise ClientGone from error
        # A page of another site can send any other type without the browser's permission.
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ValueError("the body: expected a JSON object, sent with `Content-Type: application/json`")
        return await server.in_reader(kind.model_validate_json, content)

    def session_of(name: str, http: Request) -> Session:
        """Return a session that a request may end or reward."""
        session = server.sessions.get(name, http.scope[OWNER])
        if session.reward_key is not None and not hmac.compare_digest(
            http.headers.get(REWARD_KEY, "").encode(), session.reward_key.encode()
        ):
            raise RewardRefused(f"the header {REWARD_KEY} is missing or wrong: send the key from RLHF_GRADER_FD")
        return session

    async def respond(kind: type[Asked], http: Request) -> Any:
        asked = await body(kind, http)
        server.check_model(asked)
        name = http.path_params.get("name", "")
        # Outside of sessions an agent's program would have no limits, and its samples no record.
        session = server.sessions.of_call(name, http.scope[OWNER]) if name or server.sessions.closed else None
        return await _answer(server, await server.in_reader(server.read, asked, session), http)

    @app.post("/v1/completions")
    @app.post("/sessions/{name}/v1/completions")
    async def completions(http: Request) -> Any:
        return await respond(CompletionRequest, http)

    @app.post("/v1/chat/completions")
    @app.post("/sessions/{name}/v1/chat/completions")
    async def chat(http: Request) -> Any:
        return await respond(ChatRequest, http)

    @app.post("/sessions/{name}/reward")
    async def reward(name: str, http: Request) -> Any:
        given = await body(Rewarded, http)
        session = session_of(name, http)
        session.reward, session.success = given.reward, given.success
        return {"session": name, "reward": given.reward, "success": given.success}

    @app.get("/sessions/{name}")
    async def session(name: str, http: Request) -> Any:
        # A record may have millions of tokens: it is written as the client takes it.
        return StreamingResponse(server.sessions.get(name, http.scope[OWNER]).text(), media_type="application/json")

    @app.delete("/sessions/{name}")
    async def forget(name: str, http: Request) -> Any:
        session = session_of(name, http)
        server.sessions.remove(name, session.owner)
        return {"session": name, "turns": len(session.calls)}

    if weights is not None:

        @app.post(WEIGHTS)
        async def take(http: Request) -> Any:
            return await asyncio.to_thread(weights.take, await body(Given, http))

    return guard


def _add_status(app: FastAPI, server: Server, guard: Guard) -> None:
    """Add the routes that describe the server."""

    @app.get("/health")
    async def health() -> Any:
        fault = _fault(server)
        return {"status": "ok"} if fault is None else JSONResponse({"status": "failed", "error": fault}, 503)

    @app.get("/ready")
    async def ready() -> Any:
        fault = _fault(server) or (f"{guard.busy} requests are being answered" if guard.full else None)
        return {"status": "ready"} if fault is None else JSONResponse({"status": "not ready", "error": fault}, 503)

    class Status:
        """Metrics that are read when Prometheus asks."""

        def collect(self) -> Iterator[Any]:
            for name, value in {
                "requests_in_flight": guard.busy,
                "engine_up": _fault(server) is None,
                "engine_requests": server.live.open,
                "sessions": len(server.sessions),
            }.items():
                yield GaugeMetricFamily(f"rlhf_serve_{name}", name, value)
            yield CounterMetricFamily("rlhf_serve_engine_failed_steps", "Failed steps.", server.live.failed_steps)
            policy = {"model": server.name, "digest": server.policy or ""}
            if server.named is not None:
                policy |= {"name": server.named.name, "entry": str(server.named.entry)}
            yield InfoMetricFamily("rlhf_serve_policy", "The policy that answers.", policy)

    server.metrics.registry.register(Status())

    @app.get("/metrics")
    async def metrics() -> Any:
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/version")
    async def version() -> Any:
        return {"version": importlib.metadata.version("rlhf-pipeline")}

    @app.get("/weight_info")
    async def weight_info() -> Any:
        return {"weight_version": server.policy, "dtype": await asyncio.to_thread(lambda: server.dtype)}

    @app.get("/v1/models")
    @app.get("/sessions/{name}/v1/models")
    async def models() -> Any:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "rlhf"} for name in server.ids]
        return {"object": "list", "data": data}


def _fault(server: Server) -> str | None:
    """Return why the server cannot answer."""
    failure = server.live.failure
    if failure is not None:
        return f"{type(failure).__name__}: {failure}"
    seconds = server.live.step_seconds
    return f"the engine's step has hung for {seconds:.0f} s" if seconds > STALLED_SECONDS else None


async def _answer(server: Server, job: Job, http: Request) -> Response:
    """Return the answer as a JSON value, or as a stream of events if the request sets `stream`."""
    asked = job.asked
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": server.name}
    chunks = server.chunks(job, http.is_disconnected)
    if asked.stream:
        # The first chunk comes before the status is sent: it raises the errors of the request.
        first = await anext(chunks)
        kind = {"chat.completion": "chat.completion.chunk"}.get(asked.kind, asked.kind)
        lines = _lines(job, head | {"object": kind} | _policy(server, job), first, chunks)
        return StreamingResponse(lines, media_type="text/event-stream")
    scores = []
    if isinstance(asked, CompletionRequest) and asked.echo:
        for prompt in job.prompts:
            if await http.is_disconnected():
                raise ClientGone
            scores.append(await asyncio.to_thread(server.score, job, prompt))
    ends: dict[int, Any] = {}
    if asked.max_tokens != 0:
        async for number, update, choice, _ in chunks:
            if update.completion is not None:
                ends[number] = update.completion, choice

    def whole() -> bytes:
        bodies = _echoed(server, job, scores, ends) if scores else _choices(job, ends)
        # One choice at a time: a call of the encoder stops every other thread.
        choices = [json.dumps(body | {"index": number}, allow_nan=False) for number, body in enumerate(bodies)]
        usage = _usage(job, sum(len(done.tokens) for done, _ in ends.values()))
        rest = json.dumps(head | {"object": asked.kind, "usage": usage} | _policy(server, job))
        return f'{rest[:-1]}, "choices": [{", ".join(choices)}]}}'.encode()

    # In a thread: log-probabilities of many tokens are megabytes of text.
    return Response(await server.in_reader(whole), media_type="application/json")


def _usage(job: Job, sampled: int) -> dict[str, int]:
    prompts = sum(map(len, job.prompts))
    return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


def _policy(server: Server, job: Job) -> dict[str, Any]:
    """Return the field that names the policy that answered, if it has a name."""
    policy = server.policy_of(job)
    return {} if policy is None else {"weight_version": policy}


def _ids(job: Job, tokens: list[int]) -> dict[str, Any]:
    return {"token_ids": tokens} if job.asked.return_token_ids else {}


def _choices(job: Job, ends: dict[int, Any]) -> Iterator[dict[str, Any]]:
    for _, (done, choice) in sorted(ends.items()):
        yield choice.whole(done) | _ids(job, done.tokens) | {"finish_reason": choice.finish(done)}


def _echoed(server: Server, job: Job, scores: list[Any], ends: dict[int, Any]) -> Iterator[dict[str, Any]]:
    """Yield choices that begin with their prompts."""
    asked: Any = job.asked
    nothing = Completion([], [], "length"), Completed(server.text(), asked.logprobs)
    for number in range(len(job.prompts) * asked.n):
        given, (logps, top) = asked.prompt[number // asked.n], scores[number // asked.n]
        done, choice = ends.get(number, nothing)
        tokens = job.prompts[number // asked.n] + done.tokens
        text = given if isinstance(given, str) else server.decode(given)
        yield {
            "text": text + choice.whole(done)["text"],
            "logprobs": choice.logprobs(tokens, logps + done.logps, top + done.top),
            "finish_reason": choice.finish(done),
        } | _ids(job, tokens)


async def _lines(job: Job, head: dict[str, Any], first: Any, chunks: Any) -> AsyncIterator[str]:
    """Yield server-sent events. An error is the last event, because the status has been sent."""

    async def all_chunks() -> AsyncIterator[Any]:
        yield first
        async for chunk in chunks:
            yield chunk

    sampled = 0
    try:
        async for number, update, choice, new in all_chunks():
            sampled += len(update.tokens)
            stop = choice.finish(update.completion) if update.completion else None
            body = choice.delta(new, update) | _ids(job, update.tokens) | {"index": number, "finish_reason": stop}
            yield _event(head | {"choices": [body]})
    except Exception as error:
        status, fault = error_of(error)
        if status == 500:
            logging.getLogger("uvicorn.error").exception("a stream has failed")
        yield _event(fault)
        return
    if job.asked.stream_options.get("include_usage"):
        yield _event(head | {"choices": [], "usage": _usage(job, sampled)})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
