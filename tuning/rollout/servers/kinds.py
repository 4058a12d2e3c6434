"""The kinds of servers, by the names that settings give them.

`rlhf serve` has vLLM's `/v1/completions`, and policies by name below a root that both sides share. Each answer names
its policy. Native servers are not started from here.
"""

from __future__ import annotations

from rlhf.tuning.rollout.servers.protocol import Control, Policy, ServerRefused
from rlhf.tuning.rollout.servers.sglang import SGLang
from rlhf.tuning.rollout.servers.vllm import VLLM


class Native(VLLM):
    """This project's own server."""

    name = "native"
    always_seeds = True

    def weights(self, server: Control, policy: Policy) -> str | None:
        info = server.get("/weight_info")
        if policy.dtype not in (None, info.get("dtype")):
            raise ServerRefused(f"it computes in {info.get('dtype')}, and dtype is {policy.dtype}: set the server's")
        version: str | None = info.get("weight_version")
        return version

    def reload(self, server: Control, policy: Policy) -> None:
        assert policy.transfer is not None
        sent = policy.transfer()
        server.post("/weights", {"policy": policy.weights, "folder": sent.folder, "files": sent.files})


ServerKind = VLLM | SGLang
KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (VLLM(), SGLang(), Native())}
