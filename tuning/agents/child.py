"""The process of one episode: it makes the environment and answers reset and step, until its stream ends.

It is a fork of the zygote (`tuning.agents.zygote`). Requests and answers are messages of `tuning.agents.frames`:

    {"do": "schemas"}                    {"schemas": [...]}
    {"do": "reset", "seed", "row"}       {"observed": {...}}, fields of `Observed`
    {"do": "step", "text"}               {"observed": {...}}
    {"do": "finish"}                     {"observed": {...}}
    any                                  {"error": "ValueError: ..."}, behind which the process ends
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuning.agents import adapters
from tuning.agents.contract import Spec, success_of
from tuning.agents.frames import Inbox, packed, plain, receive, state

REASON_CHARACTERS = 500
# From <linux/prctl.h>.
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36


def serve(stream: socket.socket, spec: Spec, limits: Mapping[str, float], folder: str) -> None:
    """Answers requests until the stream ends or a request fails; temporary files are below `folder`."""
    # Both: subprocesses read the environment, this process may have read it.
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    limit_memory(int(limits["megabytes"]))
    inbox, episode = Inbox(), Episode(spec, limits["step_seconds"])
    while (request := receive(stream, inbox)) is not None:
        try:
            answer = packed(episode.answer(request))
        # An environment may raise anything, SystemExit and KeyboardInterrupt among them.
        except BaseException as error:
            stream.sendall(packed({"error": told(error, int(limits["megabytes"]))}))
            return
        stream.sendall(answer)
    episode.close()


class Episode:
    """An environment and the requests that it answers."""

    def __init__(self, spec: Spec, step_seconds: float) -> None:
        self._spec, self._step_seconds = spec, step_seconds
        self._environment: Any = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises what the environment raises, and TypeError for an answer of no known form."""
        start = time.monotonic()
        what = request["do"]
        if what == "schemas":
            return {"schemas": list(self._made().schemas)}
        if what == "reset":
            seed_all(request["seed"])
            observation, info = self._made().reset(seed=request["seed"], row=request["row"])
            found: dict[str, Any] = {"observation": observed(observation, opening=True)}
        else:
            environment = self._made()
            result = environment.finish() if what == "finish" else environment.step(request["text"])
            observation, reward, terminated, truncated, info = result
            found = {"observation": observed(observation), "reward": finite(reward)}
            found |= {"terminated": bool(terminated), "truncated": bool(truncated)}
        told = dict(info or {})
        if "state" in told:
            told["state"] = state(told["state"])
        if "success" in told:
            # As JSON has it: numpy's flags are none of Python's.
            told["success"] = success_of(json.loads(json.dumps(told["success"], default=plain)))
        return {"observed": {**found, "info": writable(told), "seconds": time.monotonic() - start}}

    def _made(self) -> Any:
        if self._environment is None:
            self._environment = adapters.make(self._spec, step_seconds=self._step_seconds)
        return self._environment

    def close(self) -> None:
        """Closes the environment, where it has been made."""
        if self._environment is not None:
            self._environment.close()


def seed_all(seed: int) -> None:
    """Seeds the global generators: many environments (GEM's, TextArena's) draw from them."""
    random.seed(seed)
    import numpy as np

    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def observed(value: Any, opening: bool = False) -> str | Sequence[Any] | None:
    """An observation as the contract has it.

    opening: it is that of a reset, which may hold examples of the assistant's.

    Raises TypeError for what is neither text nor messages, ValueError for a message without role or text, and for one
    of the assistant behind the opening.
    """
    if value is None or isinstance(value, str):
        return writable(value)
    if isinstance(value, Sequence) and all(isinstance(m, Mapping) and "role" in m for m in value):
        return [writable({**m, "content": _content(number, m, opening)}) for number, m in enumerate(value, start=1)]
    raise TypeError(
        f"the observation is a {type(value).__name__}: expected text, messages with `role` and `content`, or None. "
        "Arguments `renderer: module:function` make text of it"
    )


def _content(number: int, message: Mapping[str, Any], opening: bool) -> str:
    """The text of a message; that of parts, as OpenAI's API has them, is theirs together."""
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
    """A value whose texts UTF-8 has bytes for: halves of surrogate pairs, as of odd file names, become `?`."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {writable(key): writable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [writable(one) for one in value]
    return value


def finite(value: Any) -> float:
    """A reward. Raises TypeError or ValueError for what is no finite number."""
    if isinstance(value, str | bytes) or value is None:
        raise TypeError(f"the reward is {value!r}: expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}: expected a finite number")
    return number


def told(error: BaseException, megabytes: int) -> str:
    """An exception in one line, with the place that raised it."""
    if isinstance(error, MemoryError):
        return f"MemoryError: more than {megabytes} MB beyond what the process had at its start"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = f"{type(error).__name__}: {error}".replace("\n", " ")
    return text[:REASON_CHARACTERS] + place


def limit_memory(megabytes: int) -> None:
    """Limits this process's data to its present size plus `megabytes`: a larger allocation fails. Linux only."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/status") as file:
        # /proc counts in units of 1024 bytes.
        held = next((int(line.split()[1]) for line in file if line.startswith("VmData")), 0) * 1024
    # Data, not address space: libraries reserve far more addresses than they use.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = held + megabytes * 2**20
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def adopt_orphans() -> None:
    """Makes orphans below this process its children, so that it, or its own parent, can end them. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """Ends this process with its parent, which may be gone already. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
