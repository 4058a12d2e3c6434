"""Environments in processes that can be killed: one process an episode (R20).

The owner never waits for a single environment: requests are sent, and `poll` returns the answers of any of them. A
request that passes its deadline is killed with all that the episode has started, and a failure costs its own episode.
Nothing outlives `close`, nor the owner's death.

The environment of one episode, in a child of a pool (`rlhf.tuning.parallel`). Payloads and values:

    {"do": "schemas"}                    a list of schemas
    {"do": "reset", "seed", "row"}       fields of `Observed`
    {"do": "step", "text"}               fields of `Observed`
    {"do": "finish"}                     fields of `Observed`
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

from rlhf.tuning.agents import adapters
from rlhf.tuning.agents.contract import Fault, Observed, Spec, Task, success_of
from rlhf.tuning.parallel.messages import ADDRESS, plain
from rlhf.tuning.parallel.pool import Failure, Job, Pool, Refused


class Episode:
    """An environment and the requests that it answers."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = Spec(**spec)
        self._environment: Any = None

    @staticmethod
    def load(spec: Mapping[str, Any]) -> None:
        """Import the environment and its tools, in the process that episodes are forked from."""
        # Each episode seeds its generator.
        importlib.import_module("numpy")
        adapters.load(Spec(**spec))

    def __call__(self, request: Mapping[str, Any]) -> Any:
        """Answer a request. Raises the errors of the environment, and TypeError for an answer of an unknown form."""
        start = time.monotonic()
        if self._environment is None:
            if request["do"] == "reset":
                seed_all(request["seed"])
            self._environment = adapters.make(self._spec)
        environment = self._environment
        if request["do"] == "schemas":
            return environment.schemas
        if request["do"] == "reset":
            observation, info = environment.reset(seed=request["seed"], row=request["row"])
            found: dict[str, Any] = {"observation": observed(observation, opening=True)}
        else:
            result = environment.finish() if request["do"] == "finish" else environment.step(request["text"])
            observation, reward, terminated, truncated, info = result
            found = {"observation": observed(observation), "reward": finite(reward)}
            found |= {"terminated": bool(terminated), "truncated": bool(truncated)}
        info = dict(info or {})
        if "state" in info:
            info["state"] = state(info["state"])
        info = writable(info)
        if "success" in info:
            info["success"] = success_of(info["success"])
        return {**found, "info": info, "seconds": time.monotonic() - start}

    def close(self) -> None:
        """Close the environment, if it has been made."""
        if self._environment is not None:
            self._environment.close()


def seed_all(seed: int) -> None:
    """Seed the global generators: many environments (GEM's, TextArena's) draw from them."""
    random.seed(seed)
    import numpy as np

    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def state(value: Any) -> Any:
    """Convert `info["state"]` to JSON: equal where the environment is in an equal state.

    Raises TypeError for an object that has no text but its address: all states would be the same one.
    """

    def known(part: Any) -> Any:
        found = plain(part)
        if isinstance(found, str) and ADDRESS in str(part):
            raise TypeError(
                f'info["state"] holds an object of type {found}, which has no text: expected numbers, text, '
                "lists and dicts of these, or an object with __str__"
            )
        return found

    return json.loads(json.dumps(value, default=known))


def observed(value: Any, opening: bool = False) -> str | Sequence[Any] | None:
    """Check and convert an observation.

    opening: it is that of a reset, which may hold examples of the assistant's.

    Raises TypeError unless it is text or messages; ValueError for a message without role or text, and for one of the
    assistant after the opening.
    """
    if value is None or isinstance(value, str):
        return writable(value)
    if isinstance(value, Sequence) and all(isinstance(m, Mapping) and "role" in m for m in value):
        return list(writable([{**m, "content": _content(i, m, opening)} for i, m in enumerate(value, start=1)]))
    raise TypeError(
        f"the observation is a {type(value).__name__}: expected text, messages with `role` and `content`, or None. "
        "Arguments `renderer: module:function` make text of it"
    )


def _content(number: int, message: Mapping[str, Any], opening: bool) -> str:
    """Return the text of a message, or of its parts together, as in OpenAI's API."""
    role = message["role"]
    if not isinstance(role, str) or (role == "assistant" and not opening):
        raise ValueError(
            f"message {number} of the observation has the role {role!r}: expected a text, and after a step not "
            "assistant, since only the policy writes these"
        )
    content = message.get("content")
    if isinstance(content, list | tuple) and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(
            f"message {number} of the observation has a content of type {type(content).__name__}: expected text, or "
            'a list of {"type": "text", "text": ...}'
        )
    return content


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def writable(value: Any) -> Any:
    """Convert a value to JSON that UTF-8 can encode: halves of surrogate pairs, as of odd file names, become `?`."""
    return json.loads(json.dumps(value, ensure_ascii=False, default=plain).encode("utf-8", "replace"))


