"""A policy for a vLLM server over HTTP: `--middleware rlhf_weights.routes.Weights`, beside `vllm.Worker`.

    GET    /weights               what is held: policy, type, and the fingerprint of what came last by such a push
    POST   /weights               begins a push: {"policy": name, "tied": bool, "push": ID} -> {"push": ID}
    POST   /weights/ID            a bucket (`frames`)
    POST   /weights/ID/commit     {"fingerprint": of all tensors}
    DELETE /weights/ID            gives a push up
    DELETE /weights               gives up whatever is under way, and forgets the fingerprint: weights will come in
                                  another way
    GET    /weight_info           {"weight_version": the policy's name, "streams": true}

What was asked last may be asked again, where its answer was lost: it is done once.

From the beginning to the commit the server is paused and its policy is called `unknown`: the weights go straight into
the model. One that got part of a push stays so, and answers nothing until it gets a whole one. One that got none of its
tensors goes on with the policy that it had, when the push is given up or nothing has come for `SILENT_SECONDS`. Only
the push that was begun last counts. Where the server has an API key, /weights asks for it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from .frames import BUCKET_BYTES, HEADER_BYTES

UNKNOWN = "unknown"
"""What the policy is called while it is none."""
BODY_BYTES = BUCKET_BYTES + HEADER_BYTES
"""A request's body, at most."""
SILENT_SECONDS = 60.0
"""A push that brings nothing for so long is given up."""
START = "--worker-extension-cls rlhf_weights.vllm.Worker"


class _Refused(Exception):
    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


