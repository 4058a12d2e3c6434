"""Errors, policies and checks that all kinds of servers share: token ids in, token ids out.

`kinds.KINDS` names the kinds; `vllm.VLLM` documents their methods. No module of this package imports JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlhf.tuning.rollout.requests import Completion, RefusedRequest, Request
from rlhf.tuning.rollout.servers.transfer import Transfer

ROUNDING = 0.01
"""A log-probability above 0 by at most this is rounded to 0."""

TAGS = ["weights", "kv_cache"]
"""Parts of a server's GPU memory, in the order in which it takes them again: new weights are loaded in between."""


class ServerLost(RuntimeError):
    """A server cannot be reached, fails, or gives a malformed answer; another server, or a later try, may succeed."""


class ServerRefused(RuntimeError):
    """A server rejects the request; a retry would not help."""


class StalePolicy(RuntimeError):
    """A server has other weights than the policy's, or its log-probabilities differ from the trainer's."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The policy that servers sample from."""

    digest: str
    """Its name, which servers store with the weights."""
    folder: Callable[[], Path]
    """Returns the Hugging Face folder of the dense weights, written on the first call."""
    logps: Callable[[Sequence[tuple[Sequence[int], Sequence[int]]], float], list[list[float]]]
    """The trainer's log-probabilities of (prompt, completion) token ids at a temperature."""
    probe: Sequence[Request]
    """Requests by which each server is compared with `logps` before it is used."""
    transfer: Callable[[], Transfer] | None = None
    """Returns the policy's files below the root that servers share; None if they load `folder` themselves."""
    dtype: str | None = None
    """Type in which native servers have to compute; None: any."""
    vocabulary: int | None = None
    """Number of token ids; None: unknown."""
    base: str = ""
    """Name of the dense weights under an adapter."""
    adapter: Callable[[], Path] | None = None
    """Returns a folder in PEFT's format over `base`, written as `folder` is; None if the policy is dense."""

    @property
    def weights(self) -> str:
        """Name of the dense weights that `folder` and `transfer` give."""
        return self.base or self.digest


class Control(Protocol):
    """Blocking calls to one server; they raise ServerLost and ServerRefused."""

    def get(self, path: str) -> Any: ...
    def post(self, path: str, body: Any = None) -> Any: ...


def sample_seed(bits: int, *counters: int) -> int:
    """Return a seed of `bits` bits, derived from `counters` alone (R15)."""
    text = ":".join(map(str, counters))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - bits)


def read_field(server: Control, paths: Sequence[str], field: str) -> str | None:
    """Return a field of the first endpoint that exists."""
    for path in paths:
        with contextlib.suppress(ServerRefused):
            value: str | None = server.get(path).get(field)
            return value
    return None


def refuse_strings(request: Request) -> None:
    """Raise RefusedRequest for a request with stop strings, which servers compare differently."""
    if request.find_stop is not None:
        raise RefusedRequest(f"request {request.name or request.counter}: stop strings are for the native engine alone")


def check_samples(request: Request, samples: Sequence[tuple[Any, Any]]) -> list[Completion]:
    """Return completions from (token ids, log-probabilities) of each sample.

    Raises ServerLost unless there are as many samples as requested, each complete, with valid log-probabilities.
    """
    if len(samples) != request.samples:
        raise ServerLost(f"it gave {len(samples)} samples of {request.samples}")
    done = []
    for tokens, logps in samples:
        if not (
            isinstance(tokens, list)
            and isinstance(logps, list)
            and len(tokens) == len(logps) > 0
            and all(type(token) is int and token >= 0 for token in tokens)
            and all(type(x) in (int, float) and -math.inf < x <= ROUNDING for x in logps)
        ):
            raise ServerLost(
                f"a sample has the token ids {str(tokens)[:100]} and log-probabilities {str(logps)[:100]}; expected "
                "integers from 0 on, and for each a finite number of at most 0"
            )
        ended = tokens[-1] in request.stop_ids
        if not ended and len(tokens) != request.max_tokens:
            raise ServerLost(f"a sample ended after {len(tokens)} of {request.max_tokens} tokens without a stop id")
        done.append(Completion(tokens, [min(float(x), 0.0) for x in logps], "eos" if ended else "length"))
    return done
