"""An episode on a server of OpenEnv, `openenv:URL`: a session of its WebSocket, with reset and step.

The protocol is that of package openenv 0.10 (`/ws`, `/schema`, `/metadata`), whose client is not used: it imports
fastmcp, which excludes the version of `mcp` that tools of MCP servers need.

Arguments of the recipe; the others are those of the server's reset, like the task's column `reset`:

    version   that the server's `/metadata` reports: nothing else of the environment is in keys
    field     of the observation that the policy reads; by default it reads all of them, as JSON

The text of a turn is the action as a JSON object, or the value of its only field. If the server's actions are calls of
MCP tools, the policy gets these tools, and a turn without a call ends the episode.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from rlhf.tuning.agents.adapters.step_environment import Adapted, Result, worded
from rlhf.tuning.agents.contract import Spec
from rlhf.tuning.agents.tools import ERROR, text_of
from rlhf.tuning.chat import Message, calls

TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the schemas of servers whose actions are calls of tools."""
ROOM_SECONDS = 10.0
"""Time that a server has to end earlier sessions, if it has no room for one more."""


class InvalidAction(ValueError):
    """The server refuses the form of an action, which the policy has written."""


class OpenEnv(Adapted):
    """A session of a server; its first message opens it."""

    def __init__(self, url: str, spec: Spec) -> None:
        if spec.tools:
            raise ValueError(f"openenv:{url} does not combine with environment.tools: leave them out")
        self._url, self._form, self._arguments = url.rstrip("/"), spec.tool_format, dict(spec.arguments)
        self._version, self._field = (self._arguments.pop(name, None) for name in ("version", "field"))
        self._socket: ClientConnection | None = None
        self._action: Mapping[str, Any] = {}
        self._tools: list[Mapping[str, Any]] = []

    def _describe(self) -> None:
        """Set the schema of an action, and the tools of a server whose actions are calls of tools."""
        self._action = self._get("schema")["action"]
        if self._action.get("title") in TOOL_ACTIONS:
            listed = self._ask("step", {"type": "list_tools"})["observation"]["tools"]
            self._tools = [_schema(tool) for tool in listed]

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        """The tools of the server. Raises ValueError for a server of another version."""
        if (version := self._get("metadata").get("version")) != self._version:
            raise ValueError(
                f"environment.arguments.version is {self._version!r}, and openenv:{self._url} serves version "
                f"{version!r}: write that one, so that keys contain it, or start the other server"
            )
        self._describe()
        return self._tools

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        self._describe()
        answer = self._ask("reset", {**self._arguments, **row.get("reset", {}), "seed": seed})
        # With tools, the task is the prompt.
        return (None if self._tools else self._text(answer)), {"state": answer["observation"]}

    def step(self, text: str) -> Result:
        if self._tools:
            return self._called(text)
        try:
            action = self._parsed(text)
            answer = self._ask("step", action)
        except InvalidAction as error:
            return str(error), 0.0, False, False, {"valid": False}
        info = {"action": action, "state": answer["observation"]}
        return self._text(answer), answer["reward"] or 0.0, answer["done"], False, info

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _called(self, text: str) -> Result:
        """Run the calls of a turn, up to the one that ends the episode."""
        parsed = calls.parse(text, self._form, self._tools)
        messages: list[Message] = []
        records: list[Mapping[str, Any]] = []
        reward, done = 0.0, not (parsed.calls or parsed.errors)
        for call in parsed.calls:
            try:
                answer = self._ask("step", {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments})
                reward, done = reward + (answer["reward"] or 0.0), answer["done"]
                result = _result(answer["observation"])
            except InvalidAction as error:
                result = f"{ERROR}{error}"
            messages.append({"role": "tool", "name": call.name, "content": result})
            failed = result.startswith(ERROR)
            records.append({"name": call.name, "arguments": call.arguments, "result": result, "failed": failed})
            if done:
                break
        messages += [{"role": "tool", "content": ERROR + error} for error in parsed.errors]
        return messages or None, reward, done, False, {"calls": records, "valid": not parsed.errors}

    def _parsed(self, text: str) -> Mapping[str, Any]:
        """Return the action in a text."""
        definitions, fields = self._action.get("$defs", {}), dict(self._action.get("properties", {}))
        fields.pop("metadata", None)
        value: Any = text.strip()
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
        if isinstance(value, Mapping) and value.keys() <= fields.keys():
            return value
        names = [n for n in self._action.get("required", ()) if n in fields] or list(fields)
        if len(names) != 1:
            raise InvalidAction(f"Answer with a JSON object with the fields {', '.join(fields)}.")
        field = fields[names[0]]
        field = definitions.get(field.get("$ref", "").rpartition("/")[2], field)
        return {names[0]: text.strip() if field.get("type", "string") == "string" else value}

    def _text(self, answer: Mapping[str, Any]) -> Any:
        seen = {name: value for name, value in answer["observation"].items() if name != "metadata"}
        if self._field is None:
            return worded(seen)
        if self._field not in seen:
            raise ValueError(f"environment.arguments.field is {self._field!r}: the observation has {', '.join(seen)}")
        return worded(seen[self._field])

    def _get(self, path: str) -> Any:
        # The process's deadline ends a request. Proxies of the machine do not reach loopback.
        return httpx.get(f"{self._url}/{path}", timeout=None, trust_env=False).raise_for_status().json()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Return the answer to a message. Raises InvalidAction, and RuntimeError for another error of the server."""
        deadline = time.monotonic() + ROOM_SECONDS
        while True:
            if self._socket is None:
                self._socket = connect(f"ws{self._url.removeprefix('http')}/ws", max_size=None, proxy=None)
            # A server without room for a session says so before it closes it.
            with contextlib.suppress(ConnectionClosed):
                self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv())
            if answer["type"] != "error":
                return answer["data"]
            error = answer["data"]
            if error["code"] != "CAPACITY_REACHED" or time.monotonic() > deadline:
                break
            self._socket = None
            time.sleep(0.1)
        if kind == "step" and error["code"] == "VALIDATION_ERROR":
            faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.get("errors", ())]
            raise InvalidAction(f"Invalid action. {'; '.join(faults)}")
        raise RuntimeError(f"openenv:{self._url}: {error['code']}: {error['message']}")


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _result(observation: Mapping[str, Any]) -> str:
    """Return the result of a call as the policy reads it."""
    if error := observation.get("error"):
        return f"{ERROR}{error['message']}"
    result = observation.get("result")
    return text_of(result.get("data", result) if isinstance(result, Mapping) else result)