class Weights:
    """An ASGI middleware; the engine's client is the application's, as vLLM's own routes find it."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app
        self._one = asyncio.Lock()
        """Held while a push begins or ends."""
        self._now: str | None = None
        """The push that was begun last, until it ends."""
        self._before = UNKNOWN
        """What the policy was called before it."""
        self._pausing = False
        """Whether its beginning waits for the requests under way."""
        self._touched = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        words = path.strip("/").split("/")
        if scope["type"] != "http" or words[0] not in ("weights", "weight_info"):
            await self.app(scope, receive, send)
            return
        try:
            if words[0] == "weights":
                _authorize(scope)
            status, answer = 200, await self._answer(scope, words, receive)
        except _Refused as refused:
            status, answer = refused.status, {"error": {"message": str(refused)}}
        except Exception as error:
            status, answer = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Any, words: list[str], receive: Any) -> Any:
        client, method, rest = scope["app"].state.engine_client, scope["method"], words[1:]
        if words == ["weight_info"] and method == "GET":
            return {"weight_version": await client.get_weight_version(), "streams": True}
        if words == ["weights"] and method == "GET":
            return await _told(client)
        if words == ["weights"] and method == "POST":
            return await self._begin(client, _json(await _body(receive)))
        if words[0] == "weights" and method == "DELETE" and len(rest) < 2:
            return await self._drop(client, *rest)
        if words[0] == "weights" and method == "POST" and len(rest) == 1:
            # While one is loaded, for however long, its client has not left.
            self._touched = math.inf
            try:
                return await _call(client, "rlhf_add", rest[0], await _body(receive))
            finally:
                self._touched = time.monotonic()
        if words[0] == "weights" and method == "POST" and rest[1:] == ["commit"]:
            return await self._commit(client, rest[0], _json(await _body(receive)))
        raise _Refused(404, f"there is no {method} /{'/'.join(words)}")

    async def _begin(self, client: Any, asked: dict[str, Any]) -> dict[str, str]:
        policy, tied, push = asked.get("policy"), asked.get("tied"), asked.get("push", secrets.token_hex(16))
        if not all(isinstance(name, str) and name for name in (policy, push)) or not isinstance(tied, bool):
            raise _Refused(400, "a push begins with the policy's name and tied, whether its head is its embedding")
        _check_alone(client)
        if (await _workers(client, "rlhf_told"))[0]["tied"] and not tied:
            # Before anything changes: the server goes on with the policy that it has.
            raise _Refused(400, "the served model has its embedding for a head, and the policy has a head of its own")
        async with self._one:
            if self._now == push:
                return {"push": push}
            if self._now is not None:
                await self._end(client, self._now)
            self._before, self._now = await client.get_weight_version(), push
            # The name goes first: whatever fails behind it, the server claims no policy.
            await client.update_weight_version(UNKNOWN)
            self._pausing = True
            try:
                await client.pause_generation(mode="wait")
            except BaseException:
                self._now = None
                await self._go_on(client)
                raise
            finally:
                self._pausing = False
            if self._now != push:
                await self._go_on(client)
                raise _Refused(409, "the push was given up before it began")
            await _call(client, "rlhf_begin", push, policy, tied)
            self._touched = time.monotonic()
            self._watching = asyncio.create_task(self._watch(client, push))
        return {"push": push}

    async def _commit(self, client: Any, push: str, asked: dict[str, Any]) -> dict[str, Any]:
        async with self._one:
            done = await _call(client, "rlhf_commit", push, str(asked.get("fingerprint")))
            policy = done["policy"]
            if done.get("again") and await client.get_weight_version() == policy and not await client.is_paused():
                # Requests that run already use keys and values of this policy.
                return done
            self._now = None
            # With the caches that a connector holds outside the engine.
            if await client.reset_prefix_cache(reset_connector=_has_connector(client)) is False:
                raise RuntimeError("keys and values of the old policy are still in use: the server stays paused")
            await client.update_weight_version(policy)
            await client.resume_generation()
        return done

    async def _drop(self, client: Any, *number: str) -> dict[str, Any]:
        if self._pausing and number == (self._now,):
            # Its beginning sees it when the requests under way have ended.
            self._now = None
            return {}
        async with self._one:
            if number:
                await self._end(client, *number)
            else:
                self._now, self._before = None, UNKNOWN
                await _call(client, "rlhf_drop")
        return {}

    async def _end(self, client: Any, push: str) -> None:
        """Gives a push up. The server goes on where none of its tensors has come."""
        intact = (await _call(client, "rlhf_drop", push))["intact"]
        if self._now == push:
            self._now = None
            if intact:
                await self._go_on(client)

    async def _go_on(self, client: Any) -> None:
        """With the policy from before, unless it was none."""
        if self._before != UNKNOWN:
            await client.update_weight_version(self._before)
            await client.resume_generation()

    async def _watch(self, client: Any, push: str) -> None:
        """Gives a push up whose client has left."""
        while self._now == push and (left := self._touched + SILENT_SECONDS - time.monotonic()) > 0:
            await asyncio.sleep(min(left, SILENT_SECONDS))
        if self._now == push:
            async with self._one:
                await self._end(client, push)


def _check_alone(client: Any) -> None:
    """Raises _Refused for a server of several engines: vLLM passes on the answers of the first one alone, and begins
    and ends of pushes would meet in several processes."""
    parallel = getattr(getattr(client, "vllm_config", None), "parallel_config", None)
    for name in ("data_parallel_size", "_api_process_count"):
        if (count := getattr(parallel, name, 1)) > 1:
            raise _Refused(
                400,
                f"it has {name.strip('_')} {count}, and a stream needs one engine behind one process: "
                "start a server for each, or give weights by a folder",
            )


def _has_connector(client: Any) -> bool:
    return getattr(getattr(client, "vllm_config", None), "kv_transfer_config", None) is not None


async def _told(client: Any) -> dict[str, Any]:
    all_ = await _workers(client, "rlhf_told")
    prints = {one["fingerprint"] for one in all_}
    told = all_[0] | {"fingerprint": prints.pop() if len(prints) == 1 else "of workers that differ"}
    policy, paused = await client.get_weight_version(), await client.is_paused()
    return told | {"policy": policy, "paused": paused, "bucket_bytes": BUCKET_BYTES}


async def _call(client: Any, method: str, *args: Any) -> dict[str, Any]:
    """The answer of the workers, which all do the same. Raises _Refused with the first one's words that does not."""
    all_ = await _workers(client, method, *args)
    for one in all_:
        if "refused" in one:
            raise _Refused(one["status"], one["refused"])
    return all_[0]


async def _workers(client: Any, method: str, *args: Any) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = await client.collective_rpc(method, args=args)
    except Exception as error:
        if method == "rlhf_told":
            raise _Refused(404, f"its workers take no weights: start it with {START} ({error})") from error
        raise
    return found


def _authorize(scope: Any) -> None:
    args = getattr(scope["app"].state, "args", None)
    keys = [k for k in getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")] if k]
    said = dict(scope["headers"]).get(b"authorization", b"")
    if keys and not any(secrets.compare_digest(said, f"Bearer {key}".encode()) for key in keys):
        raise _Refused(401, "the bearer token is none of the server's keys")


async def _body(receive: Any) -> bytes:
    """A request's body. Raises _Refused where it is too large, or its sender has left."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Refused(400, "the request was cut")
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > BODY_BYTES:
            raise _Refused(413, f"a bucket has at most {BODY_BYTES} bytes")
    return b"".join(parts)


def _json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise _Refused(400, f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise _Refused(400, "the body is no JSON object")
    return value
