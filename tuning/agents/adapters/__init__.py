"""Whatever people have as a text environment, in the process of its episode.

| name | what |
|---|---|
| `guess`, ... | built in (`rlhf.tuning.agents.environments`) |
| `gem:ID`, `gymnasium:ID`, `textarena:ID` | registered with that package |
| `module:Class` | gymnasium's tuple of five or of four, objects with these as attributes, or TRL's environment class |
| none | the tools alone |

Methods may be coroutine functions. A class with `step` is stepped with the policy's text; one without it, or with
`get_reward`, is TRL's: its public methods are tools. With `tools` beside an environment, a turn with calls goes to the
tools, and any other to the environment.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlhf.tuning.agents import tools
from rlhf.tuning.agents.adapters.arena import Arena
from rlhf.tuning.agents.adapters.gym import Gym, made, text_actions
from rlhf.tuning.agents.adapters.step_environment import Stepped
from rlhf.tuning.agents.adapters.tool_environment import Methods, Tooled
from rlhf.tuning.agents.contract import Observation, Spec
from rlhf.tuning.names import function_of, nearest

PACKAGES: Mapping[str, tuple[str, str]] = {
    "gem": ("gem", "gem-llm"),
    "gymnasium": ("gymnasium", "gymnasium"),
    "textarena": ("textarena", "textarena"),
}
"""By prefix: the module of a package and its name for pip."""

Step = tuple[Observation | None, float, bool, bool, dict[str, Any]]


class Adapted(Protocol):
    """An environment of one episode, as its process plays it."""

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Schemas of its tools."""

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation | None, Mapping[str, Any]]:
        """The first observation and info."""

    def step(self, text: str) -> Step:
        """(observation, reward, terminated, truncated, info) after a turn's text."""

    def finish(self) -> Step:
        """The last reward of an episode that is cut."""

    def close(self) -> None:
        """Closes what is open."""


def load(spec: Spec) -> None:
    """Imports the environment and its tools, for the process that episodes are forked from. Raises ValueError."""
    if spec.name is not None:
        _maker(spec)
    elif not spec.tools:
        raise ValueError("no environment and no tools: expected a name, tools, or both")
    tools.load(spec)


def make(spec: Spec, *, step_seconds: float | None = None) -> Adapted:
    """The environment of one episode. Raises ValueError for what there is not, and what its constructor raises.

    step_seconds: time of a step, which the tool calls of one turn share, so that slow ones do not end the episode.
    """
    inner = None if spec.name is None else _maker(spec)
    if inner is None or spec.tools or isinstance(inner, Methods):
        return Tooled(spec, inner, step_seconds)
    return inner


def _maker(spec: Spec) -> Stepped | Methods | Arena:
    """The adapter of the environment by name, which makes it at reset."""
    name = str(spec.name)
    prefix, colon, rest = name.partition(":")
    if not colon:
        return Stepped(_of(built_in(name), spec.arguments))
    if prefix not in PACKAGES:
        return _own(name, dict(spec.arguments))
    module, package = PACKAGES[prefix]
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"environment {name} needs the package {package} (pip install {package}): {error}") from error
    if prefix == "gem":
        return Stepped(lambda row: library.make(rest, **spec.arguments))
    if prefix == "textarena":
        return Arena(rest, spec.arguments)
    return Gym(lambda row, arguments: made(rest, arguments), spec.arguments)


def built_in(name: str) -> Callable[..., Any]:
    """The class of a built-in environment. Raises ValueError for another name, and for one that tools alone make."""
    from rlhf.tuning.agents.environments import BUILT_IN

    if name not in BUILT_IN:
        raise ValueError(f"environment {name!r}: {nearest(name, BUILT_IN, 'module:Class')}")
    module = BUILT_IN[name]
    if module.ENVIRONMENT is None:
        raise ValueError(f"environment {name!r} is made of tools alone: name no environment, but tools {module.TOOLS}")
    found: Callable[..., Any] = module.ENVIRONMENT
    return found


def _own(name: str, arguments: dict[str, Any]) -> Any:
    target = function_of(name)
    if isinstance(target, type) and (not hasattr(target, "step") or hasattr(target, "get_reward")):
        return Methods(target, _of(target, arguments))
    given = {key: arguments.pop(key) for key in ("renderer", "parser", "actions") if text_actions(arguments, key)}
    if given:
        return Gym(lambda row, rest: _of(target, rest)(row), {**arguments, **given})
    return Stepped(_of(target, arguments))


def _of(target: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Makes an environment of a class; one that wants the `task`, as Tunix' and rLLM's, gets the row."""

    def make_one(row: Mapping[str, Any]) -> Any:
        wanted: Mapping[str, inspect.Parameter] = {}
        # A class in C may have no signature.
        with contextlib.suppress(ValueError):
            wanted = inspect.signature(target).parameters
        task = {"task": dict(row)} if "task" in wanted and "task" not in arguments else {}
        return target(**{**task, **arguments})

    return make_one
