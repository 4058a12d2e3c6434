"""A policy as a stream of buckets, to servers that take it at /weights: `native` ones and vLLM with `rlhf_weights`.

    GET /weights -> POST /weights -> POST /weights/ID, a bucket each -> POST /weights/ID/commit

The fingerprint of what was sent ends the push, and later tells whether a server still has it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from tuning.rollout.inside.rlhf_weights.frames import Fingerprint, buckets
from tuning.rollout.servers.protocol import Control, Policy, ServerLost, ServerRefused


class Everywhere(Mapping[str, str]):
    """The same type for every tensor, for `Policy.tensors`."""

    def __init__(self, dtype: str):
        self.dtype = dtype

    def __getitem__(self, name: str) -> str:
        return self.dtype

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def push(server: Control, policy: Policy, types: Mapping[str, str], bucket_bytes: int, begin: dict[str, Any]) -> None:
    """Streams a policy in these types; `begin` says what the server has to know first. Gives the push up if it fails.

    Raises ServerLost and ServerRefused.
    """
    known, number = policy.fingerprints.get(_key(types)), secrets.token_hex(16)
    seen = Fingerprint() if known is None else None
    stream = buckets(policy.tensors(types), bucket_bytes, seen)
    # Cut before the push begins: a policy that cannot be read stops no server.
    first = next(stream)
    try:
        begun = {"policy": policy.weights, "push": number} | begin
        number = server.post("/weights", begun, again=True)["push"]
        server.send(f"/weights/{number}", itertools.chain([first], stream))
        if seen is not None:
            known = policy.fingerprints[_key(types)] = seen.hexdigest()
        server.post(f"/weights/{number}/commit", {"fingerprint": known}, again=True)
    except BaseException:
        with contextlib.suppress(ServerLost, ServerRefused):
            server.delete(f"/weights/{number}")
        raise


def fingerprint(policy: Policy, types: Mapping[str, str]) -> str:
    """The fingerprint of a policy whose tensors are of these types. It is read once, whichever server asks first."""
    key = _key(types)
    with policy.reading:
        if key not in policy.fingerprints:
            seen = Fingerprint()
            for name, value in policy.tensors(types):
                seen.add(name, value)
            policy.fingerprints[key] = seen.hexdigest()
        return policy.fingerprints[key]


def named(name: str | None, policy: Policy, found: str | None, types: Mapping[str, str]) -> str | None:
    """What weights are to be called that a server calls `name`: `name`, unless they are others than this policy's."""
    if name == policy.weights and found is not None and found != fingerprint(policy, types):
        return f"{name} by name, with other weights"
    return name


def _key(types: Mapping[str, str]) -> str:
    return types.dtype if isinstance(types, Everywhere) else json.dumps(sorted(types.items()))
