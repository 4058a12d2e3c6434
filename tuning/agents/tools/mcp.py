"""Tools of an MCP server, `mcp:COMMAND` (over its standard input and output) or `mcp:URL` (package `mcp`).

The client runs in a thread with its own event loop, so that the server keeps running between calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from rlhf.tuning.agents.tools.python import ToolError

PREFIX = "mcp:"

Served = tuple[dict[str, Any], Callable[..., Any]]
"""A tool's schema and its call."""


def load() -> None:
    """Imports the package. Raises ValueError without it."""
    try:
        import mcp
    except ImportError as error:
        raise ValueError(f"tools of MCP servers need the package mcp (pip install 'mcp>=2'): {error}") from error
    if not hasattr(mcp, "Client"):
        raise ValueError("tools of MCP servers need mcp 2 or newer (pip install 'mcp>=2')")


@contextlib.contextmanager
def connected(target: str, seconds: float) -> Iterator[list[Served]]:
    """The tools of a server that runs, or is connected, meanwhile.

    target: a command, or a URL.
    seconds: limit of one call, which the server's client keeps too.
    """
    load()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    found: Future[list[Served]] = Future()

    async def live() -> None:
        from mcp import Client, StdioServerParameters

        server: Any = target
        if "://" not in target:
            command, *arguments = shlex.split(target)
            server = StdioServerParameters(command=command, args=arguments)
        try:
            async with Client(server, read_timeout_seconds=seconds) as client:
                tools, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += [(_schema(tool), _call(client, tool.name, loop)) for tool in page.tools]
                    cursor = page.next_cursor
                    if not cursor:
                        break
                found.set_result(tools)
                await stop.wait()
        except BaseException as error:
            # Behind the connection its end is nobody's concern.
            if not found.done():
                found.set_exception(ValueError(f"MCP server {target}: {_cause(error)}"))

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),), daemon=True)
    thread.start()
    try:
        yield found.result()
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(1.0)


def _schema(tool: Any) -> dict[str, Any]:
    parameters = dict(tool.input_schema or {"type": "object", "properties": {}})
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": parameters},
    }


def _call(client: Any, name: str, loop: asyncio.AbstractEventLoop) -> Callable[..., Any]:
    def call(**arguments: Any) -> str:
        future = asyncio.run_coroutine_threadsafe(client.call_tool(name, arguments), loop)
        try:
            result = future.result()
        except BaseException:
            future.cancel()
            raise
        texts = [getattr(part, "text", None) or f"({part.type})" for part in result.content]
        text = "\n".join(texts)
        if result.is_error:
            raise ToolError(text)
        return text

    return call


def _cause(error: BaseException) -> str:
    """Return the first exception of a group, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
