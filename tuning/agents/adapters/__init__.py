"""Adapters of text environments, for the process of an episode.

| name | environment |
|---|---|
| `guess`, ... | built in (`rlhf.tuning.agents.environments`) |
| `gem:ID`, `gymnasium:ID`, `textarena:ID` | registered with that package |
| `openenv:URL` | a server of OpenEnv |
| `module:Class` | gymnasium's tuple of five or of four, objects with these as attributes, or TRL's environment class |
| none | the tools alone |

Methods may be coroutine functions. A class with `step` is stepped with the policy's text; one without it, or with
`get_reward`, is TRL's: its public methods are tools. With `tools` next to an environment, a turn with calls goes to the
tools, and any other to the environment. Messages of role `tool` answer a turn with calls, one for each call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.tuning.agents import tools
from rlhf.tuning.agents.adapters.gym import Arena, Gym, made, text_actions
from rlhf.tuning.agents.adapters.step_environment import Adapted, Result, Stepped, Waiting
from rlhf.tuning.agents.contract import Spec
from rlhf.tuning.chat import calls
from rlhf.tuning.names import function_of, nearest

SHARE = 0.9
"""Of a step's time that the tool calls of a turn may take together."""
NO_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods of TRL's environment classes that are no tools."""


class Methods(Adapted):
    """TRL's environment class: `reset(**row) -> text or None`, public methods are tools, `get_reward()` at the end.

    Without `get_reward` the attribute `reward` is it, which TRL's examples read in their reward functions.
    `make` makes an object of the class `target` for a row.
    """

    def __init__(self, target: type, make: Callable[[Mapping[str, Any]], Any]) -> None:
        self._target, self._make = target, make
        self._wait = Waiting()
        self._environment: Any = None

        # Of the class, in the order of their names: reset makes the object with its task.
        members = inspect.getmembers_static(target, lambda m: inspect.isfunction(m) or isinstance(m, classmethod))
        names = (name for name, _ in members if not name.startswith("_") and name not in NO_TOOLS)
        self.functions = [self._tool(name) for name in names]

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
        """Begin an episode; a text that the object's `reset` returns joins the task's prompt."""
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

    def step(self, text: str) -> Result:
        return self._rewarded(terminated=True)

    def finish(self) -> Result:
        return self._rewarded(terminated=False)

    def _rewarded(self, terminated: bool) -> Result:
        """Return the reward of the episode so far, and its parts if it has some."""
        environment = self._made()
        if hasattr(environment, "get_reward"):
            value = self._wait(environment.get_reward())
        else:
            value = getattr(environment, "reward", 0.0)
        if isinstance(value, Mapping):
            return None, float(sum(value.values())), terminated, not terminated, {"reward": dict(value)}
        return None, 0.0 if value is None else value, terminated, not terminated, {}

    def close(self) -> None:
        if callable(close := getattr(self._environment, "close", None)):
            self._wait(close())
        self._wait.close()

    def _made(self, row: Mapping[str, Any] | None = None) -> Any:
        if self._environment is None:
            self._environment = self._make(row or {})
        return self._environment


class Tooled(Adapted):
    """Tools of a recipe, with or without an environment."""

    def __init__(self, spec: Spec, inner: Adapted) -> None:
        self._inner, self._format = inner, spec.tool_format
        # The tool calls of a turn share the time of the step, so that slow ones do not end the episode.
        self._seconds = SHARE * spec.step_seconds
        self._open = contextlib.ExitStack()
        self._table = self._open.enter_context(tools.opened(spec, inner.functions))
        self.schemas = self._table.schemas

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        return self._inner.reset(seed=seed, row=row)

    def step(self, text: str) -> Result:
        """Run the calls in a text; give a text without calls to the environment."""
        parsed = calls.parse(text, self._format, self.schemas)
        if parsed.calls or parsed.errors:
            messages, results = self._table.run(parsed.calls, parsed.errors, self._seconds)
            return messages, 0.0, False, False, {"calls": results, "valid": not parsed.errors}
        return self._inner.step(text)

    def finish(self) -> Result:
        return self._inner.finish()

    def close(self) -> None:
        self._inner.close()
        self._open.close()


PACKAGES = {"gem": "gem-llm", "gymnasium": "gymnasium", "textarena": "textarena"}
"""Names for pip, by the module that is also the prefix."""


def load(spec: Spec) -> None:
    """Import the environment and its tools, in the process that episodes are forked from. Raises ValueError."""
    if spec.name is not None:
        _maker(spec)
    elif not spec.tools:
        raise ValueError("no environment and no tools: expected a name, tools, or both")
    tools.load(spec)


def make(spec: Spec) -> Adapted:
    """Make the environment of one episode. Raises ValueError for an unknown name."""
    inner = Adapted() if spec.name is None else _maker(spec)
    return Tooled(spec, inner) if spec.tools or isinstance(inner, Methods) else inner


def _maker(spec: Spec) -> Adapted:
    """Return the adapter of the environment by name; its reset makes the environment."""
    name = str(spec.name)
    prefix, colon, rest = name.partition(":")
    if not colon:
        return _own(built_in(name), dict(spec.arguments))
    if prefix == "openenv":
        from rlhf.tuning.agents.adapters.openenv import OpenEnv

        return OpenEnv(rest, spec)
    if prefix not in PACKAGES:
        return _own(function_of(name), dict(spec.arguments))
    try:
        library = importlib.import_module(prefix)
    except ImportError as error:
        package = PACKAGES[prefix]
        raise ValueError(f"environment {name} needs the package {package} (pip install {package}): {error}") from error
    if prefix == "gem":
        return Stepped(lambda row: library.make(rest, **spec.arguments))
    if prefix == "textarena":
        return Arena(rest, spec.arguments)
    return Gym(lambda row, arguments: made(rest, arguments), spec.arguments)


def built_in(name: str) -> Callable[..., Any]:
    """Return the class of a built-in environment. Raises ValueError for another name, and for one of tools alone."""
    from rlhf.tuning.agents.environments import BUILT_IN

    if name not in BUILT_IN:
        raise ValueError(f"environment {name!r}: {nearest(name, BUILT_IN, 'module:Class')}")
    module = BUILT_IN[name]
    if module.ENVIRONMENT is None:
        raise ValueError(f"environment {name!r} is made of tools alone: name no environment, but tools {module.TOOLS}")
    environment: Callable[..., Any] = module.ENVIRONMENT
    return environment


def _own(target: Callable[..., Any], arguments: dict[str, Any]) -> Adapted:
    if isinstance(target, type) and (not hasattr(target, "step") or hasattr(target, "get_reward")):
        return Methods(target, _of(target, arguments))
    given = {key: arguments.pop(key) for key in ("renderer", "parser", "actions") if text_actions(arguments, key)}
    if given:
        return Gym(lambda row, rest: _of(target, rest)(row), {**arguments, **given})
    return Stepped(_of(target, arguments))


def _of(target: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Make an environment of a class; one with an argument `task`, as in Tunix and rLLM, gets the row."""

    def make_one(row: Mapping[str, Any]) -> Any:
        wanted: Mapping[str, inspect.Parameter] = {}
        # A class in C may have no signature.
        with contextlib.suppress(ValueError):
            wanted = inspect.signature(target).parameters
        task = {"task": dict(row)} if "task" in wanted and "task" not in arguments else {}
        return target(**{**task, **arguments})

    return make_one
