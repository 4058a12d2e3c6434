"""Environments in processes that can be killed: one process an episode (R20).

The owner never waits for a single environment: requests are sent, and `poll` returns the answers of any of them. A
request that passes its deadline is killed with all that the episode has started, and a failure costs its own episode.
Nothing outlives `close`, nor the owner's death.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Hashable
from typing import Any, Literal

from rlhf.tuning.agents.contract import Fault, Observed, Spec, Task
from rlhf.tuning.agents.episode import Episode
from rlhf.tuning.parallel.pool import Failure, Job, Pool, Refused

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
