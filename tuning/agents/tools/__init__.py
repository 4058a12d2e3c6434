"""Tools that a policy may call: built-in ones, custom functions, methods of environments, MCP servers.

A tool is a function with type hints and a docstring in Google's style, as in TRL
(`rlhf.tuning.agents.tools.schemas`). The policy reads the error of a call: the answer to an unknown name, bad
arguments, an exception or a timeout begins with `error:`, and the call is marked as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import inspect
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf.tuning.agents.contract import Spec
from rlhf.tuning.agents.tools import calculator, mcp, python
from rlhf.tuning.agents.tools.schemas import schema_of
from rlhf.tuning.chat import Message
from rlhf.tuning.chat.calls import Call
from rlhf.tuning.names import function_of, nearest
from rlhf.tuning.parallel.messages import plain

BUILT_IN: Mapping[str, Callable[..., Callable[..., Any]]] = {"calculator": calculator.make, "python": python.make}
"""By name: the factory of the tool's function, with its `tool_arguments`."""
RESULT_CHARACTERS = 2**20
"""Longest result of a call, which tables and journals keep."""
ERROR = "error: "
"""Start of the answer to a failed call."""


class Overtime(BaseException):
    """A tool call took too long. Not an Exception, which a tool may catch."""


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the policy may call."""

    schema: Mapping[str, Any]
    function: Callable[..., Any]
    """Of keyword arguments; may be a coroutine function."""

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def load(spec: Spec) -> None:
    """Import the tools' modules, in the process that episodes are forked from. Raises ValueError."""
    for name in spec.tools:
        if name.startswith(mcp.PREFIX):
            mcp.load()
        elif name not in BUILT_IN:
            function_of(_known(name))


@contextlib.contextmanager
def opened(spec: Spec, methods: Sequence[Callable[..., Any]] = ()) -> Iterator[Table]:
    """Open the tools of a spec and further functions, with their MCP servers. Raises ValueError."""
    tools = [Tool(schema_of(method), method) for method in methods]
    with contextlib.ExitStack() as stack:
        for name in spec.tools:
            if name.startswith(mcp.PREFIX):
                server = stack.enter_context(mcp.connected(name.removeprefix(mcp.PREFIX), spec.tool_seconds))
                tools += [_fixed(schema, call, spec) for schema, call in server]
            elif name in BUILT_IN:
                try:
                    function = BUILT_IN[name](**spec.tool_arguments.get(name, {}))
                except TypeError as error:
                    raise ValueError(f"tool_arguments of {name}: {error}") from error
                tools.append(Tool(schema_of(function), function))
            else:
                function = function_of(_known(name))
                hidden = list(spec.tool_arguments.get(function.__name__, {}))
                tools.append(_fixed(schema_of(function, hidden), function, spec))
        yield stack.enter_context(contextlib.closing(Table(tools, spec)))


def _known(name: str) -> str:
    if ":" not in name:
        raise ValueError(f"tool {name!r}: {nearest(name, BUILT_IN, 'module:function, mcp:COMMAND or mcp:URL')}")
    return name


def _fixed(schema: Mapping[str, Any], function: Callable[..., Any], spec: Spec) -> Tool:
    """Return a tool without the parameters that the recipe sets."""
    fixed = dict(spec.tool_arguments.get(schema["function"]["name"], {}))
    if not fixed:
        return Tool(schema, function)
    own = copy.deepcopy(dict(schema))
    parameters = own["function"]["parameters"]
    parameters["properties"] = {n: v for n, v in parameters.get("properties", {}).items() if n not in fixed}
    parameters["required"] = [n for n in parameters.get("required", ()) if n not in fixed]

    def call(**arguments: Any) -> Any:
        if clash := sorted(set(arguments) & set(fixed)):
            raise TypeError(f"unexpected argument {clash[0]!r}")
        _bind(function, {**arguments, **fixed})
        return function(**arguments, **fixed)

    return Tool(own, call)


def _bind(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise TypeError if the function does not take these arguments."""
    with contextlib.suppress(ValueError):
        # Functions in C may have no signature.
        inspect.signature(function).bind(**arguments)


class Table:
    """Tools by name. Raises ValueError for two of one name, and for arguments of an unknown tool."""

    def __init__(self, tools: Sequence[Tool], spec: Spec) -> None:
        names = [tool.name for tool in tools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"there are two tools {name!r}: expected one")
        for name in spec.tool_arguments:
            if name not in names:
                raise ValueError(f"tool_arguments of {name!r}, which is no tool here: {nearest(name, names)}")
        self._tools = dict(zip(names, tools, strict=True))
        self._seconds = spec.tool_seconds
        self._runner = asyncio.Runner()

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    def close(self) -> None:
        self._runner.close()

    def run(
        self, calls: Sequence[Call], errors: Sequence[str], seconds: float | None = None
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Run the calls of one turn in order, in `seconds` altogether.

        Returns messages of role `tool`, one for each call and each error; and the calls with `result` and `failed`.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        messages: list[Message] = []
        records: list[dict[str, Any]] = []
        for call in calls:
            limit = self._seconds if deadline is None else min(self._seconds, deadline - time.monotonic())
            result, failed = self._call(call, limit)
            if len(result) > RESULT_CHARACTERS:
                rest = len(result) - RESULT_CHARACTERS
                result = f"{result[:RESULT_CHARACTERS]}[... {rest} more characters are cut off]"
            messages.append({"role": "tool", "name": call.name, "content": result})
            records.append({"name": call.name, "arguments": dict(call.arguments), "result": result, "failed": failed})
        for error in errors:
            messages.append({"role": "tool", "content": ERROR + error})
            records.append({"name": None, "arguments": None, "result": ERROR + error, "failed": True})
        return messages, records

    def _call(self, call: Call, seconds: float) -> tuple[str, bool]:
        """The text of a call's result, and whether it has failed."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"{ERROR}there is no tool {call.name!r}: {nearest(call.name, self._tools)}", True
        if seconds <= 0:
            return f"{ERROR}{call.name} was not called: the time of the turn is used up", True
        try:
            with time_limit(seconds):
                _bind(tool.function, call.arguments)
                return text_of(self._value(tool.function(**call.arguments), seconds)), False
        except Overtime:
            return f"{ERROR}{call.name} took longer than {seconds:.3g} s", True
        except python.ToolError as error:
            return f"{ERROR}{error}", True
        # A tool may raise anything, SystemExit too.
        except BaseException as error:
            return f"{ERROR}{type(error).__name__}: {error}", True

    def _value(self, value: Any, seconds: float) -> Any:
        if not inspect.isawaitable(value):
            return value

        async def awaited() -> Any:
            limit = asyncio.timeout(seconds)
            try:
                async with limit:
                    return await value
            except TimeoutError:
                # Or one of the tool's own.
                if limit.expired():
                    raise Overtime from None
                raise

        return self._runner.run(awaited())


def text_of(value: Any) -> str:
    """Return a tool's result as the policy reads it: text unchanged, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=plain, ensure_ascii=False)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises Overtime in the main thread after `seconds`, and each second from then on while it is caught.

    Code in C that does not come back to Python is not reached: the limit of the step ends it, with its process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    running = True

    def ring(*_: Any) -> None:
        # One that rings on the way out has nobody to tell.
        if running:
            raise Overtime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
