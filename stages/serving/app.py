"""The routes of the OpenAI-compatible server, its errors, and answers whole or as streams of events."""

from __future__ import annotations

import asyncio
import functools
import hmac
import importlib.metadata
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

# Routes' annotations are text that is looked up in this module.
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from rlhf.stages.serving.access import Keys
from rlhf.stages.serving.answers import completion_logprobs
from rlhf.stages.serving.api import Asked, ChatRequest, CompletionRequest
from rlhf.stages.serving.bodies import ModelT, read_body
from rlhf.stages.serving.guard import METRICS, OWNER, WEIGHTS, Bounds, Guard
from rlhf.stages.serving.server import ContextFull, Job, PolicyChanged, Server, UnknownModel
from rlhf.stages.serving.sessions import EvictedSession, LimitReached, Session, UnknownSession
from rlhf.stages.serving.weights import Given, NotTaken, Weights


class Rewarded(BaseModel):
    """POST /sessions/NAME/reward."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    reward: Annotated[float, Field(ge=-1e30, le=1e30)]
    success: bool | None = None


class RewardRefused(RuntimeError):
    """A reward without the key of its session."""


REWARD_KEY = "x-rlhf-reward-key"
"""Header with the key of a session's reward, which the model's key does not open."""
READERS, MOST_ASKED_FOR = 2, 16
"""Records of sessions that are written at a time, and those that are under way."""
CLIENT_GONE = 499
"""Status of a request whose client has left, as nginx logs it; nobody reads the answer."""
STALLED_SECONDS = 900.0
"""A step of the engine that takes longer has hung: programs that compile take minutes."""


def make_app(
    server: Server, bounds: Bounds | None = None, keys: Keys | None = None, weights: Weights | None = None
) -> Any:
    """The web application, behind its guard. Without `weights` it has no route that changes its policy."""
    app = FastAPI(title=server.name, docs_url=None, redoc_url=None, openapi_url=None)
    guard = Guard(app, server.counts, bounds, keys)
    _errors(app)
    _about(app, server, guard)
    if weights is not None:
        # No coroutine: a thread reads the policy.
        @app.post(WEIGHTS)
        async def take(http: Request) -> Any:
            return await asyncio.to_thread(weights.take, await _body(server, Given, http))

    async def completions(http: Request) -> Any:
        return await answered(CompletionRequest, server.completion, http)

    async def chat(http: Request) -> Any:
        return await answered(ChatRequest, server.chat, http)

    async def answered(kind: Any, job: Any, http: Request) -> Any:
        asked = await _body(server, kind, http)
        server.check_model(asked, server.policy)
        name = http.path_params.get("name")
        session = None if name is None else server.sessions.of_call(name, _owner(http))
        return await _answer(server, await server.read(job, asked, session), http)

    for path, route in (("completions", completions), ("chat/completions", chat)):
        app.post(f"/v1/{path}")(route)
        app.post(f"/sessions/{{name}}/v1/{path}")(route)

    @app.post("/sessions/{name}/reward")
    async def reward(name: str, http: Request) -> Any:
        given = await _body(server, Rewarded, http)
        session = _owned(server, name, http)
        session.reward, session.success = given.reward, given.success
        return {"session": name, "reward": given.reward, "success": given.success}

    reading, asked_for = asyncio.Semaphore(READERS), 0

    @app.get("/sessions/{name}")
    async def session(name: str, http: Request) -> Any:
        nonlocal asked_for
        found = server.sessions.get(name, _owner(http))
        if asked_for >= MOST_ASKED_FOR:
            return _error(429, f"{MOST_ASKED_FOR} sessions are being read: ask again", code="too_many_requests")
        asked_for += 1
        try:
            async with reading:
                # Nothing is written for a client that has left.
                if await http.is_disconnected():
                    return Response(status_code=CLIENT_GONE)
                # A thread writes a record of millions of tokens while others' streams continue.
                return Response(await asyncio.to_thread(found.text), media_type="application/json")
        finally:
            asked_for -= 1

    @app.delete("/sessions/{name}")
    async def forget(name: str, http: Request) -> Any:
        session = _owned(server, name, http)
        server.sessions.remove(name, session.owner)
        return {"session": name, "turns": len(session.calls)}

    return guard


async def _body(server: Server, kind: type[ModelT], http: Request) -> ModelT:
    """The body of a request, read in a thread."""
    return await server.in_reader(read_body, kind, await http.body(), http.headers.get("content-type", ""))


def _owned(server: Server, name: str, http: Request) -> Session:
    """A session that a request may end or reward. Raises RewardRefused where it has only the model's key."""
    session = server.sessions.get(name, _owner(http))
    if session.reward_key is not None and not hmac.compare_digest(
        http.headers.get(REWARD_KEY, "").encode(), session.reward_key.encode()
    ):
        raise RewardRefused(f"the header {REWARD_KEY} is missing or wrong: it takes the line that RLHF_REWARD_FD gives")
    return session


