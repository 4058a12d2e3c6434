"""Environments with `reset` and `step`: gymnasium's tuple of five, the older one of four, and objects with the same.

5-tuple   (observation, reward, terminated, truncated, info)    gymnasium, GEM
4-tuple   (observation, reward, done, info)                     Tunix, rLLM, RAGEN
object    .state or .observation, .reward, .terminated and .truncated or .done, .info    GRL, OpenEnv
mapping   observations, reward, done, metadata                  SkyRL
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

Result = tuple[Any, float, bool, bool, dict[str, Any]]


class Waiting:
    """Calls functions, and awaits what coroutine functions return; one event loop for all of an episode."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __call__(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value

        async def awaited(one: Awaitable[Any] = value) -> Any:
            return await one

        return self._runner.run(awaited())

    def close(self) -> None:
        self._runner.close()


class Stepped:
    """An environment that is stepped with the policy's text."""

    def __init__(self, make: Callable[[Mapping[str, Any]], Any]) -> None:
        """make: the environment of a task's row."""
        self._make = make
        self.wait = Waiting()
        self.environment: Any = None

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return []

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Makes the environment and begins its episode."""
        self.environment = self._make(row)
        method = self.environment.reset
        return first_of(self.wait(method(**reset_arguments(method, seed, row))))

    def step(self, text: str) -> Result:
        """Gives the environment a text."""
        return result_of(self.wait(self.environment.step(text)), self.environment)

    def finish(self) -> Result:
        """An episode that is cut has had its rewards step by step."""
        return None, 0.0, False, True, {}

    def close(self) -> None:
        """Closes the environment, where it can be closed."""
        if callable(close := getattr(self.environment, "close", None)):
            self.wait(close())
        self.wait.close()


def reset_arguments(method: Callable[..., Any], seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """What a `reset` takes of seed and row, by its parameters' names."""
    try:
        parameters = inspect.signature(method).parameters
    except ValueError:
        return {"seed": seed}
    given = {name: row[name] for name in parameters if name in row and name != "options"}
    if "seed" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        given["seed"] = seed
    return given


def first_of(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """(observation, info) of what a `reset` has returned."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping | None):
        return worded(value[0]), dict(value[1] or {})
    if (found := _attribute(value, "state", "observation")) is not None:
        return worded(found), dict(getattr(value, "info", None) or {})
    return worded(value), {}


def result_of(value: Any, environment: Any) -> Result:
    """The tuple of five of what a `step` has returned. Raises TypeError for anything else."""
    if isinstance(value, tuple) and len(value) == 5:
        observation, reward, terminated, truncated, info = value
    elif isinstance(value, tuple) and len(value) == 4:
        observation, reward, terminated, info = value
        truncated = False
    elif isinstance(value, Mapping) and "reward" in value and "done" in value:
        observation = value.get("observations", value.get("observation"))
        reward, terminated, truncated, info = value["reward"], value["done"], False, value.get("metadata")
    elif hasattr(value, "reward") and (hasattr(value, "terminated") or hasattr(value, "done")):
        observation = _attribute(value, "state", "observation")
        reward, truncated = value.reward, getattr(value, "truncated", False)
        terminated = _attribute(value, "terminated", "done")
        info = getattr(value, "info", None)
    else:
        raise TypeError(
            f"{type(environment).__name__}.step returned {_shown(value)}: expected "
            "(observation, reward, terminated, truncated, info)"
        )
    # OpenEnv's clients give None where a step has no reward.
    reward = 0.0 if reward is None and not isinstance(value, tuple) else reward
    return worded(observation), reward, bool(terminated), bool(truncated), dict(info or {})


def worded(observation: Any) -> Any:
    """An observation as the policy reads it: text and messages as they are, JSON of numbers, lists and mappings."""
    if observation is None or isinstance(observation, str):
        return observation
    listed = isinstance(observation, Sequence) and not isinstance(observation, bytes)
    if listed and observation and all(isinstance(m, Mapping) and "role" in m for m in observation):
        return list(observation)
    return json.dumps(observation, default=number, ensure_ascii=False)


def number(value: Any) -> Any:
    """A number or an array of numpy as JSON has it. Raises TypeError for other objects."""
    # An object's own text may hold its address, which is another one in each process.
    if callable(method := getattr(value, "tolist", None)):
        return method()
    raise TypeError(
        f"the observation holds a {type(value).__name__}: expected text, messages, or what JSON has; an argument "
        "`renderer: module:function` makes text of it"
    )


def _attribute(value: Any, *names: str) -> Any:
    return next((getattr(value, name) for name in names if hasattr(value, name)), None)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"
