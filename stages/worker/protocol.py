"""The protocol of parent and worker: requests through one pipe, events through another, a JSON line each.

parent                                worker
  Request            ---------->        one stage at a time
                     <----------        Log, Progress, Heartbeat, in any number and order
                     <----------        Done or Failed: the worker is ready for the next request
                                        Changed: a fresh worker has to make it, under the key of the new code
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeAlias


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to make one artifact."""

    stage: str
    key: str
    key_parts: dict[str, Any]
    """The parts from which the key was derived; the manifest keeps them, so that `rlhf plan` can explain a miss."""
    config: dict[str, Any]
    """The stage's settings as JSON."""
    inputs: dict[str, tuple[str, str, str]]
    """(stage, key, digest) of the artifact of each input, whose content must have this digest."""
    seed: int
    store: str
    """Folder or URL of the store that holds the inputs and gets the artifact."""
    run: str
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 of the source of each of this project's modules in `key_parts`, as it was when the key was made."""
    node: str = ""
    """The node's name in the run, for the log."""
    lease: str | None = None
    """The token of the lease under which it is made; None: nobody else can make it."""
    force: str | None = None
    """Set to the run's name where an artifact with this key is replaced: a retry in that run resumes its own work."""
    elsewhere: bool = False
    """Whether the run is on another host, from whose code the key was derived."""
    log: str = ""
    """The file that gets the worker's output from now on; empty: the file that it had."""

    def line(self) -> str:
        """Return the request as a line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def parse(cls, line: str | bytes) -> Request:
        """The inverse of `line`. Raises TypeError for missing or unknown fields."""
        return cls(**json.loads(line))


@dataclasses.dataclass(frozen=True)
class Progress:
    """Work done so far, in `unit`s such as steps or completions, with the stage's latest metrics."""

    done: int
    total: int
    unit: str
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Log:
    """One line for the console and the log."""

    line: str


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The process is alive although its stage has nothing to report."""

    compiling: bool = False
    """Whether JAX traces or compiles a program at this moment, which may take minutes before a first step."""


@dataclasses.dataclass(frozen=True)
class Done:
    """The artifact is committed."""

    manifest: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Failed:
    """The stage raised an exception."""

    error: str
    """Type and message."""
    traceback: str
    outage: bool = False
    """Whether a service, a disk or the machine failed: the same request may succeed when that is over."""


@dataclasses.dataclass(frozen=True)
class Changed:
    """Nothing is committed: the code that this process has loaded is not the one that the request's key names."""

    what: str
    """The change and its time."""


Report: TypeAlias = Progress | Log | Heartbeat
"""Events that the caller of a worker sees; the others end or only prolong the wait."""
Event: TypeAlias = Report | Heartbeat | Done | Failed | Changed

_EVENTS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (Progress, Log, Heartbeat, Done, Failed, Changed)
}


def event_line(event: Event) -> str:
    """Return the event as a line of JSON: its fields, and its kind as `event`."""
    return json.dumps({"event": type(event).__name__.lower()} | dataclasses.asdict(event)) + "\n"


def parse_event(line: str | bytes) -> Event:
    """The inverse of `event_line`. Raises KeyError for an unknown kind, TypeError for other fields."""
    values = json.loads(line)
    return _EVENTS[values.pop("event")](**values)
