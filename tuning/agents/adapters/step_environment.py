"""Environments with `reset` and `step`: gymnasium's tuple of five, the older one of four, and objects with the same.

5-tuple   (observation, reward, terminated, truncated, info)    gymnasium, GEM
4-tuple   (observation, reward, done, info)                     gym, Tunix, rLLM, RAGEN
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
    """Awaits the values of coroutine functions; one event loop for an episode."""

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


class Adapted:
    """An environment of one episode, as its process plays it; this one has nothing but its tools.

    A turn without a call ends its episode.
    """

    functions: Sequence[Callable[..., Any]] = ()
    """Its own tools."""
    schemas: Sequence[Mapping[str, Any]] = ()
    """Schemas of all its tools."""

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode; return the first observation and info."""
        return None, {}

    def step(self, text: str) -> Result:
        """Return (observation, reward, terminated, truncated, info) after a turn's text."""
        return None, 0.0, True, False, {}

    def finish(self) -> Result:
        """Return the last reward of an episode that is cut."""
        return None, 0.0, False, True, {}

    def close(self) -> None:
        """Close what is open."""


class Stepped(Adapted):
    """An environment that is stepped with the policy's text."""

    def __init__(self, make: Callable[[Mapping[str, Any]], Any]) -> None:
        """make: the environment of a task's row."""
        self._make = make
        self.wait = Waiting()
        self.environment: Any = None

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Make the environment and begin its episode."""
        self.environment = self._make(row)
        method = self.environment.reset
        return first_of(self.wait(method(**reset_arguments(method, seed, row))))

    def step(self, text: str) -> Result:
        return result_of(self.wait(self.environment.step(text)), self.environment)

    def close(self) -> None:
        if callable(close := getattr(self.environment, "close", None)):
            self.wait(close())
        self.wait.close()


def reset_arguments(method: Callable[..., Any], seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a `reset` among seed and row, by its parameters' names."""
    try:
        parameters = inspect.signature(method).parameters
    except ValueError:
        return {"seed": seed}
    given = {name: row[name] for name in parameters if name in row and name != "options"}
    if "seed" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        given["seed"] = seed
    return given


def first_of(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return (observation, info) of a reset's value."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping | None):
        return worded(value[0]), dict(value[1] or {})
    if (found := _attribute(value, "state", "observation")) is not None:
        return worded(found), dict(getattr(value, "info", None) or {})
    return worded(value), {}


def result_of(value: Any, environment: Any) -> Result:
    """Return gymnasium's tuple of five for a step's value, its observation as the policy reads it."""
    observation, *rest = parts_of(value, environment)
    return worded(observation), *rest  # type: ignore[return-value]


def parts_of(value: Any, environment: Any) -> Result:
    """Return the same tuple with the observation as it is. Raises TypeError for an unknown form."""
    if isinstance(value, tuple) and len(value) == 5:
        observation, reward, terminated, truncated, info = value
    elif isinstance(value, tuple) and len(value) == 4:
        observation, reward, done, info = value
        # gymnasium's predecessor marks a limit of time so.
        truncated = bool((info or {}).get("TimeLimit.truncated"))
        terminated = done and not truncated
    elif isinstance(value, Mapping) and "reward" in value and "done" in value:
        observation = value.get("observations", value.get("observation"))
        reward, terminated, truncated, info = value["reward"], value["done"], False, value.get("metadata")
    elif hasattr(value, "reward") and (hasattr(value, "terminated") or hasattr(value, "done")):
        observation = _attribute(value, "state", "observation")
        reward, truncated = value.reward, getattr(value, "truncated", False)
        terminated = _attribute(value, "terminated", "done")
        info = getattr(value, "info", None)
    else:
        form = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise TypeError(
            f"{type(environment).__name__}.step returned {form}: expected "
            "(observation, reward, terminated, truncated, info)"
        )
    # OpenEnv's clients give None for a step without a reward.
    reward = 0.0 if reward is None and not isinstance(value, tuple) else reward
    return observation, reward, bool(terminated), bool(truncated), dict(info or {})


def worded(observation: Any) -> Any:
    """Return an observation as the policy reads it: text and messages unchanged, all else as JSON."""
    if observation is None or isinstance(observation, str):
        return observation
    listed = isinstance(observation, Sequence) and not isinstance(observation, bytes)
    if listed and observation and all(isinstance(m, Mapping) and "role" in m for m in observation):
        return list(observation)
    return json.dumps(observation, default=number, ensure_ascii=False)


def number(value: Any) -> Any:
    """Convert numbers and arrays of numpy for JSON. Raises TypeError for other objects."""
    # An object's text may hold its address, which differs by process.
    if callable(method := getattr(value, "tolist", None)):
        return method()
    raise TypeError(
        f"the observation holds a {type(value).__name__}: expected text, messages, or JSON values; an argument "
        "`renderer: module:function` makes text of it"
    )


def _attribute(value: Any, *names: str) -> Any:
    return next((getattr(value, name) for name in names if hasattr(value, name)), None)
