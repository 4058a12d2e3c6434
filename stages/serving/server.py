"""An OpenAI-compatible server over the policy of an artifact: completions, chat, streaming, log-probabilities."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import queue
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

# Routes' annotations are text that is looked up in this module.
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from stages.common.compilation import configure_jax
from stages.sampling.settings import NATIVE
from stages.serving.api import (
    FINISH,
    Asked,
    ChatRequest,
    CompletionRequest,
    Text,
    chat_logprobs,
    completion_logprobs,
)
from stages.serving.policy import open_policy
from stages.serving.settings import Serve

CONTEXT = 4096
"""Longest prompt with its answer in tokens, unless the options or the model say less."""
TOP_LOGPROBS = 5
"""Most probable tokens that an answer can show at each position."""


class Server:
    """Turns requests of the API into the engine's and back."""

    def __init__(
        self, live: Any, tokenizer: Any, name: str, stops: tuple[int, ...], context: int, policy: str | None = None
    ):
        """`policy` is the digest of the artifact whose policy it is."""
        self.policy = policy
        self._live, self._tokenizer, self.name, self._stops, self._context = live, tokenizer, name, stops, context
        self._special = set(tokenizer.all_special_ids) | set(stops)

    def submit(
        self, asked: Asked, prompt: list[int], max_tokens: int | None, counter: int, notify: Callable[[], None]
    ) -> Any:
        """The stream of a prompt's samples. Raises ValueError for a request that cannot be met."""
        from tuning.rollout.requests import Request, stop_strings

        strings = asked.strings
        decode = Text(self._tokenizer, self._special, strings).decode
        stops = (*(() if asked.ignore_eos else self._stops), *(asked.stop_token_ids or ()))
        room = self._context - len(prompt)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; the context is {self._context}: shorten it, or serve with more"
            )
        request = Request(
            prompt,
            min(max_tokens or room, room),
            asked.sampling(),
            tuple(dict.fromkeys(stops)),
            asked.root(),
            counter,
            asked.n or 1,
            stop_strings(lambda tokens: decode(list(tokens)), strings) if strings else None,
            name="prompt",
        )
        return self._live.submit(request, notify)

    def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt; none is added."""
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt, add_special_tokens=False))
        return prompt

    def chat_ids(self, asked: ChatRequest) -> list[int]:
        """Token ids of a conversation in the model's template."""
        from tuning.models.tokenizer import chat_prompt_ids

        return chat_prompt_ids(self._tokenizer, [m.plain() for m in asked.messages])

    async def chunks(
        self, asked: Asked, prompts: list[list[int]], max_tokens: int | None, gone: Callable[[], Any]
    ) -> AsyncIterator[tuple[int, Any, Text, str]]:
        """(choice, update, its text so far, the new part of it) until all samples of all prompts have ended."""
        fresh, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            # Called in the engine's thread; asyncio's events belong to the thread of their loop.
            loop.call_soon_threadsafe(fresh.set)

        streams: list[Any] = []
        per_prompt = asked.n or 1
        texts: dict[int, Text] = {}
        try:
            for i, prompt in enumerate(prompts):
                # In a thread: `submit` waits for the step that the engine is in.
                streams.append(await asyncio.to_thread(self.submit, asked, prompt, max_tokens, i, notify))
            while not all(s.ended for s in streams):
                # At least once a second, also without an update, to see whether the client has left.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(fresh.wait(), timeout=1.0)
                fresh.clear()
                for i, stream in enumerate(streams):
                    while (update := _next(stream)) is not None:
                        choice = i * per_prompt + update.sample
                        text = texts.setdefault(choice, Text(self._tokenizer, self._special, asked.strings))
                        yield choice, update, text, text.add(update.tokens, update.completion is not None)
                if await gone():
                    return
        finally:
            for stream in streams:
                # A client that left, or an error: the engine must not go on for it.
                if not stream.ended:
                    stream.cancel()


def _next(stream: Any) -> Any:
    """The next update that is there already; None where none is."""
    try:
        return None if stream.ended else stream.next(timeout=0)
    except queue.Empty:
        return None


class UnknownModel(LookupError):
    """A request for a model that this server does not serve."""


def _error(status: int, message: str, param: str | None = None, code: str | None = None) -> Any:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JSONResponse({"error": error}, status)


def make_app(server: Server) -> Any:
    """The web application."""
    app = FastAPI(title=server.name, docs_url=None, redoc_url=None)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Any:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"][1:])
        message = first["msg"].removeprefix("Value error, ")
        return _error(400, f"{where}: {message}" if where else message, param=where or None)

    @app.exception_handler(ValueError)
    async def refused(_: Request, error: ValueError) -> Any:
        return _error(400, str(error))

    @app.exception_handler(HTTPException)
    async def no_route(_: Request, error: HTTPException) -> Any:
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(UnknownModel)
    async def unknown_model(_: Request, error: UnknownModel) -> Any:
        return _error(404, str(error), param="model", code="model_not_found")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": importlib.metadata.version("rlhf-pipeline")}

    @app.get("/weight_info")
    async def weight_info() -> dict[str, str | None]:
        return {"weight_version": server.policy}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": server.name, "object": "model", "created": 0, "owned_by": "rlhf"}]}

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, http: Request) -> Any:
        prompts = [server.prompt_ids(p) for p in asked.prompts]
        return await _answer(server, asked, prompts, asked.max_tokens, http, _Completion(asked.logprobs))

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, http: Request) -> Any:
        limit = asked.max_completion_tokens or asked.max_tokens
        shape = _Chat(bool(asked.logprobs), asked.top_logprobs or 0)
        return await _answer(server, asked, [server.chat_ids(asked)], limit, http, shape)

    return app


