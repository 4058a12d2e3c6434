"""What a kind of server must offer (`ServerKind`), and what all kinds share: token ids in, token ids out.

`vllm` and `sglang` implement it; `kinds.KINDS` names them. No module of this package imports JAX.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tuning.rollout.requests import Completion, RefusedRequest, Request


class ServerLost(RuntimeError):
    """A server cannot be reached, fails or gives what is no answer; another may do better, or the same one later."""


class ServerRefused(RuntimeError):
    """A server understands the request and declines it; asking again does not help."""


class StalePolicy(RuntimeError):
    """A server has other weights than those wanted, or its log-probabilities say so; nothing is sampled from it."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The policy that servers are to have."""

    digest: str
    """Its name: servers keep it beside the weights."""
    folder: Callable[[], Path]
    """Makes, where it is not there yet, the Hugging Face folder of the dense weights, where servers can read it."""
    logps: Callable[[Sequence[tuple[Sequence[int], Sequence[int]]], float], list[list[float]]]
    """The trainer's log-probabilities of (prompt, completion) token ids at a temperature."""
    probe: Sequence[Request]
    """What each server is asked before it counts."""
    base: str = ""
    """Name of the dense weights under an adapter."""
    adapter: Path | None = None
    """A folder in PEFT's format over `base`; None where the policy is dense."""

    @property
    def weights(self) -> str:
        """Name of the dense weights that `folder` holds."""
        return self.base or self.digest


@dataclasses.dataclass(frozen=True)
class ServerStart:
    """How a server is started."""

    folder: Path
    """The model, as a Hugging Face folder."""
    dtype: str
    context: int
    """Longest prompt with its completion, in tokens."""
    adapters: bool
    """Whether it will be given adapters."""


class Control(Protocol):
    """Calls that wait for their answer; they raise ServerLost and ServerRefused."""

    def get(self, path: str) -> Any: ...
    def post(self, path: str, body: Any = None) -> Any: ...


def sample_seed(bits: int, *counters: int) -> int:
    """A seed of `bits` bits, derived from `counters` alone (R15)."""
    text = ":".join(map(str, counters))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - bits)


class ServerKind(Protocol):
    """The HTTP interface of one kind of server; stateless."""

    name: str
    path: str
    """Where completions are made."""
    counted: str | None
    """A path that tells whose weights are loaded, where answers do not."""

    def arguments(self, start: ServerStart, port: int) -> list[str]:
        """What its command is given to serve a folder on loopback."""

    def environment(self) -> dict[str, str]:
        """Variables that it needs for changing weights."""

    def body(self, request: Request, policy: Policy) -> dict[str, Any]:
        """What is sent for a request. Raises RefusedRequest for what it cannot do, or would do otherwise."""

    def completions(self, request: Request, answer: Any) -> list[Completion]:
        """The samples. Raises ServerLost where the answer is not whole."""

    def answered_by(self, policy: Policy, answer: Any) -> str | None:
        """Whose weights an answer of `path` or `counted` comes from; None where it does not say."""

    def version(self, server: Control) -> str | None:
        """The version of its code; None where it does not say."""

    def weights(self, server: Control) -> str | None:
        """Name of the dense weights that it has; None where it does not say."""

    def label(self, server: Control, policy: Policy) -> None:
        """Gives a server that was started on the policy's folder the name of its weights."""

    def reload(self, server: Control, policy: Policy, folder: Path) -> None:
        """Has it load the dense weights and remember their name."""

    def adapt(self, server: Control, policy: Policy, previous: str | None) -> None:
        """Has it load the adapter beside its dense weights, and forget the previous one."""


def refuse_strings(request: Request) -> None:
    """Raises RefusedRequest for a request with stop strings: no server knows how this project compares them."""
    if request.find_stop is not None:
        raise RefusedRequest(f"request {request.name or request.counter}: stop strings are for the native engine alone")


def checked(request: Request, samples: Sequence[tuple[list[int], list[float]]]) -> list[Completion]:
    """Completions from (token ids, log-probabilities) of each sample.

    Raises ServerLost unless there are as many samples as requested, each complete, with finite log-probabilities.
    """
    if len(samples) != request.samples:
        raise ServerLost(f"it gave {len(samples)} samples of {request.samples}")
    done = []
    for tokens, logps in samples:
        if len(tokens) != len(logps) or not tokens or not all(x is not None and math.isfinite(x) for x in logps):
            raise ServerLost(f"it gave {len(tokens)} tokens with {len(logps)} log-probabilities, or one is not finite")
        ended = tokens[-1] in request.stop_ids
        if not ended and len(tokens) != request.max_tokens:
            raise ServerLost(f"a sample ended after {len(tokens)} of {request.max_tokens} tokens without a stop id")
        done.append(Completion(list(tokens), [min(float(x), 0.0) for x in logps], "eos" if ended else "length"))
    return done
