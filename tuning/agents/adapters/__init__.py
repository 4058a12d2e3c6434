"""Adapters of text environments, for the process of an episode.

| name | environment |
|---|---|
| `guess`, ... | built in (`rlhf.tuning.agents.environments`) |
| `gem:ID`, `gymnasium:ID`, `textarena:ID` | registered with that package |
| `module:Class` | gymnasium's tuple of five or of four, objects with these as attributes, or TRL's environment class |
| none | the tools alone |

Methods may be coroutine functions. A class with `step` is stepped with the policy's text; one without it, or with
`get_reward`, is TRL's: its public methods are tools. With `tools` next to an environment, a turn with calls goes to the
tools, and any other to the environment.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.tuning.agents import tools
from rlhf.tuning.agents.adapters.gym import Arena, Gym, made, text_actions
from rlhf.tuning.agents.adapters.step_environment import Adapted, Stepped
from rlhf.tuning.agents.adapters.tool_environment import Methods, Tooled
from rlhf.tuning.agents.contract import Spec
from rlhf.tuning.names import function_of, nearest

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
        return Stepped(_of(built_in(name), spec.arguments))
    if prefix not in PACKAGES:
        return _own(name, dict(spec.arguments))
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


def _own(name: str, arguments: dict[str, Any]) -> Adapted:
    target = function_of(name)
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