def finite(value: Any) -> float:
    """Return a reward as a float. Raises TypeError or ValueError unless it is a finite number."""
    if isinstance(value, str | bytes) or value is None:
        raise TypeError(f"the reward is {value!r}: expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}: expected a finite number")
    return number


CLOSE_SECONDS = 1.0
"""Time of an environment's own `close` after an episode that has come to its end."""


class EnvironmentRefused(ValueError):
    """An environment that cannot be made at all: the same would happen to each episode."""


@dataclasses.dataclass
class _Open:
    """An episode's process."""

    session: int
    steps: int = 0
    request: str = ""
    """The request under way; empty if there is none."""
    asked: float = 0.0
    over: bool = False
    """Whether the episode has ended by itself, so that its environment may be closed."""


class Environments:
    """Episodes of one environment. Not for several threads.

    Args:
        spec: which environment, and the limits of each episode's process.
    """

    def __init__(self, spec: Spec) -> None:
        if spec.tools and spec.tool_seconds >= spec.step_seconds:
            raise ValueError(
                f"step_seconds is {spec.step_seconds:g} and tool_seconds {spec.tool_seconds:g}: expected the longer "
                "one for the step, else a slow tool ends the episode in place of an answer to the policy"
            )
        self._spec, self._name = spec, spec.name or ", ".join(spec.tools)
        self._episodes: dict[Hashable, _Open] = {}
        self._sessions = itertools.count()
        self._pool = Pool(f"{Episode.__module__}:{Episode.__name__}", {"spec": vars(spec)})

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools, as chat templates take them; only without open episodes.

        Raises EnvironmentRefused.
        """
        self._episodes[None] = _Open(next(self._sessions))
        self._ask(None, "schemas", {"do": "schemas"})
        while not (found := self._pool.poll(float("inf"))):
            pass
        self.discard(None)
        [(_, result)] = found
        if result.failure is not None:
            raise EnvironmentRefused(f"environment {self._name}: {result.failure.message}")
        return list(result.value)

    def open(self, key: Hashable, task: Task) -> None:
        """Start an episode; `poll` returns its first observation, or a Fault. Raises EnvironmentRefused."""
        self._episodes[key] = _Open(next(self._sessions))
        self._ask(key, "reset", {"do": "reset", "seed": task.seed, "row": dict(task.row)})

    def step(self, key: Hashable, text: str) -> None:
        """Give an episode the policy's text; `poll` returns the answer."""
        episode = self._episodes[key]
        episode.steps += 1
        self._ask(key, f"step {episode.steps}", {"do": "step", "text": text})

    def finish(self, key: Hashable) -> None:
        """Ask an episode that is cut for its last reward, which TRL's classes give at the end alone (`get_reward`).

        `poll` returns it as a step with `truncated`, without an observation; other environments answer 0.
        """
        self._ask(key, "finish", {"do": "finish"})

    def poll(self, seconds: float) -> list[tuple[Any, Observed | Fault]]:
        """Return the answers since the last call; wait up to `seconds` for the first, and not if none is under way.

        An episode with a Fault is over; its key may be opened again.
        """
        found: list[tuple[Any, Observed | Fault]] = []
        for job, result in self._pool.poll(seconds):
            key = job.label
            episode = self._episodes[key]
            if result.failure is not None:
                found.append((key, _fault(episode, result.failure)))
                self.discard(key)
                continue
            answer = Observed(**result.value)
            episode.request, episode.over = "", answer.terminated or answer.truncated
            found.append((key, answer))
        return found

    def discard(self, key: Hashable) -> None:
        """End an episode's process, and forget the episode; an unknown key is ignored.

        An environment whose episode has come to its own end is closed first, for at most CLOSE_SECONDS.
        """
        if (episode := self._episodes.pop(key, None)) is not None:
            self._pool.end(episode.session, CLOSE_SECONDS if episode.over else 0.0)

    def close(self) -> None:
        """End all episodes; nothing of them is left."""
        self._episodes.clear()
        self._pool.close()

    def _ask(self, key: Hashable, name: str, request: dict[str, Any]) -> None:
        episode = self._episodes[key]
        episode.request, episode.asked = name, time.monotonic()
        seconds = self._spec.step_seconds if episode.steps else self._spec.reset_seconds
        try:
            self._pool.wait_until_ready()
        except Refused as error:
            raise EnvironmentRefused(f"environment {self._name}: {error}") from error
        self._pool.submit(Job(request, seconds, self._spec.megabytes, episode.session, key))


def _fault(episode: _Open, failure: Failure) -> Fault:
    kinds: dict[str, Literal["error", "timeout"]] = {"error": "error", "refused": "error", "timeout": "timeout"}
    reason, seconds = f"{episode.request}: {failure.message}", time.monotonic() - episode.asked
    return Fault(kinds.get(failure.kind, "crash"), reason, seconds)
