"""`rlhf serve` over HTTP: vLLM's `/v1/completions`, with weights that are pushed in buckets and proven by fingerprint.

The server computes the fingerprint from what its engine holds, and each answer says whose weights it is of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tuning.rollout.inside.rlhf_weights.frames import first_difference
from tuning.rollout.servers.protocol import Control, Policy, ServerRefused, ServerStart, Way
from tuning.rollout.servers.pushes import named, push
from tuning.rollout.servers.vllm import VLLM


class Native(VLLM):
    """This project's own server. Methods as in `ServerKind`."""

    name = "native"

    def arguments(self, start: ServerStart, port: int) -> list[str]:
        raise NotImplementedError("native servers are not started from here")

    def environment(self, key: str = "", streams: bool = False) -> dict[str, str]:
        return {}

    def weights(self, server: Control, policy: Policy) -> str | None:
        told = _told(server, policy)
        return named(told["policy"], policy, told["fingerprint"], _types(told))

    def label(self, server: Control, policy: Policy) -> None:
        raise ServerRefused("a native server names its own weights")

    def reload(self, server: Control, policy: Policy, by: Way = "any") -> None:
        told = _told(server, policy)
        types = _types(told)
        config = json.loads(json.dumps(policy.config()))
        other = first_difference(told["config"], config)
        if other is not None:
            theirs, ours = told["config"].get(other), config.get(other)
            raise ServerRefused(f"it serves another model: config.{other} is {theirs!r} there and {ours!r} here")
        push(server, policy, types, told["bucket_bytes"], {"config": config})

    def adapt(self, server: Control, policy: Policy, previous: str | None) -> None:
        raise ServerRefused("a native server has no adapters: leave sync at auto, which pushes the whole policy")


def _told(server: Control, policy: Policy) -> dict[str, Any]:
    """What a server says of its weights."""
    told: dict[str, Any] = server.get("/weights")
    if policy.dtype not in (None, told["dtype"]):
        raise ServerRefused(f"it computes in {told['dtype']}, and dtype is {policy.dtype}: say the server's")
    return told


def _types(told: Mapping[str, Any]) -> dict[str, str]:
    """The type in which a server holds each tensor. Raises ServerRefused where it can show none of them."""
    if told["tensors"] is None or told["fingerprint"] is None:
        raise ServerRefused(
            "it holds its weights as int8, which can be neither pushed nor proven: serve without --quantization"
        )
    return {name: dtype for name, (dtype, _) in told["tensors"].items()}
