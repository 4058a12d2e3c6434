"""The environment of one episode, in a child of a pool (`rlhf.tuning.parallel`). Payloads and values:

{"do": "schemas"}                    a list of schemas
{"do": "reset", "seed", "row"}       fields of `Observed`
{"do": "step", "text"}               fields of `Observed`
{"do": "finish"}                     fields of `Observed`
"""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.tuning.agents import adapters
from rlhf.tuning.agents.contract import Spec, success_of
from rlhf.tuning.parallel.messages import ADDRESS, plain


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
