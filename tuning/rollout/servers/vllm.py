"""vLLM over HTTP: `/v1/completions` with `return_token_ids`, as in version 0.32.

Weights reach it by its development endpoints (VLLM_SERVER_DEV_MODE=1): a reload of a folder, or its weight transfer
with the engine of `vllm_plugin`. It must run with `--logprobs-mode processed_logprobs`: its default are
log-probabilities before the temperature.
"""

from __future__ import annotations

import contextlib
from typing import Any

from rlhf.tuning.rollout.requests import Completion, Request
from rlhf.tuning.rollout.servers.protocol import (
    Control,
    Policy,
    ServerLost,
    ServerRefused,
    ServerStart,
    checked,
    refuse_strings,
    sample_seed,
)
from rlhf.tuning.rollout.servers.transfer import Transfer


class VLLM:
    """vLLM, and servers with the same `/v1/completions`. Methods as in `ServerKind`."""

    name, path = "vllm", "/v1/completions"
    counted: str | None = "/weight_info"

    def arguments(self, start: ServerStart, port: int) -> list[str]:
        arguments = ["--model", str(start.folder), "--served-model-name", "policy", "--host", "127.0.0.1"]
        arguments += ["--port", str(port), "--dtype", start.dtype, "--max-model-len", str(start.context)]
        arguments += ["--logprobs-mode", "processed_logprobs"]
        return [*arguments, *(["--enable-lora"] if start.adapters else [])]

    def environment(self, key: str = "") -> dict[str, str]:
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
        # It asks for the key below /v1 alone, not at its development endpoints.
        return own | {"HF_HUB_OFFLINE": "1"} | ({"VLLM_API_KEY": key} if key else {})

    def body(self, request: Request, policy: Policy) -> dict[str, Any]:
        refuse_strings(request)
        s = request.sampling
        body = {
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            # Sample i gets seed + i. Greedy samples are identical: one is requested, and repeated.
            "n": 1 if s.temperature == 0 else request.samples,
            "seed": sample_seed(48, request.seed, request.counter),
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "repetition_penalty": 1.0,
            # Only the request's stop ids may end a completion.
            "ignore_eos": True,
            "stop_token_ids": list(request.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }
        return body | ({"model": policy.digest} if policy.adapter else {})

    def completions(self, request: Request, answer: Any) -> list[Completion]:
        try:
            choices = sorted(answer["choices"], key=lambda c: c["index"])
            for choice in choices:
                if choice.get("prompt_token_ids") not in (None, list(request.prompt)):
                    raise ServerLost("its prompt has other token ids than the one sent")
            if any(c.get("token_ids") is None or c.get("logprobs") is None for c in choices):
                raise ServerLost("its answer lacks token ids or log-probabilities")
            pairs = [(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in choices]
        except (KeyError, TypeError, AttributeError) as e:
            raise ServerLost(f"its answer is no completion ({type(e).__name__}: {e})") from e
        return checked(request, pairs * (request.samples if request.sampling.temperature == 0 else 1))

    def answered_by(self, policy: Policy, answer: Any) -> str | None:
        return answer.get("weight_version")

    def version(self, server: Control) -> str | None:
        with contextlib.suppress(ServerRefused):
            return str(server.get("/version")["version"])
        return None

    def weights(self, server: Control, policy: Policy) -> str | None:
        with contextlib.suppress(ServerRefused):
            version: str | None = server.get("/weight_info")["weight_version"]
            return version
        return None

    def label(self, server: Control, policy: Policy) -> None:
        server.post("/update_weight_version", {"new_version": policy.weights})

    def reload(self, server: Control, policy: Policy) -> None:
        # Written before the server stops answering.
        sent, folder = (None, policy.folder()) if policy.transfer is None else (policy.transfer(), None)
        # The name goes first: if the reload fails half-way, the server must not claim either policy.
        server.post("/update_weight_version", {"new_version": "unknown"})
        server.post("/pause?mode=wait")
        try:
            if sent is None:
                server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            else:
                self._transfer(server, sent)
            server.post("/reset_prefix_cache")
        finally:
            server.post("/resume")
        self.label(server, policy)

    def _transfer(self, server: Control, sent: Transfer) -> None:
        """Has its workers read a policy's files, by the phases of its weight transfer."""
        server.post("/init_weight_transfer_engine", {"init_info": {"root": sent.root}})
        server.post("/start_weight_update")
        try:
            server.post("/update_weights", {"update_info": {"folder": sent.folder, "files": sent.files}})
        except (ServerLost, ServerRefused):
            # The workers that did not fail would refuse the next start.
            with contextlib.suppress(ServerLost, ServerRefused):
                server.post("/finish_weight_update")
            raise
        server.post("/finish_weight_update")

    def adapt(self, server: Control, policy: Policy, previous: str | None) -> None:
        assert policy.adapter is not None
        known = {m["id"] for m in server.get("/v1/models")["data"]}
        if policy.digest not in known:
            server.post("/v1/load_lora_adapter", {"lora_name": policy.digest, "lora_path": str(policy.adapter)})
        if previous in known - {policy.digest}:
            server.post("/v1/unload_lora_adapter", {"lora_name": previous})
