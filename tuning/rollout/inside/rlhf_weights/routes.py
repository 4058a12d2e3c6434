"""A policy for a vLLM server over HTTP: `--middleware rlhf_weights.routes.Weights`, beside `vllm.Worker`.

    GET    /weights               what is held: policy, type, and the fingerprint of what came last by such a push
    POST   /weights               begins a push: {"policy": name, "tied": bool} -> {"push": ID}
    POST   /weights/ID            a bucket (`frames`); the one before may come again
    POST   /weights/ID/commit     {"fingerprint": of all tensors}; asked again, the same answer
    DELETE /weights, /weights/ID  gives a push up, and forgets the fingerprint: weights will come in another way
    GET    /weight_info           {"weight_version": the policy's name, "streams": true}

From the beginning to the commit the server is paused and its policy is called `unknown`: the weights go straight into
the model. One that got no whole push stays so, and answers nothing until it gets one. Only the push that was begun last
counts. Where the server has an API key, /weights asks for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from .frames import BUCKET_BYTES, HEADER_BYTES

UNKNOWN = "unknown"
"""What the policy is called while it is none."""
BODY_BYTES = BUCKET_BYTES + HEADER_BYTES
"""A request's body, at most."""
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
            async with self._one:
                return await _call(client, "rlhf_drop", *rest)
        if words[0] == "weights" and method == "POST" and len(rest) == 1:
            return await _call(client, "rlhf_add", rest[0], await _body(receive))
        if words[0] == "weights" and method == "POST" and rest[1:] == ["commit"]:
            return await self._commit(client, rest[0], _json(await _body(receive)))
        raise _Refused(404, f"there is no {method} /{'/'.join(words)}")

    async def _begin(self, client: Any, asked: dict[str, Any]) -> dict[str, str]:
        policy, tied, push = asked.get("policy"), asked.get("tied"), secrets.token_hex(16)
        if not isinstance(policy, str) or not policy or not isinstance(tied, bool):
            raise _Refused(400, "a push begins with the policy's name and tied, whether its head is its embedding")
        _check_alone(client)
        if (await _workers(client, "rlhf_told"))[0]["tied"] and not tied:
            # Before anything changes: the server goes on with the policy that it has.
            raise _Refused(400, "the served model has its embedding for a head, and the policy has a head of its own")
        async with self._one:
            # The name goes first: whatever fails behind it, the server claims no policy.
            await client.update_weight_version(UNKNOWN)
            await client.pause_generation(mode="wait")
            await _call(client, "rlhf_begin", push, policy, tied)
        return {"push": push}

    async def _commit(self, client: Any, push: str, asked: dict[str, Any]) -> dict[str, Any]:
        async with self._one:
            done = await _call(client, "rlhf_commit", push, str(asked.get("fingerprint")))
            # With the caches that a connector holds outside the engine.
            if await client.reset_prefix_cache(reset_connector=_has_connector(client)) is False:
                raise RuntimeError("keys and values of the old policy are still in use: the server stays paused")
            await client.resume_generation()
            await client.update_weight_version(done["policy"])
        return done


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