class _Completion:
    """The fields of an answer of /v1/completions."""

    kind, whole, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, top: int | None):
        self.top = top

    def choice(self, text: Text, new: str, tokens: list[int], logps: list[float], best: list[Any], at: int) -> Any:
        logprobs = None if self.top is None else completion_logprobs(text, tokens, logps, best, self.top, at)
        return {"text": new, "logprobs": logprobs}

    delta = choice


class _Chat:
    """The fields of an answer of /v1/chat/completions."""

    kind, whole, prefix = "chat.completion.chunk", "chat.completion", "chatcmpl"

    def __init__(self, logprobs: bool, top: int):
        self.top, self._logprobs = top, logprobs

    def _found(self, text: Text, tokens: list[int], logps: list[float], best: list[Any]) -> Any:
        return chat_logprobs(text, tokens, logps, best, self.top) if self._logprobs else None

    def choice(self, text: Text, new: str, tokens: list[int], logps: list[float], best: list[Any], at: int) -> Any:
        return {
            "message": {"role": "assistant", "content": new, "refusal": None},
            "logprobs": self._found(text, tokens, logps, best),
        }

    def delta(self, text: Text, new: str, tokens: list[int], logps: list[float], best: list[Any], at: int) -> Any:
        return {
            "delta": {"role": "assistant", "content": new},
            "logprobs": self._found(text, tokens, logps, best),
        }


async def _answer(
    server: Server, asked: Asked, prompts: list[list[int]], max_tokens: int | None, http: Any, shape: Any
) -> Any:
    """The answer as one JSON value, or as a stream of events if the request sets `stream`."""
    if asked.model not in (None, server.name, server.policy):
        raise UnknownModel(f"no model {asked.model!r}; this server has {server.name}")
    if (shape.top or 0) > TOP_LOGPROBS:
        raise ValueError(f"at most {TOP_LOGPROBS} of the most probable tokens can be shown, {shape.top} were asked for")
    head = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": server.name}
    chunks = server.chunks(asked, prompts, max_tokens, http.is_disconnected)
    used = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": 0, "total_tokens": 0}
    if asked.stream:
        # After the first chunk the status is sent: errors of the request must come up before.
        first = await anext(chunks)
        lines = _lines(asked, head | {"object": shape.kind}, shape, first, chunks, used)
        return StreamingResponse(lines, media_type="text/event-stream")
    ends: dict[int, tuple[Any, Text]] = {}
    async for choice, update, text, _ in chunks:
        if update.completion is not None:
            ends[choice] = update.completion, text
    choices = []
    for number, (done, text) in sorted(ends.items()):
        body = shape.choice(text, text.sent, done.tokens, done.logps, done.top, 0)
        ids = {"token_ids": done.tokens} if asked.return_token_ids else {}
        choices.append(body | ids | {"index": number, "finish_reason": FINISH[done.stop]})
        used["completion_tokens"] += len(done.tokens)
    used["total_tokens"] = used["prompt_tokens"] + used["completion_tokens"]
    return head | {"object": shape.whole, "choices": choices, "usage": used}


async def _lines(
    asked: Asked, head: dict[str, Any], shape: Any, first: Any, chunks: Any, used: dict[str, int]
) -> AsyncIterator[str]:
    """Server-sent events."""

    async def all_chunks() -> AsyncIterator[Any]:
        yield first
        async for chunk in chunks:
            yield chunk

    async for number, update, text, new in all_chunks():
        used["completion_tokens"] += len(update.tokens)
        # Where the new part begins in the text.
        at = len(text.sent) - len(new)
        body = shape.delta(text, new, update.tokens, update.logps, update.top, at)
        ids = {"token_ids": update.tokens} if asked.return_token_ids else {}
        stop = FINISH[update.completion.stop] if update.completion else None
        yield _event(head | {"choices": [body | ids | {"index": number, "finish_reason": stop}]})
    if asked.stream_options and asked.stream_options.include_usage:
        used["total_tokens"] = used["prompt_tokens"] + used["completion_tokens"]
        yield _event(head | {"choices": [], "usage": used})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def main() -> None:
    """Reads the settings, as JSON, from the command line, and serves until a signal."""
    settings = Serve.model_validate_json(sys.argv[1])
    options = settings.options
    configure_jax()
    import uvicorn

    from tuning.device import choose
    from tuning.rollout.engine.limits import Limits
    from tuning.rollout.engine.live import Live

    policy = open_policy(settings.policy)
    artifact = policy.artifact
    device = choose()
    # A long prompt is prefilled a chunk at a time between decoding steps: running answers go on meanwhile.
    limits = Limits(
        slots=options.slots or device.rollout_rows,
        context=min(options.context or CONTEXT, policy.config.max_positions),
        cache_bytes=device.cache_bytes,
        chunks=device.chunk_tokens,
        steps=4,
        prefill_chunks=1,
    )
    smaller = {name: getattr(options, name) for name in NATIVE}
    engine = policy.engine(limits, device.compute.dtype, top=TOP_LOGPROBS, **smaller)
    live, context = Live(engine), engine.context
    # The digest of the trained policy, also for its export: clients know the policy by it.
    exported = artifact.manifest["inputs"]["policy"]["digest"] if artifact.stage == "export" else artifact.digest
    server = Server(live, policy.tokenizer, settings.name, policy.stop_ids, context, exported)
    print(
        f"serving {settings.name} at http://{options.host}:{options.port}/v1, {context} tokens of context", flush=True
    )
    try:
        uvicorn.run(make_app(server), host=options.host, port=options.port, log_level="warning")
    finally:
        live.close()


if __name__ == "__main__":
    main()
