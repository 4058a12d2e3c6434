"""What a kind of server must offer (`ServerKind`), and what all kinds share: token ids in, token ids out.

`vllm`, `sglang` and `native` implement it; `kinds.KINDS` names them. No module of this package imports JAX.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlhf.tuning.rollout.requests import Completion, RefusedRequest, Request
from rlhf.tuning.rollout.servers.transfer import Transfer

ROUNDING = 0.01
"""A log-probability above 0 by less is taken for 0."""


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
    """Returns the policy's files below the root that servers share; None where they load `folder` themselves."""
    dtype: str | None = None
    """Type in which native servers have to compute; None: theirs."""
    vocabulary: int | None = None
    """Token ids are below; None: unknown."""
    base: str = ""
    """Name of the dense weights under an adapter."""
    adapter: Path | None = None
    """A folder in PEFT's format over `base`; None where the policy is dense."""

    @property
    def weights(self) -> str:
        """Name of the dense weights that `folder` and `transfer` give."""
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
    """Whether it must accept LoRA adapters."""


class Control(Protocol):
    """Blocking calls to one server; they raise ServerLost and ServerRefused."""

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
    """The endpoint of completions."""
    counted: str | None
    """An endpoint that names the loaded weights, for kinds whose completions do not."""

    def arguments(self, start: ServerStart, port: int) -> list[str]:
        """Command-line arguments that make it serve a folder on loopback."""

    def environment(self, key: str = "") -> dict[str, str]:
        """Environment variables that it needs to change weights and to ask for a key."""

    def body(self, request: Request, policy: Policy) -> dict[str, Any]:
        """The JSON of a request. Raises RefusedRequest for settings that it lacks or defines differently."""

    def completions(self, request: Request, answer: Any) -> list[Completion]:
        """The samples of an answer. Raises ServerLost if it is incomplete."""

    def answered_by(self, policy: Policy, answer: Any) -> str | None:
        """Name of the weights behind an answer of `path` or `counted`; None if it does not say."""

    def version(self, server: Control) -> str | None:
        """The version of its code; None if it does not report one."""

    def weights(self, server: Control, policy: Policy) -> str | None:
        """Name of the dense weights that it has; None if it does not report it."""

    def label(self, server: Control, policy: Policy) -> None:
        """Tells a server that was started on the policy's folder the name of its weights."""

    def reload(self, server: Control, policy: Policy) -> None:
        """Makes it load the dense weights and store their name."""

    def adapt(self, server: Control, policy: Policy, previous: str | None) -> None:
        """Makes it load the adapter beside its dense weights, and drop the previous one."""


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
        if not isinstance(tokens, list) or any(type(token) is not int or token < 0 for token in tokens):
            raise ServerLost(f"its token ids are {str(tokens)[:100]}; expected a list of integers from 0 on")
        if not isinstance(logps, list) or any(type(x) not in (int, float) for x in logps if x is not None):
            raise ServerLost(f"its log-probabilities are {str(logps)[:100]}; expected a list of numbers")
        if any(x is not None and x > ROUNDING for x in logps):
            raise ServerLost(f"it gave a log-probability of {max(x for x in logps if x is not None):g}, above 0")
        if len(tokens) != len(logps) or not tokens or not all(x is not None and math.isfinite(x) for x in logps):
            raise ServerLost(f"it gave {len(tokens)} tokens with {len(logps)} log-probabilities, or one is not finite")
        ended = tokens[-1] in request.stop_ids
        if not ended and len(tokens) != request.max_tokens:
            raise ServerLost(f"a sample ended after {len(tokens)} of {request.max_tokens} tokens without a stop id")
        done.append(Completion(list(tokens), [min(float(x), 0.0) for x in logps], "eos" if ended else "length"))
    return done
