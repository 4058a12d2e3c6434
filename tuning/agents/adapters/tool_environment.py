"""Episodes with tools: a turn with calls is answered by messages of role `tool`, one for each call.

Without an environment beside the tools, a turn without a call is the policy's answer and ends the episode.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.tuning.agents import tools
from rlhf.tuning.agents.adapters.arena import Arena
from rlhf.tuning.agents.adapters.step_environment import Result, Stepped, Waiting
from rlhf.tuning.agents.contract import Spec
from rlhf.tuning.chat import calls

SHARE = 0.9
"""Of a step's time that the tool calls of a turn may take together."""
NO_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods of TRL's environment classes that are no tools."""


class Methods:
    """TRL's environment class: `reset(**row) -> text or None`, public methods are tools, `get_reward()` at the end.

    Without `get_reward` the attribute `reward` is it, which TRL's examples read in their reward functions.
    `make` makes an object of the class `target` for a row.
    """

    def __init__(self, target: type, make: Callable[[Mapping[str, Any]], Any]) -> None:
        self._target, self._make = target, make
        self._wait = Waiting()
        self._environment: Any = None

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """Its tools, in the order of their names: those of the class, since reset makes the object with its task."""
        members = inspect.getmembers_static(self._target, _is_method)
        return [self._tool(name) for name, _ in members if not name.startswith("_") and name not in NO_TOOLS]

    def _tool(self, name: str) -> Callable[..., Any]:
        method = getattr(self._target, name)

        @functools.wraps(method)
        def call(*args: Any, **arguments: Any) -> Any:
            return getattr(self._made(), name)(*args, **arguments)

        signature = inspect.signature(method)
        own = list(signature.parameters.values())[0 if inspect.ismethod(method) else 1 :]
        call.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return call

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Begins an episode; a text that it returns joins the task's prompt."""
        method = getattr(self._made(row), "reset", None)
        if method is None:
            return None, {}
        parameters = inspect.signature(method).parameters
        named = {name: value for name, value in row.items() if name in parameters}
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        given = dict(row) if takes_all else named
        if "seed" in parameters:
            given["seed"] = seed
        return self._wait(method(**given)), {"joins_prompt": True}

    def reward(self) -> tuple[float, dict[str, Any]]:
        """The reward of the episode so far, and its parts, where it has some."""
        environment = self._made()
        if hasattr(environment, "get_reward"):
            value = self._wait(environment.get_reward())
        else:
            value = getattr(environment, "reward", 0.0)
        if isinstance(value, Mapping):
            return float(sum(value.values())), {"reward": dict(value)}
        return (0.0 if value is None else value), {}

    def close(self) -> None:
        """Closes the environment, where it can be closed."""
        if callable(close := getattr(self._environment, "close", None)):
            self._wait(close())
        self._wait.close()

    def _made(self, row: Mapping[str, Any] | None = None) -> Any:
        if self._environment is None:
            self._environment = self._make(row or {})
        return self._environment


def _is_method(member: Any) -> bool:
    return inspect.isfunction(member) or isinstance(member, classmethod)


class Tooled:
    """Tools, with or without an environment."""

    def __init__(self, spec: Spec, inner: Stepped | Methods | Arena | None, step_seconds: float | None) -> None:
        self._inner = inner
        self._format = spec.tool_format
        self._seconds = None if step_seconds is None else SHARE * step_seconds
        self._open = contextlib.ExitStack()
        methods = inner.functions if isinstance(inner, Methods) else []
        self._table = self._open.enter_context(tools.opened(spec, methods))

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return self._table.schemas

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Begins the environment's episode, if there is one."""
        return (None, {}) if self._inner is None else self._inner.reset(seed=seed, row=row)

    def step(self, text: str) -> Result:
        """Makes the calls in a text; gives one without calls to the environment, or ends the episode."""
        parsed = calls.parse(text, self._format, self.schemas)
        if parsed.calls or parsed.errors:
            messages, told = self._table.run(parsed.calls, parsed.errors, self._seconds)
            return messages, 0.0, False, False, {"calls": told, "valid": not parsed.errors}
        if isinstance(self._inner, Methods):
            reward, info = self._inner.reward()
            return None, reward, True, False, info
        return (None, 0.0, True, False, {}) if self._inner is None else self._inner.step(text)

    def finish(self) -> Result:
        """The reward of an episode that is cut."""
        if isinstance(self._inner, Methods):
            reward, info = self._inner.reward()
            return None, reward, False, True, info
        return (None, 0.0, False, True, {}) if self._inner is None else self._inner.finish()

    def close(self) -> None:
        """Closes the environment and the tools."""
        if self._inner is not None:
            self._inner.close()
        self._open.close()
        self._table.close()