def _owner(http: Request) -> str:
    """The key of a request, by its digest: sessions of several keys are apart."""
    return str(http.scope.get(OWNER, ""))


def _about(app: Any, server: Server, guard: Guard) -> None:
    """Routes that tell of the server."""

    @app.get("/health")
    async def health() -> Any:
        fault = _fault(server)
        return {"status": "ok"} if fault is None else JSONResponse({"status": "failed", "error": fault}, 503)

    @app.get("/ready")
    async def ready() -> Any:
        fault = _fault(server)
        if fault is None and guard.counts.in_flight >= guard.bounds.requests:
            fault = f"{guard.counts.in_flight} requests are being answered"
        return {"status": "ready"} if fault is None else JSONResponse({"status": "not ready", "error": fault}, 503)

    @app.get(METRICS)
    async def metrics() -> Any:
        gauges = {
            "engine_up": float(_fault(server) is None),
            "engine_requests": float(server.live.open),
            "engine_failed_steps_total": float(server.live.failed_steps),
            "sessions": float(len(server.sessions)),
        }
        policy = {"model": server.name, "digest": server.policy or ""}
        if server.named is not None:
            policy |= {"name": server.named.name, "entry": str(server.named.entry)}
        return Response(guard.counts.text(gauges, {"policy_info": policy}), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": importlib.metadata.version("rlhf-pipeline")}

    @app.get("/weight_info")
    async def weight_info() -> dict[str, str | None]:
        return {"weight_version": server.policy, "dtype": await asyncio.to_thread(lambda: server.dtype)}

    def model(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "rlhf"}

    @app.get("/v1/models")
    @app.get("/sessions/{name}/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(name) for name in server.ids]}

    @app.get("/v1/models/{wanted:path}")
    async def retrieve(wanted: str) -> dict[str, Any]:
        server.check_model(Asked(model=wanted), server.policy)
        return model(wanted)


def _fault(server: Server) -> str | None:
    """Why the server cannot answer."""
    failure = server.live.failure
    if failure is not None:
        return f"{type(failure).__name__}: {failure}"
    seconds = server.live.step_seconds
    return f"the engine's step has hung for {seconds:.0f} s" if seconds > STALLED_SECONDS else None


def _error(status: int, message: str, param: str | None = None, code: str | None = None) -> Any:
    return JSONResponse({"error": _told(status, message, param, code)}, status)


def _told(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def _of(error: Exception) -> tuple[int, str | None]:
    """(status, code) of an error of a request."""
    from rlhf.tuning.rollout.engine.live import EngineStopped

    kinds: list[tuple[type[Exception], int, str | None]] = [
        (ContextFull, 400, "context_length_exceeded"),
        (LimitReached, 400, "turn_limit"),
        (ValueError, 400, None),
        (UnknownSession, 404, "session_not_found"),
        (EvictedSession, 410, "session_evicted"),
        (UnknownModel, 404, "model_not_found"),
        (NotTaken, 403, "weights_not_taken"),
        (RewardRefused, 403, "reward_refused"),
        (PolicyChanged, 503, "policy_changed"),
        (EngineStopped, 503, "engine_failed"),
    ]
    return next(((status, code) for kind, status, code in kinds if isinstance(error, kind)), (500, None))


def _hidden(error: Exception) -> str:
    # Its text may have paths and parts of others' requests.
    return f"the server has failed ({type(error).__name__}); its log says where"


def _errors(app: Any) -> None:
    """Errors in OpenAI's form."""
    from rlhf.tuning.rollout.engine.live import EngineStopped

    async def refused(_: Request, error: Exception) -> Any:
        status, code = _of(error)
        param = "model" if isinstance(error, UnknownModel) else getattr(error, "param", None)
        return _error(status, str(error), param, code)

    told = (ValueError, UnknownSession, EvictedSession, UnknownModel, EngineStopped)
    for kind in (*told, NotTaken, PolicyChanged, RewardRefused):
        app.add_exception_handler(kind, refused)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Any:
        return _error(500, _hidden(error))

    @app.exception_handler(HTTPException)
    async def no_route(_: Request, error: HTTPException) -> Any:
        return _error(error.status_code, str(error.detail))


async def _answer(server: Server, job: Job, http: Any) -> Any:
    """The answer as one JSON value, or as a stream of events if the request sets `stream`."""
    asked = job.asked
    head = {"id": f"{job.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": server.name}
    used = {"prompt_tokens": sum(map(len, job.prompts)), "completion_tokens": 0, "total_tokens": 0}
    if asked.stream:
        chunks = server.chunks(job, http.is_disconnected)
        # After the first chunk the status is sent: errors of the request must come up before.
        first = await anext(chunks)
        kind = {"chat.completion": "chat.completion.chunk"}.get(job.kind, job.kind)
        lines = _lines(asked, head | {"object": kind} | _by(server, job), first, chunks, used)
        return StreamingResponse(lines, media_type="text/event-stream")
    if isinstance(asked, CompletionRequest) and asked.echo:
        scores = []
        for prompt in job.prompts:
            if await http.is_disconnected():
                return Response(status_code=CLIENT_GONE)
            scores.append(await asyncio.to_thread(server.score, job, prompt))
        ends = await _ended(server, job, http, used) if asked.max_tokens != 0 else []
        made = functools.partial(_echoed, server, job, asked, scores, ends)
    else:
        made = functools.partial(_choices, asked, await _ended(server, job, http, used))

    def whole() -> bytes:
        # One choice at a time: a call of the encoder stops every other thread.
        choices = [json.dumps(body | {"index": number}, allow_nan=False) for number, body in enumerate(made())]
        used["total_tokens"] = used["prompt_tokens"] + used["completion_tokens"]
        rest = json.dumps(head | {"object": job.kind, "usage": used} | _by(server, job))
        return f'{rest[:-1]}, "choices": [{", ".join(choices)}]}}'.encode()

    # In a thread: log-probabilities of many tokens are megabytes of text.
    return Response(await server.in_reader(whole), media_type="application/json")


def _by(server: Server, job: Job) -> dict[str, Any]:
    """Which policy answered, where it has a name."""
    policy = server.policy_of(job)
    return {} if policy is None else {"weight_version": policy}


async def _ended(server: Server, job: Job, http: Any, used: dict[str, int]) -> list[tuple[Any, Any]]:
    """(completion, choice) of each sample."""
    ends: dict[int, tuple[Any, Any]] = {}
    async for number, update, choice, _ in server.chunks(job, http.is_disconnected):
        if update.completion is not None:
            ends[number] = update.completion, choice
            used["completion_tokens"] += len(update.completion.tokens)
    return [ends[number] for number in sorted(ends)]


def _ids(asked: Asked, tokens: list[int]) -> dict[str, Any]:
    return {"token_ids": tokens} if asked.return_token_ids else {}


def _choices(asked: Asked, ends: list[tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
    for done, choice in ends:
        yield choice.whole(done) | _ids(asked, done.tokens) | {"finish_reason": choice.finish(done)}


def _echoed(
    server: Server, job: Job, asked: CompletionRequest, scores: list[Any], ends: list[tuple[Any, Any]]
) -> Iterator[dict[str, Any]]:
    """Choices that begin with their prompts, whose tokens have log-probabilities too but for the first."""
    per_prompt = asked.n or 1
    for number in range(len(job.prompts) * per_prompt):
        prompt, (known, best) = job.prompts[number // per_prompt], scores[number // per_prompt]
        done, choice = ends[number] if ends else (None, None)
        given = asked.prompts[number // per_prompt]
        tokens, logps, top = list(prompt), list(known), list(best)
        said = given if isinstance(given, str) else server.decode(given)
        finish = "length"
        if done is not None and choice is not None:
            tokens, logps, top = tokens + done.tokens, logps + done.logps, top + done.top
            said, finish = said + choice.whole(done)["text"], choice.finish(done)
        found = None
        if asked.logprobs is not None:
            found = completion_logprobs(server.text(), tokens, logps, top, asked.logprobs, 0)
        yield {"text": said, "logprobs": found, "finish_reason": finish} | _ids(asked, tokens)


async def _lines(
    asked: Asked, head: dict[str, Any], first: Any, chunks: Any, used: dict[str, int]
) -> AsyncIterator[str]:
    """Server-sent events; a failure on the way is the last one."""

    async def all_chunks() -> AsyncIterator[Any]:
        yield first
        async for chunk in chunks:
            yield chunk

    try:
        async for number, update, choice, new in all_chunks():
            used["completion_tokens"] += len(update.tokens)
            body = choice.delta(new, update) | _ids(asked, update.tokens)
            stop = choice.finish(update.completion) if update.completion else None
            yield _event(head | {"choices": [body | {"index": number, "finish_reason": stop}]})
    except Exception as error:
        # The status has been sent: what failed can only be told here.
        status, code = _of(error)
        if status == 500:
            logging.getLogger("uvicorn.error").exception("a stream has failed")
        yield _event({"error": _told(status, _hidden(error) if status == 500 else str(error), code=code)})
        return
    if asked.stream_options and asked.stream_options.include_usage:
        used["total_tokens"] = used["prompt_tokens"] + used["completion_tokens"]
        yield _event(head | {"choices": [], "usage": used})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
