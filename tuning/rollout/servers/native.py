"""`rlhf serve` over HTTP: vLLM's `/v1/completions`, and policies by name below a root that both sides share.

Each answer says which policy it is from.
"""

from __future__ import annotations

from rlhf.tuning.rollout.servers.protocol import Control, Policy, ServerRefused, ServerStart
from rlhf.tuning.rollout.servers.vllm import VLLM


class Native(VLLM):
    """This project's own server. Methods as in `ServerKind`."""

    name = "native"

    def arguments(self, start: ServerStart, port: int) -> list[str]:
        raise NotImplementedError("native servers are not started from here")

    def environment(self, key: str = "") -> dict[str, str]:
        return {}

    def weights(self, server: Control, policy: Policy) -> str | None:
        info = server.get("/weight_info")
        if policy.dtype not in (None, info["dtype"]):
            raise ServerRefused(f"it computes in {info['dtype']}, and dtype is {policy.dtype}: set the server's")
        version: str | None = info["weight_version"]
        return version

    def label(self, server: Control, policy: Policy) -> None:
        raise ServerRefused("a native server names its own weights")

    def reload(self, server: Control, policy: Policy) -> None:
        assert policy.transfer is not None
        sent = policy.transfer()
        server.post("/weights", {"policy": policy.weights, "folder": sent.folder, "files": sent.files})

    def adapt(self, server: Control, policy: Policy, previous: str | None) -> None:
        raise ServerRefused("a native server has no adapters: leave sync at auto, which gives it the whole policy")
